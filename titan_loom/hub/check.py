"""The proof of an export: its files, loaded by its own code, give the logits that they should."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from titan_loom.errors import RunError
from titan_loom.hub.families import hf_classes_in
from titan_loom.tools.random import derive_seed

TOLERANCE = 1e-5
"""Largest difference of two logits, in units of the largest logit where that is above 1."""


def check_tokens(vocab_size: int, max_seq_len: int) -> Tensor:
    """The ids that exports are checked on: (2, 48 at most) int64, any of the vocabulary."""
    generator = torch.Generator().manual_seed(derive_seed(0, "export check"))
    return torch.randint(vocab_size, (2, min(48, max_seq_len)), generator=generator)


@torch.no_grad()
def check_export(folder: Path, name: str, tokens: Tensor, expected: Tensor) -> None:
    """Load the export of family `name` in `folder`, and compare its logits for `tokens` with `expected`, in fp32.

    Raises RunError when anything cannot be loaded, is missing or too many, or when the logits differ.
    """
    try:
        with quiet_transformers(), hf_classes_in(folder, name) as classes:
            # In the dtype of the files, which are let go again before there are fp32 weights as well.
            model, info = classes.model.from_pretrained(folder, dtype="auto", output_loading_info=True)
            logits = None if any(info.values()) else model.float()(tokens, use_cache=False).logits
    except Exception as error:  # whatever foreign code meets in foreign files
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise RunError(f"the export does not load: {reason}") from error
    if logits is None:
        found = "; ".join(f"{what}: {', '.join(map(str, names))}" for what, names in info.items() if names)
        raise RunError(f"the export's tensors are not the model's: {found}")
    difference = (logits - expected).abs().max().item()
    allowed = TOLERANCE * max(1.0, expected.abs().max().item())
    if not difference <= allowed:  # nor NaN
        raise RunError(f"the export's logits are up to {difference:.3g} off the trainer's; {allowed:.3g} is allowed")


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars and reports; errors are raised either way."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
