"""Validators of constructor options: each says what was given and what is allowed, and coerces nothing."""

from collections.abc import Callable
from typing import Any

Validator = Callable[[Any, Any, Any], None]


def whole(minimum: int, maximum: int | None = None) -> Validator:
    """An int in [minimum, maximum]; no upper limit with None. A bool is none."""
    allowed = f"an int >= {minimum}" if maximum is None else f"an int in [{minimum}, {maximum}]"

    def validate(_: Any, field: Any, value: Any) -> None:
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(_refusal(field, value, allowed))
        if value < minimum or (maximum is not None and value > maximum):
            raise ValueError(_refusal(field, value, allowed))

    return validate


def number(minimum: float, maximum: float | None = None) -> Validator:
    """A finite int or float in [minimum, maximum]; no upper limit with None."""
    allowed = f"a finite number >= {minimum:g}" if maximum is None else f"a number in [{minimum:g}, {maximum:g}]"

    def validate(_: Any, field: Any, value: Any) -> None:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise TypeError(_refusal(field, value, allowed))
        if not minimum <= value < float("inf") or (maximum is not None and value > maximum):
            raise ValueError(_refusal(field, value, allowed))

    return validate


def switch(_: Any, field: Any, value: Any) -> None:
    """True or false."""
    if not isinstance(value, bool):
        raise TypeError(_refusal(field, value, "true or false"))


def one_of(*choices: str) -> Validator:
    """One of some words."""

    def validate(_: Any, field: Any, value: Any) -> None:
        if value not in choices:
            raise ValueError(_refusal(field, value, "one of " + ", ".join(choices)))

    return validate


def _refusal(field: Any, value: Any, allowed: str) -> str:
    return f"{field.alias or field.name}: got {value!r}; allowed: {allowed}."
