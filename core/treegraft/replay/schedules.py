"""Every schedule at every prefix of a recording, by one depth-first search over the steps."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import attrs
import numpy as np

from treegraft.errors import RequestError, suggest
from treegraft.interfaces import RoundState, Scheduler
from treegraft.pipeline import Pipeline
from treegraft.replay.recording import Recording, reference_path, replay_target
from treegraft.round import Laps, Parts, Request, decode_round, grow_step, opening_state
from treegraft.sampling import SeededDraws, TokenSampler
from treegraft.tree import Bools, Ints

Schedule = tuple[str, ...]
"""The names of the sources that draft, one a step."""
Follow = Callable[[int], Schedule]
"""The schedule of each round of a run, by the round's number."""
MAX_SCHEDULES = 1024


@attrs.frozen(eq=False)
class Label:
    """What a complete schedule comes to from one prefix, under each budget of a grid [B].

    Attributes:
        state: the round's last state; `state.tree` is the tree before pruning, `state.steps` what was done.
        num_rows: int [D], rows that each step forwards where its source has processed all committed tokens.
        is_call: bool [D], whether the step's source had anything to draft below.
        num_verified: int [B], non-root nodes that are verified.
        num_accepted: int [B], draft tokens that the target keeps.
        num_emitted: int [B], tokens emitted: accepted + 1, or what is left of the text.
        num_missed: by source, int [B]: rows that its next call takes along, the processed tokens of the next round's
            context being those that this one has processed. They add to what was missed before if the schedule does
            not call the source.
    """

    state: RoundState
    num_rows: Ints
    is_call: Bools
    num_verified: Ints
    num_accepted: Ints
    num_emitted: Ints
    num_missed: Mapping[str, Ints]


@attrs.frozen(eq=False)
class Prefix:
    """All that can be decided after one prefix of a recording.

    Attributes:
        num_emitted: tokens of the recording before it.
        budgets: int [B], the grid: most non-root nodes to verify, ascending.
        states: by the schedule so far, the state in which the next source is chosen: S^0 + ... + S^(D-1) of them.
            Where no source has anything to draft below, growth has ended and there are none.
        labels: by complete schedule, what it comes to: S^D.
    """

    num_emitted: int
    budgets: Ints
    states: Mapping[Schedule, RoundState]
    labels: Mapping[Schedule, Label]


def schedules(
    pipeline: Pipeline,
    recording: Recording,
    budgets: Sequence[int] | None = None,
    sources: Sequence[str] | None = None,
    every: int = 1,
    follow: Follow | None = None,
) -> Iterator[Prefix]:
    """Grow the trees of all S^D schedules after the prefixes of a recording, and label them.

    The pipeline's sources, steps and pruner are used; its scheduler and its budget policy are not. Drafters are told
    of the budget B that the pipeline allows at most, and the tree that comes of it is pruned for each budget of the
    grid. Schedules share their first steps, and nodes are forwarded once for all of them.

    The prefixes are those after every token; with `follow` they are where the rounds of a run begin, and what its
    rounds teach (calibration, the drafters' caches) holds for the next prefix as it would live.

    Args:
        pipeline: loaded with a ReplayTarget and fixed costs; without `follow`, with `calibration=off`.
        recording: of the same target.
        budgets: the grid, ascending, in [0, B]; B alone by default.
        sources: names of those that schedules are made of; all by default.
        every: label the first prefix (the prompt alone) and every so many after it: tokens, or rounds of `follow`.
        follow: by the number of a round, the schedule that it takes; None goes on token by token.

    Raises:
        RequestError: the pipeline cannot be replayed in this way, or a drafter fails.
    """
    names, grid = check_schedules(pipeline, budgets, sources, follow)
    target = replay_target(pipeline)
    target.recording = recording
    rules = target.sampling_rules(recording.prompt, recording.options, recording.max_new_tokens)
    sampler = pipeline.sampler(
        recording.prompt.tolist(), rules, SeededDraws(recording.seed), recording.max_new_tokens
    )  # fmt: skip
    return _along(pipeline, recording, sampler, names, grid, every, follow)


def check_schedules(
    pipeline: Pipeline,
    budgets: Sequence[int] | None = None,
    sources: Sequence[str] | None = None,
    follow: Follow | None = None,
) -> tuple[tuple[str, ...], Ints]:
    """The sources and the grid of budgets that `schedules` works with.

    Raises:
        RequestError: the pipeline cannot be replayed in this way.
    """
    replay_target(pipeline)
    names, grid = _names(pipeline, sources), _grid(pipeline, budgets)
    where = f"pipelines.{pipeline.name}"
    if pipeline.calibration and follow is None:
        raise RequestError(
            f"{where}.calibration", "on: scores would depend on the rounds before", "Allowed: off.",
            "calibration=off, or `follow` the rounds of a run.",
        )  # fmt: skip
    if len(names) ** pipeline.parts.steps > MAX_SCHEDULES:
        raise RequestError(
            f"{where}.steps", f"{len(names)} sources and {pipeline.parts.steps} steps",
            f"Allowed: at most {MAX_SCHEDULES} schedules (sources ^ steps).", "Name fewer sources, or set steps=N.",
        )  # fmt: skip
    return names, grid


def _names(pipeline: Pipeline, sources: Sequence[str] | None) -> tuple[str, ...]:
    known = [source.name for source in pipeline.sources]
    unknown = [name for name in sources or () if name not in known]
    if unknown or not known:
        raise RequestError(
            f"pipelines.{pipeline.name}.sources", f"no source named {unknown[0]!r}" if unknown else "no sources",
            f"Sources: {', '.join(known) or 'none'}.", suggest(unknown[0], known) if unknown else None,
        )  # fmt: skip
    return tuple(dict.fromkeys(sources or known))


def _grid(pipeline: Pipeline, budgets: Sequence[int] | None) -> Ints:
    most = pipeline.parts.budget.max_verify_nodes
    grid = np.array([most] if budgets is None else budgets, np.int64)
    if not len(grid) or grid[0] < 0 or grid[-1] > most or (np.diff(grid) <= 0).any():
        raise RequestError(
            "budgets", f"{grid.tolist()}", f"Allowed for pipelines.{pipeline.name}: ascending, from 0 to {most}.",
            "budget.verify_nodes=N allows more.",
        )  # fmt: skip
    return grid


def _along(
    pipeline: Pipeline,
    recording: Recording,
    sampler: TokenSampler,
    names: Sequence[str],
    grid: Ints,
    every: int,
    follow: Follow | None,
) -> Iterator[Prefix]:
    faults: list[dict[str, str]] = []
    number = 0  # of the round
    with pipeline.request(sampler, faults) as request:
        while sampler.stop_reason is None:
            prefix = None
            if (sampler.num_emitted if follow is None else number) % every == 0:
                rest = recording.tokens[sampler.num_emitted :]
                search = _Search(pipeline.parts, request, rest, names, grid)
                prefix = search.prefix(processed=follow is None)
            if faults:
                raise RequestError(f"sources.{faults[0]['source']}", faults[0]["error"], "Allowed: no failing drafter.")
            if prefix is not None:
                yield prefix
            schedule = _Followed(() if follow is None else follow(number))
            decode_round(attrs.evolve(pipeline.parts, scheduler=schedule), request)
            number += 1


@attrs.frozen
class _Followed(Scheduler):
    """One round's schedule; the empty one never drafts, and the text goes on by one token."""

    schedule: Schedule

    def decide(self, state: RoundState) -> str | None:
        step = len(state.steps)
        return self.schedule[step] if step < len(self.schedule) else None


class _Search:
    """The depth-first search from one root.

    Args:
        parts: the pipeline's.
        request: at the root.
        reference: int64 [L], what the target emits from here on.
        names: the sources that schedules are made of.
        grid: int [B].
    """

    def __init__(self, parts: Parts, request: Request, reference: Ints, names: Sequence[str], grid: Ints):
        self.parts, self.request, self.reference, self.names, self.grid = parts, request, reference, names, grid
        self.drafters = {name: request.sources[name].drafter for name in names if name in request.sources}
        committed = request.sampler.tokens
        self.missed_before = {name: drafter.num_missed(committed) for name, drafter in self.drafters.items()}
        self.states: dict[Schedule, RoundState] = {}
        self.labels: dict[Schedule, Label] = {}
        self.last: dict[str, Any] = {}

    def prefix(self, processed: bool) -> Prefix:
        """Search.

        Args:
            processed: leave each drafter as if called at every step, so that it has processed the root; else as it was.
        """
        num_emitted = self.request.sampler.num_emitted
        before = {name: drafter.checkpoint() for name, drafter in self.drafters.items()}
        self._visit((), opening_state(self.parts, self.request))
        for name, checkpoint in (before | (self.last if processed else {})).items():
            self.drafters[name].restore(checkpoint)
        return Prefix(num_emitted, self.grid, self.states, self.labels)

    def _visit(self, taken: Schedule, state: RoundState) -> None:
        if len(taken) == self.parts.steps:
            self._finish(taken, self._label(state))
            return
        checkpoints = {name: drafter.checkpoint() for name, drafter in self.drafters.items()}
        for name in self.names:
            for each, drafter in self.drafters.items():
                drafter.restore(checkpoints[each])
            grown = grow_step(self.request, state, name, self.parts.budget.max_verify_nodes, Laps())
            if grown is None:  # nobody can draft: whatever the schedule says, this is the tree
                label = self._label(state)
                for rest in product(self.names, repeat=self.parts.steps - len(taken)):
                    self._finish((*taken, *rest), label)
                return
            self.states[taken] = state
            self._visit((*taken, name), grown)

    def _finish(self, schedule: Schedule, label: Label) -> None:
        self.labels[schedule] = label
        if len(set(schedule)) == 1:
            self.last[schedule[0]] = self.drafters[schedule[0]].checkpoint()

    def _label(self, state: RoundState) -> Label:
        tree = state.tree
        path = reference_path(tree, self.reference)
        kept = [
            np.ones(len(tree), np.bool_) if budget >= len(tree) - 1 else self.parts.pruner.prune(tree, budget)
            for budget in self.grid.tolist()
        ]
        num_accepted = np.array([mask[path].sum() for mask in kept], np.int64)
        num_emitted = np.minimum(num_accepted + 1, len(self.reference))
        num_rows, called = self._rows(state)
        is_call = np.zeros(self.parts.steps, np.bool_)
        is_call[: len(state.steps)] = [len(step.positions) > 0 for step in state.steps]
        return Label(
            state=state,
            num_rows=num_rows,
            is_call=is_call,
            num_verified=np.array([mask.sum() - 1 for mask in kept], np.int64),
            num_accepted=num_accepted,
            num_emitted=num_emitted,
            num_missed={name: self._missed(name, name in called, num_emitted) for name in self.drafters},
        )

    def _rows(self, state: RoundState) -> tuple[Ints, set[str]]:
        """int [D], rows of each step without those missed in earlier rounds; the sources that forwarded any."""
        num_rows, called = np.zeros(self.parts.steps, np.int64), set()
        for number, step in enumerate(state.steps):
            num_rows[number] = step.num_rows
            if step.num_rows and step.source not in called:
                called.add(step.source)
                num_rows[number] -= self.missed_before[step.source]
        return num_rows, called

    def _missed(self, name: str, called: bool, num_emitted: Ints) -> Ints:
        committed, before = self.request.sampler.tokens, 0 if called else self.missed_before[name]
        missed = {
            count: self.drafters[name].num_missed(np.concatenate([committed, self.reference[:count]])) - before
            for count in set(num_emitted.tolist())
        }
        return np.maximum([missed[count] for count in num_emitted.tolist()], 0)
