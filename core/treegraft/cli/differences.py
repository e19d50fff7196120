"""What an audit found, for a reader: a table, or the object of `--json`."""

import json
import math
from typing import Any

import attrs

from treegraft.audit import Difference
from treegraft.cli.tables import table


@attrs.frozen
class Report:
    """An audit's findings and what to think of them.

    Attributes:
        token_ids: what was audited.
        differences: tokens that were not the target's choice.
        tolerance: the largest gap to put down to rounding.
        sampled: whether the choice is what the seed draws, and not the arg-max.
        tokenizer: the target's, or None.
    """

    token_ids: list[int]
    differences: list[Difference]
    tolerance: float
    sampled: bool
    tokenizer: Any

    @property
    def largest(self) -> float:
        """The largest gap; 0 where every token was the target's choice."""
        return max((each.gap for each in self.differences), default=0.0)

    @property
    def passed(self) -> bool:
        """Whether every gap is within the tolerance."""
        return self.largest <= self.tolerance

    def as_text(self) -> str:
        """A table of the differences, if there are any, a summary, and a verdict."""
        choice = "seed's draw" if self.sampled else "arg-max"
        rows = [
            (
                str(each.index),
                self._text(each.token),
                self._text(each.expected),
                _shown(each.gap),
                self._verdict(each.gap),
            )
            for each in self.differences
        ]
        lines = table(("index", "token", choice, "gap (nats)", ""), rows) if rows else []
        found = f"{len(self.token_ids)} tokens, {len(rows)} not the {choice}"
        if rows:
            found += f"; largest gap {_shown(self.largest)} nats"
        return "\n".join([*lines, f"{found} (tolerance {self.tolerance:g})"])

    def as_json(self) -> str:
        """One JSON object; a gap is null where the token was ruled out altogether."""
        found = [
            {
                "index": each.index,
                "token_id": each.token,
                "token": self._decoded(each.token),
                "expected_id": each.expected,
                "expected": self._decoded(each.expected),
                "gap": _finite(each.gap),
            }
            for each in self.differences
        ]
        content = {
            "token_ids": self.token_ids,
            "num_new_tokens": len(self.token_ids),
            "num_different": len(found),
            "largest_gap": _finite(self.largest),
            "tolerance": self.tolerance,
            "passed": self.passed,
            "differences": found,
        }
        return json.dumps(content, allow_nan=False)

    def _verdict(self, gap: float) -> str:
        return "rounding" if gap <= self.tolerance else "above the tolerance"

    def _text(self, token: int) -> str:
        text = self._decoded(token)
        return str(token) if text is None else f"{text!r} ({token})"

    def _decoded(self, token: int) -> str | None:
        if self.tokenizer is None:
            return None
        text: str = self.tokenizer.decode([token])
        return text


def _finite(gap: float) -> float | None:
    return gap if math.isfinite(gap) else None


def _shown(gap: float) -> str:
    return f"{gap:.3g}" if math.isfinite(gap) else "ruled out"
