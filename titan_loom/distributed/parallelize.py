"""What is done to a model on the meta device so that it trains on all processes, in order. Memory comes after it."""

import torch
from torch import nn

from titan_loom.config import job_config
from titan_loom.distributed.activation_checkpoint import apply_activation_checkpoint
from titan_loom.distributed.compile import apply_compile
from titan_loom.distributed.data_parallel import DataParallel, apply_data_parallel
from titan_loom.distributed.float8 import apply_float8
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
    float8: job_config.Float8,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    cpu_offload: bool,
    micro_batches: int,
) -> DataParallel:
    """Convert, checkpoint, compile and shard `model`, in place, without allocating it; every rank calls it.

    Args:
        param_dtype: dtype of the gathered parameters and of the activations.
        reduce_dtype: dtype of the gradients' reduction.
        cpu_offload: the parameters will be allocated in the host's memory.
        micro_batches: of an optimizer step, for the log.

    Returns:
        What has to be told about every micro-batch.

    Raises:
        UserError: the model has no loops to do something with, or torch is too old, or there is no
            float8.
    """
    apply_float8(model, float8, device)
    apply_activation_checkpoint(model, activation_checkpoint)
    apply_compile(model, compile, device)
    mesh = build_mesh(device, parallelism)
    units = plan_units(model, mesh, parallelism, param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    data_parallel = apply_data_parallel(
        model, units, mesh, param_dtype=param_dtype, reduce_dtype=reduce_dtype, cpu_offload=cpu_offload
    )
    logger.info(units.describe(micro_batches))
    if cpu_offload:
        logger.info("Parameters, gradients and the optimizer's state stay in the host's memory")
    return data_parallel
