"""What ranks agree on before they train."""

import os
import time
from datetime import timedelta

import pytest
import torch

from tests import processes
from titan_loom.errors import UserError


def _check(configs: list[dict]) -> str | None:
    import torch.distributed as dist

    from titan_loom.config.job_config import Comm
    from titan_loom.distributed.process_group import check_same_on_all_ranks, init_process_group, local_device

    init_process_group(Comm(init_timeout_seconds=20), local_device())
    try:
        check_same_on_all_ranks(configs[dist.get_rank()])
    except UserError as error:
        return str(error)
    finally:
        dist.destroy_process_group()
    return None


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        ({"training": {"steps": 3}, "debug": {"seed": 0}}, None),
        ({"training": {"steps": 3}, "debug": {"seed": 9}}, "debug.seed is 0 on rank 0 and 9 on rank 1; all processes"),
        ({"training": {"steps": 3}, "debug": {}}, "debug.seed is 0 on rank 0 and None on rank 1; all processes"),
    ],
)
def test_ranks_with_different_configurations_do_not_train_together(other, sentence):
    """They once did, each half of a matrix at its own learning rate."""
    found = processes.run(_check, 2, [{"training": {"steps": 3}, "debug": {"seed": 0}}, other])
    assert [message and message.startswith(sentence) for message in found] == [sentence and True] * 2


def _work_longer_than_the_timeout() -> tuple[int, bool]:
    import torch.distributed as dist

    from titan_loom.config.job_config import Comm
    from titan_loom.distributed.process_group import from_rank0, init_process_group, local_device

    def work() -> int:
        time.sleep(1)
        return os.getpid()

    init_process_group(Comm(init_timeout_seconds=20), local_device())
    dist.group.WORLD._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=0.5))
    found = from_rank0(work)
    try:
        if dist.get_rank() == 0:
            work()
        dist.barrier()
        timed_out = False
    except RuntimeError:
        timed_out = True
    dist.destroy_process_group()
    return found, timed_out


def test_ranks_wait_for_work_of_rank_0_alone_however_long_it_takes():
    """A download at start once ended the other ranks."""
    (found, _), (same, timed_out) = processes.run(_work_longer_than_the_timeout, 2)
    assert found == same and timed_out
