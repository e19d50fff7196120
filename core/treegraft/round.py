"""One decode round, top to bottom: grow a tree, prune it, score it, verify it, commit, learn."""

import time
from collections.abc import Callable, Mapping

import attrs
import numpy as np

from treegraft import answers
from treegraft.errors import InvariantError
from treegraft.interfaces import (
    BudgetChoice,
    BudgetPolicy,
    DraftRequest,
    Limits,
    Observation,
    Pruner,
    RoundRecord,
    RoundState,
    Scheduler,
    Source,
    Statistics,
    StepRecord,
    TargetModel,
    Verdict,
    Verifier,
    Wants,
)
from treegraft.learn import learn
from treegraft.sampling import Scores, TokenSampler
from treegraft.tree import DraftTree, Expansion, Ints

_NO_ROWS: Ints = np.zeros(0, np.int64)
_NO_ROWS.setflags(write=False)
_NO_NODES = BudgetChoice(0)


class Laps:
    """Where a round's time goes (ms): each lap ends one part and begins the next, so that the parts add up."""

    def __init__(self) -> None:
        self.ms = dict.fromkeys(("schedule", "build", "target", "verify", "commit", "learn"), 0.0)
        self.source_ms: dict[str, float] = {}
        self.now = time.perf_counter()

    def lap(self, part: str) -> None:
        before, self.now = self.now, time.perf_counter()
        self.ms[part] += (self.now - before) * 1e3

    def source_lap(self, name: str) -> float:
        before, self.now = self.now, time.perf_counter()
        elapsed = (self.now - before) * 1e3
        self.source_ms[name] = self.source_ms.get(name, 0.0) + elapsed
        return elapsed


@attrs.define(eq=False)
class Request:
    """One request under way: what every round of it reads, and the sources that have not failed in it.

    Attributes:
        sampler: the target's choices so far.
        vocab_size: V of the target.
        statistics: costs and acceptance.
        sources: by name; `fault` removes one.
        fault: called with (source, error) when a drafter fails.
        warm: names of sources that were called before; a first call may take in the prompt, and is no measure.
        names: of all sources, those that have failed included.
    """

    sampler: TokenSampler
    vocab_size: int
    statistics: Statistics
    sources: Mapping[str, Source]
    fault: Callable[["Request", Source, Exception], None]
    warm: set[str] = attrs.field(factory=set)
    names: tuple[str, ...] = attrs.field(init=False, default=attrs.Factory(lambda own: tuple(own.sources), True))


@attrs.frozen(eq=False)
class Parts:
    """What a pipeline is composed of, as a round needs it."""

    target: TargetModel
    scheduler: Scheduler
    budget: BudgetPolicy
    pruner: Pruner
    verifier: Verifier
    steps: int
    wants: Wants


def decode_round(parts: Parts, request: Request) -> RoundRecord:
    """Draft a tree below the last committed token, verify it, and commit what the target accepts."""
    sampler, laps = request.sampler, Laps()
    state = grow_tree(parts, request, opening_state(parts, request), laps)

    choice = parts.budget.choose(state, state.tree) if len(state.tree) > 1 else _NO_NODES
    answers.check_choice(parts.budget, choice, state.limits.verify_nodes)
    laps.lap("schedule")
    pruned, draft_probs = state.tree, sampler.draft_probs
    if draft_probs is not None:  # core's own record of what was drawn, whatever became of the tree's
        pruned = attrs.evolve(pruned, draft_probs=draft_probs)
    if choice.nodes < len(pruned) - 1:
        answers.check_prunable(parts.budget, draft_probs is not None, parts.verifier.lossless)
        pruned = pruned.keep(parts.pruner.prune(pruned, choice.nodes))
        answers.check_pruned(parts.pruner, pruned, choice.nodes)
    laps.lap("build")
    (scores,) = parts.target.score([pruned])
    sampler.begin(pruned, scores)
    laps.lap("target")
    num_before = sampler.num_emitted
    verdict = parts.verifier.verify(pruned, scores, sampler)
    root_token, *emitted = sampler.tokens[num_before - sampler.num_emitted - 1 :].tolist()
    answers.check_verdict(parts.verifier, verdict, pruned, root_token, emitted)
    laps.lap("verify")
    parts.target.commit([verdict.path])
    laps.lap("commit")
    _observe(parts.wants, request, scores, pruned, verdict, laps)
    verification_ms = laps.ms["target"] + laps.ms["verify"] + laps.ms["commit"]
    learn(state, pruned, verdict, tuple(emitted), verification_ms)
    laps.lap("learn")
    return RoundRecord(state, choice, pruned, verdict, tuple(emitted), laps.ms, laps.source_ms)


def grow_tree(parts: Parts, request: Request, state: RoundState, laps: Laps) -> RoundState:
    """Let the scheduler's sources extend the tree, at most D steps; ends on None or when no source has a candidate."""
    max_nodes = parts.budget.max_nodes(state) if state.sources else 0
    answers.check_limit(parts.budget, max_nodes)
    while len(state.steps) < state.limits.steps and state.sources:
        name = parts.scheduler.decide(state)
        answers.check_decision(parts.scheduler, name, request.names)
        laps.lap("schedule")
        if name is None:
            break
        begin = laps.now
        grown = grow_step(request, state, name, max_nodes, laps)
        if grown is None:
            break
        state, step = grown, grown.steps[-1]
        if len(step.positions) and name in request.warm:
            state.statistics.costs.record_source(name, step.num_rows, (laps.now - begin) * 1e3)
        request.warm.add(name)
    return state


def grow_step(request: Request, state: RoundState, name: str, max_nodes: int, laps: Laps) -> RoundState | None:
    """The state after one step by source `name`, of which nothing is learnt; None when no source has a candidate."""
    source, step = state.sources.get(name), None
    if source is not None and len(candidates := _candidates(source, state)):
        try:
            step = _draft_step(source, candidates, max_nodes, request, state, laps)
        except Exception as error:
            laps.source_lap(name)
            if request.sampler.proposals(source.index).num_drawn:
                raise _failed_after_a_draw(name, error) from error
            request.fault(request, source, error)
    elif not any(len(_candidates(other, state)) for other in state.sources.values()):
        return None
    step = step or _idle_step(name, state.tree)  # a step that adds nothing still counts as one
    state = state.after(step, request.sources)
    laps.lap("build")
    return state


def _draft_step(
    source: Source, candidates: Ints, max_nodes: int, request: Request, state: RoundState, laps: Laps
) -> StepRecord:
    """One source's step: rescore, choose positions, draft, graft."""
    tree, drafter, acceptance = state.tree, source.drafter, state.statistics.acceptance
    is_drawn = drafter.proposals == "sampled"
    if not is_drawn:  # room for more than will be verified; what is drawn is verified whole
        max_nodes += source.width * source.branching
    max_depth, committed = _max_depth(source, state), request.sampler.committed
    sampler = request.sampler.proposals(source.index) if is_drawn else None

    def question(tree: DraftTree, positions: Ints) -> DraftRequest:
        return DraftRequest(
            tree, positions, source.branching, max_nodes, max_depth, request.vocab_size, committed,
            source.edge_scorer, source.index, sampler,
        )  # fmt: skip

    rescored = _NO_ROWS
    own_ms = 0.0
    num_rows = 0
    if source.rescore:
        laps.lap("build")
        asked = question(tree, _NO_ROWS)
        rescoring = drafter.rescore(tree, candidates, asked)
        own_ms += laps.source_lap(source.name)
        asked.check(rescoring)
        if len(rescoring.rows):
            edges = acceptance.calibrated(source.index, rescoring.log_prob, tree.depth[rescoring.rows])
            tree = tree.rescored(rescoring.rows, edges, source.index, source.overrules)
        candidates, rescored, num_rows = rescoring.processed, rescoring.rows, drafter.num_rows
    best = np.lexsort((tree.depth[candidates], -tree.path_score[candidates]))[: source.width]
    tree = tree.mark(candidates[best], source.index)
    asked = question(tree, candidates[best])
    laps.lap("build")
    expansion = drafter.draft(asked)
    own_ms += laps.source_lap(source.name)
    num_rows = max(num_rows, drafter.num_rows)
    asked.check(expansion)
    depths = expansion.depths(tree)
    asked.check_depths(depths)
    edges = acceptance.calibrated(source.index, expansion.log_prob, depths)
    expansion = expansion.scored(edges, sampler.draft_probs if sampler is not None and sampler.num_drawn else None)
    grown = source.graft_policy.graft(tree, expansion, source)
    answers.check_grafted(source.graft_policy, grown, tree, expansion)
    return StepRecord(source.name, state.tree, grown, asked.positions, expansion, rescored, num_rows, own_ms)


def _failed_after_a_draw(name: str, error: Exception) -> InvariantError:
    return InvariantError(
        f"sources.{name}", f"{type(error).__name__} after it had drawn: {error}",
        "A source that failed for what it drew cannot be left out without bias.", "Mend it, or take another drafter.",
    )  # fmt: skip


def opening_state(parts: Parts, request: Request) -> RoundState:
    """The state that a round begins in."""
    tokens = request.sampler.tokens
    remaining = request.sampler.max_tokens - request.sampler.num_emitted
    return RoundState(
        num_prompt_tokens=request.sampler.num_prompt,
        position=len(tokens) - 1,
        limits=Limits(parts.steps, parts.budget.max_verify_nodes, max_depth=remaining - 1),
        sources=request.sources,
        steps=(),
        tree=DraftTree.rooted(int(tokens[-1])),
        statistics=request.statistics,
    )


def _idle_step(name: str, tree: DraftTree) -> StepRecord:
    return StepRecord(name, tree, tree, _NO_ROWS, Expansion.empty(), _NO_ROWS, num_rows=0, latency_ms=0.0)


def _max_depth(source: Source, state: RoundState) -> int:
    """Deepest proposal: the request's limit, and one below the last position that the drafter can process."""
    own = source.drafter.max_length
    return state.limits.max_depth if own is None else min(state.limits.max_depth, own - state.position)


def _candidates(source: Source, state: RoundState) -> Ints:
    """Rows that `source` may draft below: its selector's, else the leaves that it has not expanded."""
    tree = state.tree
    if source.drafter.proposals == "sampled" and len(tree) > 1:
        return _NO_ROWS  # grafting below what was drawn, or onto it, would make the tree depend on the draws
    shallow = tree.depth < _max_depth(source, state)
    rows = source.selector.candidates(tree, source)
    answers.check_candidates(source.selector, rows, tree)
    rows = rows[shallow[rows]]
    if not len(rows):
        rows = np.flatnonzero(tree.leaves() & shallow & ~tree.visited_by(source.index))
    return rows


def _observe(wants: Wants, request: Request, scores: Scores, pruned: DraftTree, verdict: Verdict, laps: Laps) -> None:
    """Tell the drafters which tokens passed through the target, and what it said after each."""
    if not request.sources:
        return
    rows = np.array([0, *verdict.path.tolist()])
    top_ids, top_log_probs = scores.top(rows, wants.num_top) if wants.num_top else (None, None)
    seen = Observation(pruned.token[rows], top_ids, top_log_probs, scores.hidden(rows))
    laps.lap("learn")
    for source in tuple(request.sources.values()):
        try:
            source.drafter.observe(narrowed(seen, wants, source.drafter.wants))
        except Exception as error:
            request.fault(request, source, error)
        laps.source_lap(source.name)


def narrowed(seen: Observation, wants: Wants, own: Wants) -> Observation:
    """The part of an observation made for `wants` that a drafter with wants `own` asked for."""
    if own == wants:
        return seen
    keep = [wants.hidden_layers.index(layer) for layer in own.hidden_layers]
    return Observation(
        tokens=seen.tokens,
        top_ids=seen.top_ids[:, : own.num_top] if own.num_top and seen.top_ids is not None else None,
        top_log_probs=seen.top_log_probs[:, : own.num_top] if own.num_top and seen.top_log_probs is not None else None,
        hidden=seen.hidden[:, keep] if keep and seen.hidden is not None else None,
    )
