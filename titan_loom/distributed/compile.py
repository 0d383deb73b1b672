"""torch.compile, block by block: one graph serves every layer and every visit, the loop stays in eager.

One graph over the whole loop would recompile with the number of loops, and with checkpointing it keeps several times
the memory of eager (pytorch#193193). Only `forward` is compiled: the hooks of FSDP2 around it stay outside the graph.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from titan_loom.config import job_config
from titan_loom.errors import UserError
from titan_loom.tools.logging import logger


def check_backend(config: job_config.Compile) -> None:
    """Raises UserError: `compile.backend` is needed and none of torch.compile's."""
    if config.enable and config.backend not in torch.compiler.list_backends(exclude_tags=()):
        known = ", ".join(torch.compiler.list_backends())
        raise UserError(
            f"compile.backend is {config.backend!r}; it must be one that torch.compile knows ({known}, or one to debug "
            "with, such as aot_eager)"
        )


def apply_compile(model: nn.Module, config: job_config.Compile, device: torch.device) -> None:
    """Compile the blocks of `model` in place, when `[compile]` says so; parameter names stay as they are."""
    if not config.enable or "model" not in config.components:
        return
    mode = config.mode
    if mode == "reduce-overhead":
        if device.type == "cuda":
            # Every forward may overwrite what the graphs of the one before have returned.
            model.register_forward_pre_hook(lambda *_: torch.compiler.cudagraph_mark_step_begin())
        else:
            logger.warning(
                f"compile.mode is 'reduce-overhead', which needs CUDA; on this {device.type} it is 'default'"
            )
            mode = "default"
    compile = partial(torch.compile, backend=config.backend, mode=None if mode == "default" else mode)
    for block in model.blocks:
        block.forward = compile(block.forward, dynamic=False, fullgraph=True)
    logger.info(f"Compiling {len(model.blocks)} blocks with torch.compile ({config.backend}, mode {mode})")


def compiled(function: Callable, component: str, config: job_config.Compile) -> Callable:
    """`function`, compiled when `[compile]` names its component; never as a CUDA graph."""
    if config.enable and component in config.components:
        logger.info(f"Compiling the {component} with torch.compile ({config.backend})")
        return torch.compile(function, backend=config.backend, dynamic=False, fullgraph=True)
    return function
