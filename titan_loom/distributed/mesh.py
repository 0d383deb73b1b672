"""The device mesh: how many copies of the parameters there are, and over how many ranks each is sharded."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titan_loom.config import job_config
from titan_loom.tools.logging import logger

REPLICATE, SHARD = "dp_replicate", "dp_shard"


def build_mesh(device: torch.device, config: job_config.Parallelism) -> DeviceMesh:
    """The mesh of all processes that `[parallelism]` describes; the degrees multiply to their number.

    With 2 copies, each over 4 ranks:

                        dp_shard: parameters are gathered and gradients scattered along a row
                      0     1     2     3
        dp_replicate  4     5     6     7      gradients are summed along a column, once for each optimizer step

    The batch is split over all ranks in the order of their numbers. A mesh has only the axes that are used:

        dp_shard                        FSDP2, also of a single process
        dp_replicate                    DDP: more than one copy, none of them sharded
        dp_replicate x dp_shard         HSDP; a row should be the GPUs of one machine
    """
    replicate = config.data_parallel_replicate_degree
    shard = dist.get_world_size() // replicate
    axes = {REPLICATE: replicate, SHARD: shard}
    used = {name: size for name, size in axes.items() if size > 1} or {SHARD: 1}
    logger.info(f"Building {len(used)}-D device mesh with {list(used)}, {list(used.values())}")
    return init_device_mesh(device.type, tuple(used.values()), mesh_dim_names=tuple(used))
