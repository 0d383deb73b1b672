"""`titan-loom generate`: continues a text with an export or straight from a checkpoint, word by word.

Either way the model is this package's own code for transformers: whatever code lies in the folder is not run.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro
from torch import nn

from titan_loom.data.tokenizer import Tokenizer, load_tokenizer
from titan_loom.errors import UserError
from titan_loom.hub.check import quiet_transformers
from titan_loom.hub.checkpoints import WAY_ON, find_checkpoint, read_tensors
from titan_loom.hub.convert import tokenizer_of
from titan_loom.hub.exports import read_args, read_weights
from titan_loom.hub.families import decode_args, export_of, hf_classes, require_transformers, to_hf_config
from titan_loom.models import build_model
from titan_loom.tools.random import derive_seed
from titan_loom.training.checkpoint_files import read_state


@dataclass(frozen=True, kw_only=True)
class GenerateArgs:
    """Continue a text."""

    path: Annotated[Path, tyro.conf.Positional]
    """An export, a checkpoint (a `step-N` folder) or a run, whose newest checkpoint is taken."""

    prompt: str = ""
    """The text to continue. Default: the start of a document."""

    max_new_tokens: int = 128
    """Tokens to generate at most; the end of the document ends it too."""

    temperature: float = 0.8
    """Divides the logits before sampling; 0 always takes the most likely token."""

    top_k: int | None = None
    """Sample from this many of the most likely tokens only."""

    top_p: float | None = None
    """Sample from the fewest tokens only that have this probability together."""

    num_loops: int | None = None
    """Passes over the looped stack. Default: as trained."""

    seed: int = 0
    """Decides what is sampled."""


def main(argv: list[str]) -> None:
    """Print the prompt and what follows it, as it comes. Raises UserError for what cannot be loaded or done."""
    args = tyro.cli(
        GenerateArgs, prog="titan-loom generate", args=argv, config=(tyro.conf.OmitArgPrefixes,), use_underscores=True
    )
    for name, is_allowed, allowed in (
        ("max_new_tokens", args.max_new_tokens > 0, "above 0"),
        ("temperature", args.temperature >= 0, "0 or more"),
        ("top_k", args.top_k is None or args.top_k > 0, "above 0"),
        ("top_p", args.top_p is None or 0 < args.top_p <= 1, "above 0 and at most 1"),
    ):
        if not is_allowed:
            raise UserError(f"{name} is {getattr(args, name)}; it must be {allowed}")
    generate(args)


def generate(args: GenerateArgs) -> list[int]:
    """The ids of the prompt and of what follows; also prints them, as text. Raises as `main`."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, tokenizer = load(args.path, args.num_loops)
    model.to(device)
    (encoded,) = tokenizer.encode_batch([args.prompt])
    ids = encoded[:-1].tolist() or [tokenizer.eos_id]  # a document follows the end of another
    if len(ids) + args.max_new_tokens > (context := model.config.max_position_embeddings):
        raise UserError(
            f"the prompt has {len(ids)} tokens and max_new_tokens is {args.max_new_tokens}; together they must be at "
            f"most the model's context, {context}"
        )
    from transformers import TextStreamer

    sampling = {"temperature": args.temperature, "top_k": args.top_k or 0, "top_p": args.top_p or 1.0}
    torch.manual_seed(derive_seed(args.seed, "generate"))
    output = model.generate(
        torch.tensor([ids], device=device),
        max_new_tokens=args.max_new_tokens,
        eos_token_id=tokenizer.eos_id,
        pad_token_id=tokenizer.eos_id,
        num_loops=args.num_loops,
        streamer=TextStreamer(tokenizer),
        **({"do_sample": True, **sampling} if args.temperature else {"do_sample": False}),
    )
    return output[0].tolist()


@torch.no_grad()
def load(path: Path, num_loops: int | None = None) -> tuple[nn.Module, Tokenizer]:
    """The transformers model, in fp32 on the CPU, and the tokenizer of an export, or of a checkpoint or run.

    Raises UserError when `path` is neither, is damaged, or holds a model that cannot run `num_loops` times.
    """
    require_transformers(f"loading {path}")
    is_export = (path / "config.json").exists()
    if is_export:
        name, args = read_args(path)
    else:
        path = find_checkpoint(path)
        state = read_state(path, WAY_ON)
        name = state["model"]["name"]
        args = decode_args(name, state["model"]["args"])
    args.visits(num_loops)

    export, classes = export_of(name), hf_classes(name)
    with quiet_transformers(), torch.device("meta"):
        own = build_model(args).state_dict()
        model = classes.model(classes.config(**to_hf_config(name, args)))
    model.to_empty(device="cpu").tie_weights()
    names = {key: export.to_hf_tensor(key, tensor)[0] for key, tensor in own.items()}
    tensors = {key: model.state_dict()[names[key]].view(tensor.shape) for key, tensor in own.items()}
    if is_export:
        for key, tensor in read_weights(path, name, args).items():
            tensors[key].copy_(tensor)
        return model.eval(), load_tokenizer(str(path))
    read_tensors(path, state, {f"model.{key}": tensor for key, tensor in tensors.items()})
    return model.eval(), tokenizer_of(path, state, None)
