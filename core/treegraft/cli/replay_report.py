"""What a replay found: rows for JSON, tables for a reader."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from treegraft.cli.tables import table
from treegraft.interfaces import RoundRecord
from treegraft.replay import Outcome, Prefix, ScheduleTable, sampled_oracle
from treegraft.replay.schedules import Schedule
from treegraft.statistics import CostModel

ORACLE = "oracle"
Key = tuple[str, Schedule | str | None, int | str | None]
"""Pipeline, schedule and budget; None is the pipeline's own, ORACLE the best in hindsight of every round."""
Cell = tuple[float, str | None]
"""Temperature and category, None for all of them."""


@attrs.define(eq=False)
class Tally:
    """Outcomes summed up by what was followed, temperature and category.

    Attributes:
        is_modelled: whether there is a cost table that says something.
    """

    is_modelled: bool
    _outcomes: dict[tuple[Key, Cell], Outcome] = attrs.field(factory=dict)
    _histograms: dict[tuple[Key, Cell], dict[int, int]] = attrs.field(factory=dict)
    _plain_ms: dict[tuple[Key, Cell], float] = attrs.field(factory=dict)
    _tables: dict[tuple[str, Cell], list[ScheduleTable]] = attrs.field(factory=dict)
    _costs: dict[str, CostModel] = attrs.field(factory=dict)

    def add_round(self, key: Key, temperature: float, category: str, outcome: Outcome, plain_ms: float) -> None:
        """Take in one round; `plain_ms` is what plain decoding takes for its tokens."""
        for cell in ((temperature, None), (temperature, category)):
            self._add(key, cell, outcome)
            counts = self._histograms.setdefault((key, cell), {})
            counts[outcome.num_accepted] = counts.get(outcome.num_accepted, 0) + 1
            self._plain_ms[key, cell] = self._plain_ms.get((key, cell), 0.0) + plain_ms

    def add_table(
        self, name: str, temperature: float, category: str, labels: ScheduleTable, costs: CostModel
    ) -> None:  # fmt: skip
        """Take in the labels of a recording."""
        self._costs[name] = costs
        for cell in ((temperature, None), (temperature, category)):
            self._tables.setdefault((name, cell), []).append(labels)

    def rows(self) -> list[dict[str, Any]]:
        """One for each pipeline, schedule, budget, temperature and category."""
        for (name, cell), tables in self._tables.items():
            self._add_schedules(name, cell, tables)
        self._tables.clear()
        return [self._row(key, cell) for key, cell in self._outcomes]

    def _add(self, key: Key, cell: Cell, outcome: Outcome) -> None:
        self._outcomes[key, cell] = self._outcomes.get((key, cell), Outcome()) + outcome

    def _add_schedules(self, name: str, cell: Cell, tables: Sequence[ScheduleTable]) -> None:
        """Fixed schedules with fixed budgets, and the oracles: of both, of the schedule, of the budget."""
        costs, first = self._costs[name], tables[0]
        found: dict[tuple[int, int], Outcome] = {}
        for index, schedule in enumerate(first.schedules):
            for place, budget in enumerate(first.budgets.tolist()):
                found[index, place] = sum((each.fixed(costs, index, place) for each in tables), Outcome())
                self._add((name, schedule, budget), cell, found[index, place])
        plain_ms = np.mean(np.concatenate([[costs.target_ms(1, at) for at in each.positions] for each in tables]))
        index, place = max(found, key=lambda choice: worth(found[choice]))
        best, budget = first.schedules[index], int(first.budgets[place])
        self._add((name, ORACLE, ORACLE), cell, oracle(tables, costs))
        if len(first.budgets) > 1:
            self._add((name, ORACLE, budget), cell, oracle([each.only(budgets=[place]) for each in tables], costs))
            self._add((name, best, ORACLE), cell, oracle([each.only(schedules=[index]) for each in tables], costs))
        for key, outcome in self._of(name, cell):
            self._plain_ms[key, cell] = outcome.num_emitted * float(plain_ms)

    def _of(self, name: str, cell: Cell) -> list[tuple[Key, Outcome]]:
        return [(key, outcome) for (key, other), outcome in self._outcomes.items() if (key[0], other) == (name, cell)]

    def _row(self, key: Key, cell: Cell) -> dict[str, Any]:
        (name, schedule, budget), (temperature, category) = key, cell
        outcome = self._outcomes[key, cell]
        rounds = outcome.num_rounds
        histogram, plain_ms = self._histograms.get((key, cell)), self._plain_ms[key, cell]
        return {
            "pipeline": name,
            "schedule": list(schedule) if isinstance(schedule, tuple) else schedule,
            "budget": budget,
            "temperature": temperature,
            "category": category,
            "num_rounds": rounds,
            "num_emitted": outcome.num_emitted,
            "accepted_per_round": outcome.accepted_per_round,
            "emitted_per_round": outcome.emitted_per_round,
            "verified_per_round": outcome.num_verified / rounds if rounds else 0.0,
            "calls_per_round": {name: count / rounds for name, count in outcome.num_calls.items()} if rounds else {},
            "accepted_histogram": None if histogram is None else {str(n): histogram[n] for n in sorted(histogram)},
            "modelled_ms": outcome.modelled_ms if self.is_modelled else None,
            "tokens_per_second": outcome.tokens_per_second if self.is_modelled else None,
            "ratio_to_plain": plain_ms / outcome.modelled_ms if self.is_modelled and outcome.modelled_ms else None,
        }


def worth(outcome: Outcome) -> tuple[float, float]:
    """What outcomes of the same text are compared by."""
    return outcome.tokens_per_second or 0.0, outcome.emitted_per_round


def oracle(tables: Sequence[ScheduleTable], costs: CostModel) -> Outcome:
    """Of whole tables the best way through each text, of others the best of each prefix."""
    if all(table.is_whole for table in tables):
        return sum((table.oracle(costs) for table in tables), Outcome())
    return sampled_oracle(tables, costs)


# -- JSON lines -------------------------------------------------------------------------------------------------------


def round_line(done: RoundRecord, modelled_ms: float) -> dict[str, Any]:
    """A round of a pipeline."""
    steps = [{"source": step.source, "num_rows": step.num_rows} for step in done.state.steps if len(step.positions)]
    return {
        "position": done.state.position, "accepted": len(done.verdict.path), "emitted": len(done.tokens),
        "verified": len(done.pruned) - 1, "steps": steps, "modelled_ms": modelled_ms, "budget": done.choice.nodes,
        "expected_accepted": done.choice.gain, "expected_ms": done.choice.cost_ms,
    }  # fmt: skip


def label_lines(prefix: Prefix) -> Iterator[dict[str, Any]]:
    """The labels of a prefix, a schedule each; lists run over `budgets`."""
    for schedule, label in prefix.labels.items():
        yield {
            "num_emitted": prefix.num_emitted, "position": label.state.position, "schedule": list(schedule),
            "budgets": prefix.budgets.tolist(), "accepted": label.num_accepted.tolist(),
            "emitted": label.num_emitted.tolist(), "verified": label.num_verified.tolist(),
            "num_rows": label.num_rows.tolist(),
            "num_missed": {name: missed.tolist() for name, missed in label.num_missed.items()},
        }  # fmt: skip


# -- tables -----------------------------------------------------------------------------------------------------------


def lines(rows: Sequence[Mapping[str, Any]], is_modelled: bool) -> list[str]:
    """Tables of the rows over all categories: one of pipelines, or one of schedules for each pipeline."""
    found: list[str] = []
    whole = [row for row in rows if row["category"] is None]
    labelled = [row for row in whole if row["schedule"] is not None]
    if not labelled:
        return _table(whole, ["pipeline", "budget", "temperature"], is_modelled)
    for name, temperature in dict.fromkeys((row["pipeline"], row["temperature"]) for row in labelled):
        own = [row for row in labelled if (row["pipeline"], row["temperature"]) == (name, temperature)]
        shown = _best_budgets(own)
        found += ["", f"{name}, temperature {temperature:g}: schedules, each with its best budget"]
        found += _table(shown, ["schedule", "budget"], is_modelled)
    return found[1:]


def _best_budgets(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Of fixed schedules with fixed budgets the best budget of each, best first; then the oracles."""
    best: dict[tuple[str, ...], Mapping[str, Any]] = {}
    oracles = [row for row in rows if ORACLE in (row["schedule"], row["budget"])]
    for row in rows:
        if ORACLE not in (row["schedule"], row["budget"]):
            schedule = tuple(row["schedule"])
            if schedule not in best or _worth(row) > _worth(best[schedule]):
                best[schedule] = row
    return [*sorted(best.values(), key=_worth, reverse=True), *oracles]


def _worth(row: Mapping[str, Any]) -> tuple[float, float]:
    return row["tokens_per_second"] or 0.0, row["emitted_per_round"]


def _table(rows: Sequence[Mapping[str, Any]], keys: Sequence[str], is_modelled: bool) -> list[str]:
    keys = [key for key in keys if len({str(row[key]) for row in rows}) > 1 or key in ("pipeline", "schedule")]
    names = list(dict.fromkeys(name for row in rows for name in row["calls_per_round"]))
    columns = [*keys, "rounds", "accepted", "emitted", "verified", *(f"{name} calls" for name in names)]
    oracle_rate = next((row["tokens_per_second"] for row in rows if row["schedule"] == row["budget"] == ORACLE), None)
    if is_modelled:
        columns += ["tokens/s", "to plain"] + (["of oracle"] if oracle_rate else [])
    cells = []
    for row in rows:
        values = [_shown(row[key]) for key in keys]
        values += [str(row["num_rounds"])]
        values += [f"{row[f'{what}_per_round']:.2f}" for what in ("accepted", "emitted", "verified")]
        values += [f"{row['calls_per_round'].get(name, 0.0):.2f}" for name in names]
        if is_modelled:
            values += [f"{row['tokens_per_second'] or 0.0:.1f}", f"{row['ratio_to_plain'] or 0.0:.2f}x"]
            values += [f"{row['tokens_per_second'] / oracle_rate:.1%}"] if oracle_rate else []
        cells.append(values)
    return table(columns, cells)


def _shown(value: Any) -> str:
    if value is None:
        return "own"
    return " ".join(value) if isinstance(value, list) else f"{value}"
