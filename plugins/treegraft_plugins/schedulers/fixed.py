"""A schedule that is written down beforehand."""

from typing import Any

import attrs

from treegraft.errors import ComposeError, suggest
from treegraft.interfaces import RoundState, Scheduler, Setting


def _pattern(value: Any) -> Any:
    return tuple(value) if isinstance(value, list | tuple) else value


def _check_pattern(_: Any, field: Any, value: Any) -> None:
    if not isinstance(value, tuple) or not all(name is None or isinstance(name, str) for name in value):
        raise TypeError(f"{field.name}: got {value!r}; allowed: a list of source names, with null to stop growing.")


@attrs.frozen
class FixedScheduler(Scheduler):
    """Calls sources in a fixed order: `pattern`, repeated or truncated to the round's steps.

    `[small]` is the standard tree of one drafter, `[middle, small]` calls the middle at steps 1, 3, 5, and `[]` never
    drafts: plain decoding.

    Args:
        pattern: names of sources; null stops growing there.
    """

    pattern: tuple[str | None, ...] = attrs.field(converter=_pattern, validator=_check_pattern)

    def decide(self, state: RoundState) -> str | None:
        return self.pattern[len(state.steps) % len(self.pattern)] if self.pattern else None

    def bind(self, setting: Setting) -> None:
        for name in self.pattern:
            if name is not None and name not in setting.sources:
                known = ", ".join(setting.sources) or "none"
                raise ComposeError(
                    "scheduler.pattern",
                    f"no source named {name!r}.",
                    f"Sources: {known}.",
                    suggest(name, [*setting.sources]),
                )
