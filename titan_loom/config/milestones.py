"""`[hub] milestones`: the points of a run whose checkpoints are pushed, and the tags that they get."""

import re

from titan_loom.config.job_config import Training
from titan_loom.errors import UserError

_NOTATION = re.compile(r"([1-9][0-9_]*) ?(%|steps|tokens)")


def milestone_tags(milestones: list[str], training: Training) -> dict[int, list[str]]:
    """The tags of each step that is a milestone; two milestones of a short run can fall on one step.

    Raises UserError for what is no milestone, or lies beyond the end of the run.
    """
    tags: dict[int, list[str]] = {}
    for milestone in milestones:
        match = _NOTATION.fullmatch(milestone)
        number = int(match[1].replace("_", "")) if match else 0
        match match and match[2]:
            case "%":
                step, tag = -(-training.num_steps * number // 100), f"checkpoint-{number:03d}pct"
            case "steps":
                step, tag = number, f"checkpoint-{number}steps"
            case "tokens":
                step, tag = -(-number // training.tokens_per_step), f"checkpoint-{number}tokens"
            case _:
                raise UserError(
                    f'hub.milestones has {milestone!r}; each must be a number with its unit, as in "25%", "1000 steps" '
                    'or "2_000_000 tokens"'
                )
        if step > training.num_steps:
            raise UserError(
                f"hub.milestones has {milestone!r}, which is step {step:,}; the run has {training.num_steps:,} steps"
            )
        tags.setdefault(step, []).append(tag)
    return tags
