"""Bounds of numbers, stated where the field is, as in `steps: Positive[int]`, and one walk that checks them all."""

import math
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from titan_loom.errors import UserError

T = TypeVar("T")


class Bound(NamedTuple):
    """What holds for every value of a field that is annotated with it."""

    allowed: str
    """Completes "it must be"."""
    holds: Callable[[float], bool]


def at_most(most: int) -> Bound:
    return Bound(f"at most {most:,}", lambda value: value <= most)


_ABOVE_0 = Bound("greater than 0", lambda value: value > 0)
_ABOVE_1 = Bound("greater than 1", lambda value: value > 1)
_FINITE = Bound("finite", math.isfinite)

Positive = Annotated[T, _ABOVE_0, _FINITE]
PositiveOrInfinite = Annotated[T, _ABOVE_0]
NotNegative = Annotated[T, Bound("0 or greater", lambda value: value >= 0), _FINITE]
AboveOne = Annotated[T, _ABOVE_1, _FINITE]
AboveOneOrInfinite = Annotated[T, _ABOVE_1]
Fraction = Annotated[float, Bound("from 0 to 1", lambda value: 0 <= value <= 1)]
BelowOne = Annotated[float, Bound("at least 0 and less than 1", lambda value: 0 <= value < 1)]
BelowHundred = Annotated[float, Bound("at least 0 and less than 100", lambda value: 0 <= value < 100)]


def check_bounds(config: Any, prefix: str = "") -> None:
    """Check every number in the dataclass `config`, and in those that it holds.

    Args:
        prefix: the key of `config` itself, for the message.

    Raises:
        UserError: the first number out of its bounds.
    """
    for name, kind in get_type_hints(type(config), include_extras=True).items():
        _check(kind, getattr(config, name), f"{prefix}.{name}" if prefix else name)


def bounds_of(kind: Any) -> tuple[Bound, ...]:
    """The bounds in a field's annotation, `Positive[int] | None` say."""
    if get_origin(kind) is Annotated:
        return kind.__metadata__
    return tuple(bound for option in get_args(kind) for bound in bounds_of(option))


def _check(kind: Any, value: Any, key: str) -> None:
    if is_dataclass(value):
        check_bounds(value, key)
    elif isinstance(value, dict | list):
        of_item = get_args(kind)[-1] if get_args(kind) else Any
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            _check(of_item, item, f"{key}.{name}")
    elif value is not None:
        for allowed, holds in bounds_of(kind):
            if not holds(value):
                raise UserError(f"{key} is {value}; it must be {allowed}")
