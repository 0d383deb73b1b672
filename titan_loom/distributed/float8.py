"""Linear layers whose matrix products are in float8 (torchao), forward and backward; weights stay as they are stored.

On hardware without float8 the same products are emulated: the numbers of a GPU's run, slowly, on any machine.
"""

from dataclasses import replace

import torch
from torch import nn

from titan_loom.config import job_config
from titan_loom.errors import UserError
from titan_loom.tools.logging import logger

MULTIPLE = 16  # of a float8 product's dimensions
FIRST_CAPABILITY = (8, 9)  # Ada, Hopper and later


def apply_float8(model: nn.Module, config: job_config.Float8, device: torch.device) -> None:
    """Convert the linear layers of `model.blocks` in place, when `[float8]` says so.

    Call it before checkpointing, compiling and sharding. Left out are layers that a filter names, and layers that the
    hardware could not multiply, also where it is emulated.

    Raises:
        UserError: torchao is not installed, the device has no float8, a filter names no layer, or no layer is left.
    """
    if not config.enable:
        return
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise UserError(
            "float8.enable is true, but torchao cannot be imported; install titan-loom[float8], or it must be false"
        ) from error
    if not config.emulate and not _has_float8(device):
        raise UserError(
            f"float8.emulate is false, but this {device.type} has no float8 products (CUDA compute capability 8.9 or "
            "later); it must be true here"
        )
    layers = {name: layer for name, layer in model.blocks.named_modules() if isinstance(layer, nn.Linear)}
    for name in config.filter_fqns:
        if not any(name in layer for layer in layers):
            raise UserError(
                f"float8.filter_fqns names {name!r}, which is in no linear layer's name; those of a block are: "
                + ", ".join(layer.partition(".")[2] for layer in layers if layer.startswith("0."))
            )
    chosen = {
        name
        for name, layer in layers.items()
        if not any(left_out in name for left_out in config.filter_fqns)
        and layer.in_features % MULTIPLE == layer.out_features % MULTIPLE == 0
    }
    if not chosen:
        raise UserError(
            f"float8.enable is true, but none of the {len(layers)} linear layers is converted: float8.filter_fqns must "
            f"leave one whose dimensions are multiples of {MULTIPLE}"
        )
    recipe = replace(Float8LinearConfig.from_recipe_name(config.recipe_name), emulate=config.emulate)
    convert_to_float8_training(model.blocks, config=recipe, module_filter_fn=lambda _, name: name in chosen)
    how = "emulated float8" if config.emulate else "float8"
    logger.info(f"Converted {len(chosen)} of {len(layers)} linear layers to {how} ({config.recipe_name})")


def _has_float8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY
