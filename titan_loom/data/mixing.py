"""Which source gives each sequence: a credit scheduler in exact integers, one for the whole run.

The next unit of n tokens goes to the source with the largest `share * (T + n) - consumed`, T being all that was
handed out; ties go to the source declared first. With integer weights w (of sum W) and full units that is the largest
`w * (k + 1) - W * count` for unit k, which repeats after W units: after W picks every credit is a multiple of W,
above -W (only a positive credit is ever reduced, by W) and the credits sum to 0, so all are 0 again. So any step is
known at once, on every rank, without communication.

Stages of a curriculum are mixed each on its own: a stage begins with the first unit whose first token is at or after
its boundary, with no credits, so the consumption of every stage is within one unit of its shares at any time.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Literal

Pick = tuple[int, int]
"""(source, supervised tokens); (-1, 0) is a row that draws nothing."""


def integer_weights(shares: Sequence[float]) -> tuple[int, ...]:
    """The smallest integers in the proportion of `shares`, which are read as the decimal fractions that they print
    as."""
    fractions = [Fraction(str(share)) for share in shares]
    denominator = math.lcm(*(fraction.denominator for fraction in fractions))
    numerators = [int(fraction * denominator) for fraction in fractions]
    divisor = math.gcd(*numerators)
    return tuple(numerator // divisor for numerator in numerators)


class Mixer:
    """Picks of a run of `steps` steps of `global_batch_size` sequences of `seq_len` tokens.

    Args:
        stages: (length in tokens, shares of the sources in order of declaration), at least one; only the proportion of
            shares matters. The last lasts for ever, whatever its length.
        total_tokens: supervised tokens of the run, met exactly by cutting the last step; None when all steps are full.
        unit: `sequence` or `step`, what is given to one source at a time. With `sequence`, the totals by source of the
            last stage are exact as well, as far as the last step's rows allow.
    """

    def __init__(
        self,
        stages: Sequence[tuple[int | None, Sequence[float]]],
        *,
        seq_len: int,
        global_batch_size: int,
        total_tokens: int | None,
        steps: int,
        unit: Literal["sequence", "step"] = "sequence",
    ):
        self._seq_len = seq_len
        self._batch = global_batch_size
        self._total_tokens = total_tokens
        self._last_step = None if total_tokens is None else steps - 1
        self._units_per_step = global_batch_size if unit == "sequence" else 1
        self._unit_tokens = global_batch_size // self._units_per_step * seq_len
        self._stages = [_Stage(shares) for _, shares in stages]
        ends = accumulate(tokens for tokens, _ in stages[:-1])
        self._begins = [0, *(-(-end // self._unit_tokens) for end in ends)]
        """The first unit of each stage."""

    def picks(self, step: int) -> list[Pick]:
        """The picks of 0-based `step`, in order of their global pick number."""
        if step == self._last_step:
            return self._last_picks(step)
        first = step * self._units_per_step
        sources = [self._source(unit) for unit in range(first, first + self._units_per_step)]
        return [(source, self._seq_len) for source in sources for _ in range(self._batch // self._units_per_step)]

    def positions(self, step: int) -> list[Pick]:
        """What each position of the global batch of `step` gets. Position p takes pick (p + step) mod B: the rotation
        gives every lane every source in its share."""
        picks = self.picks(step)
        return [picks[(position + step) % self._batch] for position in range(self._batch)]

    def first_shares(self) -> list[Fraction]:
        """The shares at the start of the run."""
        weights = self._stages[0].weights
        return [Fraction(weight, sum(weights)) for weight in weights]

    def _stage_at(self, unit: int) -> tuple["_Stage", int]:
        """The stage of a unit and its first unit. Of stages that begin at the same unit, the last."""
        index = bisect_right(self._begins, unit) - 1
        return self._stages[index], self._begins[index]

    def _source(self, unit: int) -> int:
        stage, begin = self._stage_at(unit)
        return stage.source(unit - begin)

    def _last_picks(self, step: int) -> list[Pick]:
        """Hands out what is left of `total_tokens`, a row at a time and no row more than a sequence."""
        first = step * self._units_per_step
        left = self._total_tokens - first * self._unit_tokens
        if self._units_per_step == 1:
            stage, begin = self._stage_at(first)
            consumed = [count * self._unit_tokens for count in stage.counts(first - begin)]
            source = stage.neediest(consumed, sum(consumed) + left, range(len(consumed)))
            rows = [min(self._seq_len, max(0, left - row * self._seq_len)) for row in range(self._batch)]
            return [(source, tokens) if tokens else (-1, 0) for tokens in rows]
        # Rows of stages that end within this step are full; the shares of the last are met by cutting.
        stage, begin = self._stage_at(first + (left - 1) // self._seq_len)
        picks = [(self._source(unit), self._seq_len) for unit in range(first, begin)]
        left -= len(picks) * self._seq_len
        consumed = [count * self._seq_len for count in stage.counts(max(first, begin) - begin)]
        targets = stage.targets(self._total_tokens - begin * self._seq_len)
        for rows_after in reversed(range(self._batch - len(picks))):
            if not left:
                picks.append((-1, 0))
                continue
            owing = [source for source, tokens in enumerate(consumed) if tokens < targets[source]]
            source = stage.neediest(consumed, sum(consumed) + self._seq_len, owing)
            owed = min(self._seq_len, targets[source] - consumed[source], left)
            # The remaining rows must be able to take the rest: total_tokens comes before the share of a source.
            tokens = max(owed, left - rows_after * self._seq_len)
            picks.append((source, tokens))
            consumed[source] += tokens
            left -= tokens
        return picks


class _Stage:
    """The credit scheduler over the units of one stage, counted from its first."""

    def __init__(self, shares: Sequence[float]):
        self.weights = integer_weights(shares)
        self._period = sum(self.weights)
        self._order: list[int] = []
        self._credits = [0] * len(self.weights)

    def source(self, unit: int) -> int:
        """The source of a full unit, from the order of one period, which grows as it is asked for."""
        unit %= self._period
        while len(self._order) <= unit:
            self._credits = [credit + weight for credit, weight in zip(self._credits, self.weights, strict=True)]
            source = self._credits.index(max(self._credits))
            self._credits[source] -= self._period
            self._order.append(source)
        return self._order[unit]

    def counts(self, units: int) -> list[int]:
        """Of the first `units` full units, those of each source."""
        periods, rest = divmod(units, self._period)
        if rest:
            self.source(rest - 1)
        return [weight * periods + self._order[:rest].count(source) for source, weight in enumerate(self.weights)]

    def neediest(self, consumed: list[int], tokens: int, sources: Sequence[int]) -> int:
        """Which of `sources` is furthest behind its share of `tokens`."""
        return max(sources, key=lambda source: self.weights[source] * tokens - self._period * consumed[source])

    def targets(self, total_tokens: int) -> list[int]:
        """Tokens of each source: its share of the total, by largest remainder where that is no whole number."""
        exact = [divmod(weight * total_tokens, self._period) for weight in self.weights]
        targets = [whole for whole, _ in exact]
        by_remainder = sorted(range(len(exact)), key=lambda source: -exact[source][1])
        for source in by_remainder[: total_tokens - sum(targets)]:
            targets[source] += 1
        return targets
