"""The spike guard: keeps an update from being made when the loss or the gradient says that it would do harm.

Each segment of loops is judged by the loss of the whole global batch against the average of those that were accepted
before (thresholds as in arXiv 2610.01153). All ranks decide on the same numbers, at the cost of one read of the device
for each segment. Values that are not finite are never accepted.
"""

import math
from typing import Any

import torch
from torch import Tensor

from titan_loom.config import job_config
from titan_loom.distributed.process_group import sum_in_rank_order


class Guard:
    """Judges losses; `skipped_in_a_row` and `passed_over` say what came of it."""

    def __init__(self, config: job_config.Guard):
        self.config = config
        self.baselines: dict[int, float] = {}
        """Moving average of the accepted losses of each segment."""
        self.skipped_in_a_row = 0
        """Steps since one was accepted as a whole."""
        self.passed_over: list[list[int]] = []
        """First and last step of every run of steps whose updates were rolled back."""

    def judge(self, step: int, segment: int, loss_sum: Tensor, num_tokens: int, grad_norm: Tensor) -> str | None:
        """What speaks against the update of a segment, in words, the same on every rank; None when nothing does.

        Args:
            segment: its place in the step, from 0.
            loss_sum: scalar, sum over this rank's share of the `num_tokens` supervised tokens.
            grad_norm: scalar, of the summed gradients.
        """
        total, norm = sum_in_rank_order(torch.stack([loss_sum, grad_norm])).tolist()
        loss, baseline = total / num_tokens, self.baselines.get(segment)
        spike = find_spike(loss, norm, baseline, self.config, is_warming_up=step <= self.config.delta_warmup_steps)
        if spike is None:
            decay = self.config.ema_decay
            self.baselines[segment] = loss if baseline is None else decay * baseline + (1 - decay) * loss
        return spike

    def count(self, *, is_accepted: bool) -> None:
        """Note how a step has ended."""
        self.skipped_in_a_row = 0 if is_accepted else self.skipped_in_a_row + 1

    def roll_back(self, state: dict[str, Any], first: int, last: int) -> None:
        """Take the averages of `state`, after which the steps `first` to `last` have come to nothing."""
        self.baselines = _baselines(state)
        self.passed_over.append([first, last])

    def state_dict(self) -> dict[str, Any]:
        """Plain data that JSON can hold."""
        return {
            "baselines": {str(segment): value for segment, value in self.baselines.items()},
            "skipped_in_a_row": self.skipped_in_a_row,
            "passed_over": self.passed_over,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.baselines = _baselines(state)
        self.skipped_in_a_row, self.passed_over = state["skipped_in_a_row"], state["passed_over"]


def find_spike(
    loss: float, grad_norm: float, baseline: float | None, config: job_config.Guard, *, is_warming_up: bool
) -> str | None:
    """Why a `loss` is a spike above `baseline`, the average so far (None: there is none yet); None if it is none."""
    if not math.isfinite(loss):
        return "the loss is not finite"
    if not math.isfinite(grad_norm):
        return "a gradient is not finite"
    if not config.enable or baseline is None:
        return None
    rise = loss - baseline
    is_spike = (
        (rise >= max(config.delta, config.relative_delta * baseline) and not is_warming_up)
        or rise >= config.max_delta
        or loss >= config.max_ratio * baseline
    )
    return f"the loss rose to {loss:.4f} from an average of {baseline:.4f}" if is_spike else None


def _baselines(state: dict[str, Any]) -> dict[int, float]:
    return {int(segment): value for segment, value in state["baselines"].items()}
