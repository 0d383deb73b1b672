"""From a model on the meta device to one that trains on all processes: what is done to it, in order."""

import torch
from torch import nn

from titan_loom.config import job_config
from titan_loom.distributed.activation_checkpoint import apply_activation_checkpoint
from titan_loom.distributed.compile import apply_compile
from titan_loom.distributed.data_parallel import DataParallel, apply_data_parallel
from titan_loom.distributed.init import materialize
from titan_loom.distributed.mesh import build_mesh
from titan_loom.distributed.units import plan_units
from titan_loom.tools.logging import logger


def parallelize(
    model: nn.Module,
    device: torch.device,
    *,
    parallelism: job_config.Parallelism,
    activation_checkpoint: job_config.ActivationCheckpoint,
    compile: job_config.Compile,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    micro_batches: int,
    seed: int,
) -> DataParallel:
    """Checkpoint, compile, shard and initialise `model`, in place; every rank calls it.

    Args:
        param_dtype: dtype of the gathered parameters and of the activations.
        reduce_dtype: dtype of the gradients' reduction.
        micro_batches: of an optimizer step, for the log.
        seed: of the initial weights, which do not depend on anything else here.

    Returns:
        What has to be told about every micro-batch.

    Raises:
        UserError: the model has no loops to do something with, or torch is too old.
    """
    apply_activation_checkpoint(model, activation_checkpoint)
    apply_compile(model, compile)
    mesh = build_mesh(device, parallelism)
    units = plan_units(model, mesh, parallelism, param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    data_parallel = apply_data_parallel(model, units, mesh, param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    logger.info(units.describe(micro_batches))
    materialize(model, device, seed)
    return data_parallel
