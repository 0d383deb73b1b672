"""Activation checkpointing: backward computes again what forward did not keep (arXiv 1604.06174).

The region that is computed again is one visit of a block or one pass over the looped stack. Functions are wrapped,
never modules, so no parameter changes its name. Inside a compiled block the compiler does the recomputation.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from titan_loom.config import job_config
from titan_loom.errors import UserError
from titan_loom.models.layers.expert_sum import expert_sum
from titan_loom.tools.logging import logger

_aten = torch.ops.aten
SAVED_OPS = {
    _aten.mm.default,
    _aten.bmm.default,
    _aten.addmm.default,
    _aten._scaled_mm.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten.topk.default,  # a choice of experts must not turn out otherwise the second time
    expert_sum._opoverload,
}


def apply_activation_checkpoint(model: nn.Module, config: job_config.ActivationCheckpoint) -> None:
    """Checkpoint the visits of `model.blocks`, or the passes of `model.run_loop` and the visits outside it, in place.

    Call it before compiling. With `mode = "none"` nothing happens.

    Raises:
        UserError: loops are to be checkpointed, but the model's schedule is a list without them.
    """
    if config.mode == "none":
        return
    wrap = _selective if config.mode == "selective" else _full
    in_loops: tuple[int, ...] = ()
    if config.per == "loop":
        in_loops = model.args.loop_layers
        if not in_loops:
            raise UserError("activation_checkpoint.per is 'loop'; with model.args.schedule it must be 'visit'")
        model.run_loop = _full_in_whole(model.run_loop)
    for layer, block in enumerate(model.blocks):
        if layer not in in_loops:
            block.forward = wrap(block.forward)
    logger.info(f"Applied {config.mode} activation checkpointing per {config.per}")


def _full(function: Callable) -> Callable:
    def checkpointed(*args):
        # Nothing random happens in a block, so there is no generator's state to keep.
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)

    return checkpointed


def _selective(function: Callable) -> Callable:
    contexts = partial(create_selective_checkpoint_contexts, _policy)

    def checkpointed(*args):
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)

    return checkpointed


def _full_in_whole(function: Callable) -> Callable:
    """As `_full`, but recomputation runs to the end: hooks of sharded blocks inside must not be left half-way."""
    checkpointed = _full(function)

    def in_whole(*args):
        with set_checkpoint_early_stop(False):
            return checkpointed(*args)

    return in_whole


def _policy(_context, op, *_args, **_kwargs) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in SAVED_OPS else CheckpointPolicy.PREFER_RECOMPUTE
