"""torch.compile, block by block: one graph serves every layer and every visit, the loop stays in eager.

One graph over the whole loop would recompile with the number of loops, and with checkpointing it keeps several times
the memory of eager (pytorch#193193).
"""

from torch import nn

from titan_loom.config import job_config
from titan_loom.tools.logging import logger


def apply_compile(model: nn.Module, compile: job_config.Compile) -> None:
    """Compile the blocks of `model` in place; parameter names stay as they are."""
    for block in model.blocks:
        block.compile(backend=compile.backend, dynamic=False)
    logger.info(f"Compiling {len(model.blocks)} blocks with torch.compile ({compile.backend})")
