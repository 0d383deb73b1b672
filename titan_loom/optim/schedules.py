"""What changes during a run: the learning rate by steps (warm-up, stable, decay), other values by tokens seen.

Pure functions of the step or of the tokens, both counted from 0 and before the step: there is no state to save.
"""

import math
from dataclasses import dataclass

from titan_loom.config import job_config


class Schedule:
    """The learning rate's schedule as `[lr_scheduler]` and the length of the run give it."""

    def __init__(self, config: job_config.LRScheduler, training: job_config.Training):
        self.config = config
        self.total_steps = config.total_steps if config.total_steps is not None else training.num_steps
        if config.warmup_tokens is not None:
            warmup_steps = -(-config.warmup_tokens // training.tokens_per_step)
        else:
            warmup_steps = config.warmup_steps or 0
        # A trial of a few steps of a long recipe: the warm-up is cut to the run, and the decay to what it leaves.
        self.warmup_steps = min(warmup_steps, self.total_steps)
        self.decay_start = max(self.warmup_steps, self.total_steps - round(self.total_steps * config.decay_ratio))

    def lr_factor(self, step: int) -> float:
        """Fraction of every group's peak learning rate in `step`, the first being 0.

        It is (step + 1) / warmup_steps, then 1, then decays by (step - decay_start) / (total_steps - decay_start), so
        that `min_lr_factor` is reached after the last step. With `decay_end = "last_step"` it is a step further, and
        the last step has `min_lr_factor`. Steps beyond `total_steps` stay there.
        """
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if step < self.decay_start:
            return 1.0
        floor = self.config.min_lr_factor
        if step >= self.total_steps:
            return floor
        done = step - self.decay_start + (self.config.decay_end == "last_step")
        return floor + (1 - floor) * self._remaining(done / (self.total_steps - self.decay_start))

    def _remaining(self, progress: float) -> float:
        """What is left of a decay from 1 to 0 after `progress`, from 0 to 1, of its steps."""
        match self.config.decay_type:
            case "linear":
                return 1 - progress
            case "sqrt":
                return 1 - math.sqrt(progress)
            case "cosine":
                return (1 + math.cos(math.pi * progress)) / 2

    def describe(self) -> str:
        """The schedule in one line, for the log."""
        return (
            f"{self.warmup_steps:,} steps of warm-up, {self.decay_start - self.warmup_steps:,} flat, "
            f"{self.total_steps - self.decay_start:,} of {self.config.decay_type} decay to "
            f"{self.config.min_lr_factor:g} of the peak ({self.config.decay_end.replace('_', ' ')})"
        )


@dataclass(frozen=True)
class TokenSwitch:
    """A value that changes once, between two steps: `before` until `at_tokens` tokens have been seen, then `after`."""

    before: float
    after: float | None
    at_tokens: int | None
    """None: never."""

    def __call__(self, tokens_seen: int) -> float:
        """The value of a step before which `tokens_seen` tokens were seen."""
        return self.before if self.at_tokens is None or tokens_seen < self.at_tokens else self.after
