"""Two arms of a run against each other, with an interval: what a change of one part brought."""

from collections.abc import Sequence
from pathlib import Path

import attrs

from treegraft.bench.intervals import ratio
from treegraft.bench.records import read_records
from treegraft.bench.summary import works_of
from treegraft.errors import RequestError


@attrs.frozen
class PairRow:
    """How much faster one arm is than another, by the requests that both answered.

    Attributes:
        arm, base: the two arms.
        temperature, max_new_tokens: of the requests.
        category: of their prompts; None for all.
        ratio: of their throughput, the median over repeats.
        interval: of it, 95 %, over prompts; None with fewer than two.
        range: least and largest over repeats.
    """

    arm: str
    base: str
    temperature: float
    max_new_tokens: int
    category: str | None
    ratio: float | None
    interval: tuple[float, float] | None
    range: tuple[float, float] | None


def compare_arms(folder: Path, pairs: Sequence[tuple[str, str]]) -> list[PairRow]:
    """Ratios of pairs of arms of a finished run, over all prompts and in each category.

    Args:
        folder: of the run.
        pairs: arm and base.

    Raises:
        RequestError: the folder holds no run, or one without such an arm.
    """
    records = read_records(folder)
    arms = list(dict.fromkeys(record.arm for record in records))
    for name in {name for pair in pairs for name in pair}.difference(arms):
        raise RequestError("bench report --pairs", f"{name!r}", f"Allowed, the arms of {folder}: {', '.join(arms)}.")

    rows = []
    for cell in sorted({(record.temperature, record.max_new_tokens) for record in records}):
        of_cell = [record for record in records if (record.temperature, record.max_new_tokens) == cell]
        for category in [None, *dict.fromkeys(record.category for record in of_cell)]:
            works = works_of([record for record in of_cell if category in (None, record.category)])
            for arm, base in pairs:
                found = ratio(works.get(arm), works.get(base))
                rows.append(PairRow(arm, base, *cell, category, found.value, found.interval, found.range))
    return rows
