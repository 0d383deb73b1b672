"""How often the looped stack runs in a step, which of these loops are differentiated, and in how many segments.

The number is a pure function of the seed and the step, the same on every rank, so there is nothing to save or to
communicate. The draws are inversions of the distribution functions: no library's sampler has to stay as it is.
"""

import math
from itertools import takewhile
from statistics import NormalDist

from titan_loom.config import job_config
from titan_loom.errors import UserError
from titan_loom.models.interface import Segment
from titan_loom.models.nanocoder.args import NanoCoderArgs
from titan_loom.tools.random import derive_seed

SIGMA = 0.5  # of the log-normal rate, as in arXiv 2502.05171


class LoopPlan:
    """The loops of every step, as `[model]` and `[training]` give them for a model of `args`.

    Raises:
        UserError: there are no loops to draw or to cut, or the prelude would never learn.
    """

    def __init__(self, model: job_config.Model, training: job_config.Training, args: NanoCoderArgs, seed: int):
        self.sampling = model.loop_sampling
        self.minimum, self.maximum = model.loop_sampling_min, model.loop_sampling_max
        self.mean = model.loop_sampling_mean or args.num_loops
        self.backprop_loops, self.segment_loops = training.backprop_loops, training.segment_loops
        self._trained, self._seed = args.num_loops, seed
        if self.sampling != "fixed" and not (args.loop_layers and args.num_loops > 1):
            raise UserError(
                f"model.loop_sampling is {self.sampling!r}; it must be 'fixed' for a model that does not loop, by "
                "model.args.schedule or by model.args.num_loops = 1"
            )
        if self.segment_loops and not args.loop_layers:
            raise UserError(
                f"training.segment_loops is {self.segment_loops}; it must be 0 with model.args.schedule, which has no "
                "loops to count"
            )
        if self.backprop_loops is not None:
            self._check_truncation(args, training.allow_frozen_prelude)

    def _check_truncation(self, args: NanoCoderArgs, allow_frozen_prelude: bool) -> None:
        if not args.loop_layers:
            raise UserError(
                f"training.backprop_loops is {self.backprop_loops}; it must be unset with model.args.schedule, "
                "which has no loops to count"
            )
        prelude = sum(len(stage.layers) for stage in takewhile(lambda stage: not stage.is_loop, args.stages()))
        fewest = args.num_loops if self.sampling == "fixed" else self.minimum
        if fewest > self.backprop_loops and prelude and not allow_frozen_prelude:
            raise UserError(
                f"training.backprop_loops is {self.backprop_loops}, which cuts the {prelude} layers before the loop "
                f"off from every gradient; it must be at least {fewest}, or training.allow_frozen_prelude true"
            )

    def num_loops(self, step: int) -> int | None:
        """Loops of `step`, counted from 0; None: as the model is configured."""
        if self.sampling == "fixed":
            return None
        low, high = self.minimum, self.maximum
        if self.sampling == "uniform":
            return low + math.floor(self._uniform("uniform", step) * (high - low + 1))
        # The mean of a log-normal is exp(mu + sigma^2 / 2).
        mu = math.log(self.mean - 1) - SIGMA**2 / 2
        rate = math.exp(NormalDist(mu, SIGMA).inv_cdf(self._uniform("rate", step)))
        return min(max(1 + _poisson(rate, self._uniform("poisson", step), high), low), high)

    def segments(self, num_loops: int | None) -> list[Segment | None]:
        """What a step of `num_loops` loops (see there) trains in turn; [None]: all loops at once."""
        if not self.segment_loops:
            return [None]
        total = num_loops or self._trained
        return [Segment(start, min(start + self.segment_loops, total)) for start in range(0, total, self.segment_loops)]

    def describe(self) -> str:
        """The plan in one line, for the log."""
        drawn = f"{self._trained}"
        if self.sampling != "fixed":
            mean = f", mean {self.mean:g}" if self.sampling == "poisson-lognormal" else ""
            drawn = f"{self.sampling} from {self.minimum} to {self.maximum}{mean}"
        if self.segment_loops:
            return f"{drawn}, an optimizer step for every {self.segment_loops}"
        return f"{drawn}, differentiated: {self.backprop_loops or 'all'}"

    def _uniform(self, purpose: str, step: int) -> float:
        """Strictly between 0 and 1."""
        return (2 * (derive_seed(self._seed, "loops", purpose, step) >> 11) + 1) / 2**53


def _poisson(rate: float, uniform: float, maximum: int) -> int:
    """The smallest k, up to `maximum`, with P(X <= k) >= uniform for a Poisson variable X."""
    k, probability = 0, math.exp(-rate)
    cumulative = probability
    while cumulative < uniform and k < maximum:
        k += 1
        probability *= rate / k
        cumulative += probability
    return k
