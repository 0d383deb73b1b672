"""torch.compile, block by block: one graph serves every layer and every visit, the loop stays in eager.

One graph over the whole loop would recompile with the number of loops, and with checkpointing it keeps several times
the memory of eager (pytorch#193193). Only `forward` is compiled: the hooks of FSDP2 around it stay outside the graph.
"""

from collections.abc import Callable

import torch
from torch import nn

from titan_loom.config import job_config
from titan_loom.tools.logging import logger


def apply_compile(model: nn.Module, config: job_config.Compile) -> None:
    """Compile the blocks of `model` in place, when `[compile]` says so; parameter names stay as they are."""
    if config.enable and "model" in config.components:
        for block in model.blocks:
            block.forward = torch.compile(block.forward, backend=config.backend, dynamic=False, fullgraph=True)
        logger.info(f"Compiling {len(model.blocks)} blocks with torch.compile ({config.backend})")


def compiled(function: Callable, component: str, config: job_config.Compile) -> Callable:
    """`function`, compiled when `[compile]` names its component."""
    if config.enable and component in config.components:
        logger.info(f"Compiling the {component} with torch.compile ({config.backend})")
        return torch.compile(function, backend=config.backend, dynamic=False, fullgraph=True)
    return function
