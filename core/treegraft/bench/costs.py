"""Cost curves: what a round's verification and a step of each source take, by rows and by context.

They are measured by the very rounds that decode, with two things planted: a tree of exactly as many nodes as are to be
verified, and the order of the sources. What a cost model learns in live rounds is what is kept here.
"""

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from typing import Any

import attrs
import numpy as np
from numpy.typing import ArrayLike

from treegraft.errors import RequestError, TreeGraftError
from treegraft.interfaces import (
    BudgetPolicy,
    Drafter,
    DraftRequest,
    GraftPolicy,
    PositionSelector,
    Pruner,
    RoundRecord,
    RoundState,
    Scheduler,
    Source,
)
from treegraft.pipeline import Pipeline
from treegraft.sampling import SamplingRules, SeededDraws
from treegraft.statistics import CostModel
from treegraft.tree import Bools, DraftTree, Expansion, Floats, Ints
from treegraft.verify import MatchVerifier

TARGET = "target"
ROWS = (1, 2, 4, 8, 16, 32, 64)
"""Rows of the target's forwards; sources are asked to extend trees of as many nodes."""
CONTEXTS = (128,)
NUM_TOKENS = 16  # that a prompt and the planted trees are made of: few, so that looking things up finds some
PLANTED = "planted tree"
PER_CONTEXT = 1024  # tokens of context that `context_ms` of a cost table is about


@attrs.frozen
class Sample:
    """One measurement.

    Attributes:
        name: `target` (all of a round but drafting) or a source (one step of it).
        rows: that it forwarded; 0 for drafters without a network.
        context: committed tokens that were asked for; they were that many, and up to an eighth more.
        latency_ms: by the pipeline's own clock (ms).
    """

    name: str
    rows: int
    context: int
    latency_ms: float


@attrs.frozen
class Point:
    """The measurements of one size: their median and quartiles (ms), and how many they are."""

    name: str
    rows: int
    context: int
    num_samples: int
    median_ms: float
    low_ms: float
    high_ms: float


def measure(
    pipeline: Pipeline,
    rows: Sequence[int] = ROWS,
    contexts: Sequence[int] = CONTEXTS,
    repeats: int = 9,
    seed: int = 0,
    tick: Callable[[], None] = lambda: None,
) -> list[Sample]:
    """Measure a pipeline's target and sources.

    Sizes and sources take turns in random order, so that a machine that slows down slows all alike. The first call of
    each source in a request is left out: it may take in the prompt.

    Args:
        pipeline: whose target, sources and verifier.
        rows: sizes of the target's forwards.
        contexts: committed tokens.
        repeats: rounds for each size, source and context.
        seed: of the order, the prompts and the trees.
        tick: called after each of `num_rounds` rounds.

    Raises:
        RequestError: a context that the target does not hold beside the largest tree.
        TreeGraftError: a source's drafter failed.
    """
    limit = pipeline.target.max_length
    for context in contexts:
        if limit is not None and _longest(context) + max(rows) > limit:
            raise RequestError(
                "contexts", f"{context} tokens, an eighth more while measuring, and trees of {max(rows)} nodes",
                f"The target's context holds {limit}.", "Shorten it.",
            )  # fmt: skip
    stand = _Stand(pipeline, np.random.default_rng(seed))
    samples: list[Sample] = []
    for context in contexts:
        samples += stand.samples(rows, context, repeats, tick)
    return samples


def num_rounds(pipeline: Pipeline, rows: Sequence[int], contexts: Sequence[int], repeats: int) -> int:
    """How many rounds `measure` measures."""
    return len(rows) * len(contexts) * repeats * max(1, len(pipeline.sources))


def points(samples: Sequence[Sample]) -> list[Point]:
    """Samples by what, the target first, by context and size."""
    groups: dict[tuple[str, int, int], list[float]] = {}
    for sample in samples:
        groups.setdefault((sample.name, sample.context, sample.rows), []).append(sample.latency_ms)
    names = list(dict.fromkeys([TARGET, *(sample.name for sample in samples)]))
    found = []
    for name, context, rows in sorted(groups, key=lambda key: (names.index(key[0]), *key[1:])):
        ms = groups[name, context, rows]
        low, median, high = np.quantile(ms, [0.25, 0.5, 0.75]).tolist()
        found.append(Point(name, rows, context, len(ms), median, low, high))
    return found


def cost_table(measured: Sequence[Point]) -> dict[str, Any]:
    """The arguments of the cost models `fixed` and `file`: medians, smoothed so that more rows never cost less.

    What context adds to a target forward is the least-squares slope of its latency over all sizes, each with a level of
    its own; without a second context there is none, and the figures hold at the one measured. A source's are those of
    the shortest context, sizes between two powers of two taken together.
    """
    first = min(point.context for point in measured)
    target = [point for point in measured if point.name == TARGET]
    sizes = {rows: [point for point in target if point.rows == rows] for rows in {point.rows for point in target}}
    middles = {
        rows: np.mean([(point.context, point.median_ms) for point in own], axis=0) for rows, own in sizes.items()
    }
    offsets, rises = np.array([(point.context, point.median_ms) - middles[point.rows] for point in target]).T
    slope = max(0.0, float(offsets @ rises) / float(offsets @ offsets)) if offsets.any() else 0.0
    levels = [
        (rows, max(0.0, middles[rows][1] - slope * middles[rows][0]), sum(point.num_samples for point in own))
        for rows, own in sizes.items()
    ]
    sources = {
        name: _rising(_pooled(point for point in measured if (point.name, point.context) == (name, first)))
        for name in dict.fromkeys(point.name for point in measured if point.name != TARGET)
    }
    return {"target": _rising(levels), "sources": sources, "context_ms": round(slope * PER_CONTEXT, 4)}


def _pooled(own: Iterable[Point]) -> Iterator[tuple[int, float, int]]:
    """(rows, ms, samples) of a source: it forwards what it finds, at many sizes and each a few times."""
    groups: dict[int, list[Point]] = {}
    for point in own:
        groups.setdefault(round(math.log2(max(point.rows, 1))), []).append(point)
    for group in groups.values():
        weights = [point.num_samples for point in group]
        rows, ms = np.average([(max(point.rows, 1), point.median_ms) for point in group], axis=0, weights=weights)
        yield round(rows), float(ms), sum(weights)


def _rising(knots: Iterable[tuple[int, float, int]]) -> dict[int, float]:
    """rows -> ms of (rows, ms, samples): the closest curve that never falls (pool adjacent violators)."""
    pools: list[tuple[list[int], float, int]] = []
    for rows, ms, weight in sorted(knots):
        pools.append(([rows], ms, weight))
        while len(pools) > 1 and pools[-2][1] > pools[-1][1]:
            right, left = pools.pop(), pools.pop()
            total = left[2] + right[2]
            pools.append((left[0] + right[0], (left[1] * left[2] + right[1] * right[2]) / total, total))
    return {rows: round(float(ms), 4) for own, ms, _ in pools for rows in own}


def _longest(context: int) -> int:
    """Where a request is ended and begun anew."""
    return context + max(16, context // 8)


# -- what is planted --------------------------------------------------------------------------------------------------


@attrs.define
class _Plan:
    """What the next round is to be: a source, none for the planted tree alone, and rows to verify."""

    source: str | None = None
    num_rows: int = 1


class _Planter(Drafter):
    """Proposes a tree of as many nodes as planned, each below a random earlier one."""

    def __init__(self, plan: _Plan, rng: np.random.Generator):
        self._plan, self._rng = plan, rng
        self.tokens: Ints = np.zeros(1, np.int64)

    def draft(self, request: DraftRequest) -> Expansion:
        size = self._plan.num_rows - 1
        num_children, depth = np.zeros(size + 1, np.int64), np.zeros(size + 1, np.int64)
        first = self._rng.integers(0, len(self.tokens), size + 1)
        anchor, token = np.zeros(size, np.int64), np.zeros(size, np.int64)
        for row in range(1, size + 1):
            room = (num_children[:row] < len(self.tokens)) & (depth[:row] < request.max_depth)
            parent = int(self._rng.choice(np.flatnonzero(room)))
            anchor[row - 1] = 0 if parent == 0 else ~(parent - 1)
            token[row - 1] = self.tokens[(first[parent] + num_children[parent]) % len(self.tokens)]
            num_children[parent] += 1
            depth[row] = depth[parent] + 1
        return Expansion(anchor, token, np.full(size, -1.0))


class _Root(PositionSelector):
    def candidates(self, tree: DraftTree, source: Source) -> Ints:
        return np.zeros(1, np.int64)


class _Append(GraftPolicy):
    keeps_existing = True

    def graft(self, tree: DraftTree, expansion: Expansion, source: Source) -> DraftTree:
        return tree.append(expansion, source.index, source.overrules)


@attrs.define
class _AsPlanned(Scheduler, BudgetPolicy, Pruner):
    """The planted tree, then the source that is measured; one that draws drafts at a bare root, and comes first.

    What is verified are the first nodes.
    """

    plan: _Plan
    max_verify_nodes: int

    def decide(self, state: RoundState) -> str | None:
        source = state.sources.get(self.plan.source or "")
        is_drawn = source is not None and source.drafter.proposals == "sampled"
        order = (self.plan.source, PLANTED) if is_drawn else (PLANTED, self.plan.source)
        return order[len(state.steps)]

    def max_nodes(self, state: RoundState) -> int:
        return self.max_verify_nodes

    def verify_nodes(self, state: RoundState, tree: DraftTree) -> int:
        return self.plan.num_rows - 1

    def prune(self, tree: DraftTree, num_nodes: int) -> Bools:
        return np.arange(len(tree)) <= num_nodes


class _MatchAnything(MatchVerifier):
    """For planted trees on drawn ones, whose text is nobody's."""

    lossless = False
    accepts = frozenset({"deterministic", "sampled"})


@attrs.define(eq=False)
class _Recorder(CostModel):
    """Knows no cost, and keeps what it is told about the next round."""

    found: dict[str, tuple[int, float]] = attrs.field(factory=dict)

    def target_ms(self, rows: ArrayLike, context: int) -> Floats:
        return np.ones(np.shape(rows))

    def source_ms(self, name: str, rows: ArrayLike) -> Floats:
        return np.zeros(np.shape(rows))

    def table(self) -> dict[str, Any]:
        return {}

    def record_target(self, rows: int, context: int, latency_ms: float) -> None:
        self.found[TARGET] = rows, latency_ms

    def record_source(self, name: str, rows: int, latency_ms: float) -> None:
        self.found[name] = rows, latency_ms


class _Stand:
    """A pipeline's target and sources, in rounds that are planned."""

    def __init__(self, pipeline: Pipeline, rng: np.random.Generator):
        self._rng, self._plan, self._recorder = rng, _Plan(), _Recorder()
        self._planter = _Planter(self._plan, rng)
        self._turns: list[str | None] = [source.name for source in pipeline.sources] or [None]
        index = len(pipeline.sources)
        planted = Source(
            name=PLANTED, index=index, drafter=self._planter, selector=_Root(), graft_policy=_Append(), width=1,
            branching=NUM_TOKENS, rank=0, rescore=False, overrules=(True,) * (index + 1),
        )  # fmt: skip
        self._sources = [
            *(attrs.evolve(source, overrules=(*source.overrules, True)) for source in pipeline.sources),
            planted,
        ]
        self._pipeline = pipeline
        draws = any(source.drafter.proposals == "sampled" for source in pipeline.sources)
        self._verifier = _MatchAnything() if draws else pipeline.parts.verifier

    def samples(self, rows: Sequence[int], context: int, repeats: int, tick: Callable[[], None]) -> Iterator[Sample]:
        """The measurements at one context."""
        planned = _AsPlanned(self._plan, max(rows))
        given = self._pipeline
        pipeline = Pipeline(
            name=given.name, target=given.target, sources=self._sources, scheduler=planned, budget=planned,
            pruner=planned, verifier=self._verifier, costs=self._recorder, steps=2, tokenizer=given.tokenizer,
        )  # fmt: skip
        todo = [(name, size) for _ in range(repeats) for name in self._turns for size in rows]
        self._rng.shuffle(todo)
        while todo:
            yield from self._request(pipeline, todo, context, tick)

    def _request(
        self, pipeline: Pipeline, todo: list[tuple[str | None, int]], context: int, tick: Callable[[], None]
    ) -> Iterator[Sample]:
        """As many rounds as one request takes before its context has grown too much."""
        vocab_size = pipeline.target.vocab_size
        self._planter.tokens = self._rng.choice(vocab_size, min(NUM_TOKENS, vocab_size), replace=False)
        prompt = np.resize(self._planter.tokens, context + 1).tolist()
        sampler = pipeline.sampler(prompt, SamplingRules(), SeededDraws(0), max_new_tokens=_longest(context))
        rounds = pipeline.run(sampler, None)
        with closing(rounds):
            for name in self._turns:  # warm-up
                self._round(rounds, name, 2)
            while todo and len(sampler.tokens) < _longest(context):
                name, size = todo.pop()
                for what, (num_rows, ms) in self._round(rounds, name, size).items():
                    yield Sample(what, num_rows, context, ms)
                tick()

    def _round(
        self, rounds: Generator[RoundRecord, None, Any], name: str | None, num_rows: int
    ) -> dict[str, tuple[int, float]]:
        """Rows and latency (ms) of the target and of source `name` in a round that verifies `num_rows`."""
        self._plan.source, self._plan.num_rows = name, num_rows
        self._recorder.found.clear()
        record = next(rounds)
        if name is not None and name not in record.state.sources:
            raise TreeGraftError(f"sources.{name}", "its drafter failed while it was measured")
        return {what: each for what, each in self._recorder.found.items() if what != PLANTED}
