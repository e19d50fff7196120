"""What labels come to: fixed schedules followed through a text, the best ones, and what no schedule can exceed."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import attrs
import numpy as np

from treegraft.errors import RequestError
from treegraft.interfaces import RoundRecord
from treegraft.replay.schedules import Prefix, Schedule
from treegraft.statistics import CostModel
from treegraft.tree import Bools, Floats, Ints


@attrs.frozen
class Outcome:
    """What some rounds brought and took; outcomes add up.

    Attributes:
        num_rounds: rounds.
        num_accepted: draft tokens kept.
        num_emitted: tokens emitted.
        num_verified: non-root nodes verified.
        num_calls: by source, steps in which it drafted.
        modelled_ms: drafting and verification by a cost table (ms).
    """

    num_rounds: int = 0
    num_accepted: int = 0
    num_emitted: int = 0
    num_verified: int = 0
    num_calls: dict[str, int] = attrs.field(factory=dict)
    modelled_ms: float = 0.0

    def __add__(self, other: "Outcome") -> "Outcome":
        names = [*self.num_calls, *(name for name in other.num_calls if name not in self.num_calls)]
        return Outcome(
            self.num_rounds + other.num_rounds,
            self.num_accepted + other.num_accepted,
            self.num_emitted + other.num_emitted,
            self.num_verified + other.num_verified,
            {name: self.num_calls.get(name, 0) + other.num_calls.get(name, 0) for name in names},
            self.modelled_ms + other.modelled_ms,
        )

    @property
    def accepted_per_round(self) -> float:
        """Mean draft tokens kept a round."""
        return self.num_accepted / self.num_rounds if self.num_rounds else 0.0

    @property
    def emitted_per_round(self) -> float:
        """Mean tokens emitted a round."""
        return self.num_emitted / self.num_rounds if self.num_rounds else 0.0

    @property
    def tokens_per_second(self) -> float | None:
        """Modelled throughput; None where nothing costs anything."""
        return self.num_emitted / self.modelled_ms * 1e3 if self.modelled_ms else None


def outcome_of(rounds: Iterable[RoundRecord], costs: CostModel) -> Outcome:
    """What the rounds of a Generation, live or replayed, come to by a cost table."""
    total = Outcome()
    for record in rounds:
        steps = [step for step in record.state.steps if len(step.positions)]
        drafting_ms = sum(float(costs.source_ms(step.source, step.num_rows)) for step in steps)
        names = [step.source for step in steps]
        total += Outcome(
            num_rounds=1,
            num_accepted=len(record.verdict.path),
            num_emitted=len(record.tokens),
            num_verified=len(record.pruned) - 1,
            num_calls={name: names.count(name) for name in names},
            modelled_ms=float(costs.target_ms(len(record.pruned), record.state.position)) + drafting_ms,
        )
    return total


@attrs.frozen(eq=False)
class ScheduleTable:
    """The labels of a recording as arrays: P prefixes, S schedules, B budgets, D steps, N sources.

    Attributes:
        schedules: the S schedules.
        sources: the N sources.
        source_of: int [S, D], the source of each step, by index.
        budgets: int [B].
        starts: int [P], tokens emitted before each prefix.
        positions: int [P], sequence position of each root.
        num_tokens: tokens of the recording.
        num_verified, num_accepted, num_emitted: int [P, S, B].
        num_rows: int [P, S, D].
        is_call: bool [P, S, D], whether the step's source had anything to draft below.
        num_missed: int [P, S, B, N].
    """

    schedules: tuple[Schedule, ...]
    sources: tuple[str, ...]
    source_of: Ints
    budgets: Ints
    starts: Ints
    positions: Ints
    num_tokens: int
    num_verified: Ints
    num_accepted: Ints
    num_emitted: Ints
    num_rows: Ints
    is_call: Bools
    num_missed: Ints

    @property
    def is_whole(self) -> bool:
        """Whether every prefix is there, so that rounds can be followed through the text."""
        return len(self.starts) == self.num_tokens

    def only(self, schedules: Sequence[int] | None = None, budgets: Sequence[int] | None = None) -> "ScheduleTable":
        """The same for some schedules and budgets, by index; all by default."""
        which = list(range(len(self.schedules)) if schedules is None else schedules)
        some = list(range(len(self.budgets)) if budgets is None else budgets)
        return attrs.evolve(
            self,
            schedules=tuple(self.schedules[index] for index in which),
            source_of=self.source_of[which],
            budgets=self.budgets[some],
            num_verified=self.num_verified[:, which][:, :, some],
            num_accepted=self.num_accepted[:, which][:, :, some],
            num_emitted=self.num_emitted[:, which][:, :, some],
            num_rows=self.num_rows[:, which],
            is_call=self.is_call[:, which],
            num_missed=self.num_missed[:, which][:, :, some],
        )

    # -- latencies ----------------------------------------------------------------------------------------------------

    def round_ms(self, costs: CostModel, prefix: int, missed: Sequence[int] | Ints | None = None) -> Floats:
        """float64 [S, B]: modelled latency (ms) of a round after one prefix.

        Args:
            costs: the cost table.
            prefix: index of the prefix.
            missed: [N], rows that the first call of each source takes along; none by default.
        """
        rows = self.num_rows[prefix]
        if missed is not None and any(missed):
            rows = rows + np.array(missed)[self.source_of] * self._is_first(prefix)
        drafting_ms = np.zeros(rows.shape)
        for index, name in enumerate(self.sources):
            own = (self.source_of == index) & self.is_call[prefix]
            drafting_ms[own] = costs.source_ms(name, rows[own])
        target_ms = costs.target_ms(self.num_verified[prefix] + 1, int(self.positions[prefix]))
        ms: Floats = target_ms + drafting_ms.sum(axis=1)[:, None]
        return ms

    def missed_after(self, prefix: int, missed: Sequence[int] | Ints) -> Ints:
        """int [S, B, N]: what a round after one prefix leaves for the next call of each source."""
        called = np.zeros((len(self.schedules), len(self.sources)), np.bool_)
        np.logical_or.at(called, (np.arange(len(called))[:, None], self.source_of), self.num_rows[prefix] > 0)
        after: Ints = self.num_missed[prefix] + np.where(called, 0, np.array(missed))[:, None, :]
        return after

    def _is_first(self, prefix: int) -> Bools:
        """bool [S, D]: the steps in which a source forwards its first rows."""
        forwards = self.num_rows[prefix] > 0
        first: Bools = np.zeros_like(forwards)
        for index in range(len(self.sources)):
            own = forwards & (self.source_of == index)
            first |= own & (np.cumsum(own, axis=1) == 1)
        return first

    # -- rounds -------------------------------------------------------------------------------------------------------

    def outcome(self, prefix: int, schedule: int, budget: int, modelled_ms: float) -> Outcome:
        """One round, by index of prefix, schedule and budget."""
        calls = self.source_of[schedule][self.is_call[prefix, schedule]]
        return Outcome(
            num_rounds=1,
            num_accepted=int(self.num_accepted[prefix, schedule, budget]),
            num_emitted=int(self.num_emitted[prefix, schedule, budget]),
            num_verified=int(self.num_verified[prefix, schedule, budget]),
            num_calls={name: int((calls == index).sum()) for index, name in enumerate(self.sources)},
            modelled_ms=modelled_ms,
        )

    def fixed(self, costs: CostModel, schedule: int, budget: int) -> Outcome:
        """A fixed schedule with a fixed budget, by index.

        Of a whole table, the exact run through the text: every round begins where the one before ended, and sources
        catch up with what they missed. Of one with gaps, the sum over its prefixes, sources up to date at each.
        """
        total = Outcome()
        missed = np.zeros(len(self.sources), np.int64)
        prefix = 0
        while prefix < len(self.starts):
            ms = float(self.round_ms(costs, prefix, missed)[schedule, budget])
            total += (done := self.outcome(prefix, schedule, budget, ms))
            if self.is_whole:
                missed = self.missed_after(prefix, missed)[schedule, budget]
                prefix += done.num_emitted
            else:
                prefix += 1
        return total

    def oracle(self, costs: CostModel) -> Outcome:
        """The rounds through the text that take least, each free to choose schedule and budget: what none exceeds.

        Dynamic programming over the position and what each source has missed; the tokens being given, the least time
        is the highest throughput.

        Raises:
            RequestError: the table has gaps.
        """
        if not self.is_whole:
            raise RequestError("oracle", f"{len(self.starts)} of {self.num_tokens} prefixes", "Allowed: all of them.")
        best: list[dict[tuple[int, ...], Outcome]] = [{} for _ in range(self.num_tokens + 1)]
        best[0][(0,) * len(self.sources)] = Outcome()
        for prefix in range(self.num_tokens):
            for missed, so_far in _undominated(best[prefix]):
                ms, after = self.round_ms(costs, prefix, missed), self.missed_after(prefix, missed)
                for schedule, budget in self._choices(prefix, ms, after):
                    done = so_far + self.outcome(prefix, schedule, budget, float(ms[schedule, budget]))
                    reached = best[prefix + int(self.num_emitted[prefix, schedule, budget])]
                    key = tuple(after[schedule, budget].tolist())
                    if key not in reached or done.modelled_ms < reached[key].modelled_ms:
                        reached[key] = done
        return min(best[-1].values(), key=lambda outcome: outcome.modelled_ms)

    def _choices(self, prefix: int, ms: Floats, after: Ints) -> Iterator[tuple[int, int]]:
        """Of the choices that lead to the same place with the same missed, the cheapest."""
        where = np.concatenate([self.num_emitted[prefix][..., None], after], axis=-1).reshape(ms.size, -1)
        order = np.argsort(ms, axis=None, kind="stable")
        _, first = np.unique(where[order], axis=0, return_index=True)
        for flat in order[first].tolist():
            yield divmod(flat, ms.shape[1])


def _undominated(states: dict[tuple[int, ...], Outcome]) -> list[tuple[tuple[int, ...], Outcome]]:
    """Those than which no other took less and missed less."""
    kept: list[tuple[tuple[int, ...], Outcome]] = []
    for missed, outcome in sorted(states.items(), key=lambda item: (item[1].modelled_ms, item[0])):
        if not any(all(mine <= its for mine, its in zip(other, missed, strict=True)) for other, _ in kept):
            kept.append((missed, outcome))
    return kept


def sampled_oracle(tables: Sequence[ScheduleTable], costs: CostModel) -> Outcome:
    """Of prefixes with gaps between them: schedule and budget of each chosen for the most tokens a ms over all of them.

    Dinkelbach's method: with the best rate so far, choose what emits most less the worth of its time; repeat with the
    rate that this has. Sources are up to date at each prefix.
    """
    rate, total = 0.0, Outcome()
    while True:
        found = Outcome()
        for table in tables:
            for prefix in range(len(table.starts)):
                ms = table.round_ms(costs, prefix)
                schedule, budget = divmod(int((table.num_emitted[prefix] - rate * ms).argmax()), ms.shape[1])
                found += table.outcome(prefix, schedule, budget, float(ms[schedule, budget]))
        if not found.modelled_ms or found.num_emitted / found.modelled_ms <= rate:
            return found if not rate else total
        rate, total = found.num_emitted / found.modelled_ms, found


def tabulate(prefixes: Iterable[Prefix], num_tokens: int) -> ScheduleTable:
    """The labels of a recording of `num_tokens` tokens as arrays.

    Raises:
        RequestError: there are none.
    """
    names: tuple[Schedule, ...] = ()
    sources: tuple[str, ...] = ()
    budgets: Ints = np.zeros(0, np.int64)
    columns: dict[str, list[Any]] = {}
    for prefix in prefixes:
        # Array by array: the trees of a prefix are many, and need not outlive it.
        names, budgets, labels = tuple(prefix.labels), prefix.budgets, list(prefix.labels.values())
        sources = tuple(labels[0].num_missed)
        columns.setdefault("starts", []).append(prefix.num_emitted)
        columns.setdefault("positions", []).append(labels[0].state.position)
        for name in ("num_verified", "num_accepted", "num_emitted", "num_rows", "is_call"):
            columns.setdefault(name, []).append([getattr(label, name) for label in labels])
        missed = [list(label.num_missed.values()) for label in labels]
        columns.setdefault("num_missed", []).append(np.array(missed).swapaxes(1, 2))
    if not names:
        raise RequestError("replay", "a recording without tokens", "Allowed: at least one labelled prefix.")
    return ScheduleTable(
        schedules=names,
        sources=sources,
        source_of=np.array([[sources.index(name) for name in schedule] for schedule in names]),
        budgets=budgets,
        num_tokens=num_tokens,
        **{name: np.array(values) for name, values in columns.items()},
    )
