"""Optimizer groups: every parameter belongs to exactly one, by rules that the model states."""

from collections.abc import Callable, Iterable

from torch import Tensor

NamedParameters = list[tuple[str, Tensor]]
Rule = Callable[[str, Tensor], bool]


def assign_groups(named_parameters: Iterable[tuple[str, Tensor]], rules: dict[str, Rule]) -> dict[str, NamedParameters]:
    """Group name -> its members as (name, parameter), in the model's order. A group may be empty.

    Raises:
        ValueError: a parameter that no rule takes, or more than one.
    """
    groups: dict[str, NamedParameters] = {name: [] for name in rules}
    for name, parameter in named_parameters:
        takers = [group for group, rule in rules.items() if rule(name, parameter)]
        if len(takers) != 1:
            raise ValueError(
                f"parameter {name} of shape {tuple(parameter.shape)} is in {len(takers)} optimizer groups "
                f"({', '.join(takers) or 'none'}); it must be in exactly one of {', '.join(rules)}"
            )
        groups[takers[0]].append((name, parameter))
    return groups
