"""One decode round, top to bottom: grow a tree, prune it, score it, verify it, commit, learn."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import numpy as np

from treegraft.errors import InvariantError
from treegraft.interfaces import (
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
from treegraft.sampling import Scores, TokenSampler
from treegraft.statistics import MIN_MASS, best_budget
from treegraft.tree import DraftTree, Expansion, Ints


class Laps:
    """Where a round's time goes (ms): each lap ends one part and begins the next, so that the parts add up."""

    def __init__(self) -> None:
        self.ms = dict.fromkeys(("schedule", "build", "target", "verify", "commit", "learn"), 0.0)
        self.source_ms: dict[str, float] = {}
        self.now = time.perf_counter()

    def lap(self, part: str) -> None:
        self.ms[part] += self._elapsed()

    def source_lap(self, name: str) -> float:
        elapsed = self._elapsed()
        self.source_ms[name] = self.source_ms.get(name, 0.0) + elapsed
        return elapsed

    def _elapsed(self) -> float:
        before, self.now = self.now, time.perf_counter()
        return (self.now - before) * 1e3


@attrs.define(eq=False)
class Request:
    """One request under way: what every round of it reads, and the sources that have not failed in it.

    Attributes:
        sampler: the target's choices so far.
        statistics: costs and acceptance.
        sources: by name; `fault` removes one.
        fault: called with (source, error) when a drafter fails.
    """

    sampler: TokenSampler
    statistics: Statistics
    sources: Mapping[str, Source]
    fault: Callable[["Request", Source, Exception], None]


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
    state = grow_tree(parts, request, _opening_state(parts, request), laps)

    budget = parts.budget.verify_nodes(state, state.tree) if len(state.tree) > 1 else 0
    laps.lap("schedule")
    pruned = state.tree
    if budget < len(pruned) - 1:
        pruned = pruned.keep(parts.pruner.prune(pruned, budget))
    laps.lap("build")
    (scores,) = parts.target.score([pruned])
    sampler.begin(pruned, scores)
    laps.lap("target")
    num_before = sampler.num_emitted
    verdict = parts.verifier.verify(pruned, scores, sampler)
    laps.lap("verify")
    parts.target.commit([verdict.path])
    laps.lap("commit")
    _observe(parts.wants, request, scores, pruned, verdict, laps)
    tokens = tuple(sampler.emitted[num_before:])
    _learn(state, pruned, verdict, tokens, laps)
    return RoundRecord(state, budget, pruned, verdict, tokens, laps.ms, laps.source_ms)


def grow_tree(parts: Parts, request: Request, state: RoundState, laps: Laps) -> RoundState:
    """Let the scheduler's sources extend the tree, at most D steps; ends on None or when no source has a candidate."""
    while len(state.steps) < state.limits.steps and state.sources:
        name = parts.scheduler.decide(state)
        laps.lap("schedule")
        if name is None:
            break
        source, begin = state.sources.get(name), laps.now
        step = None
        if source is not None and len(candidates := _candidates(source, state)):
            try:
                step = _draft_step(source, candidates, parts, request, state, laps)
            except Exception as error:
                laps.source_lap(name)
                request.fault(request, source, error)
                state = attrs.evolve(state, sources=request.sources)
        elif not any(len(_candidates(other, state)) for other in state.sources.values()):
            break
        step = step or _idle_step(name, state.tree)  # a step that adds nothing still counts as one
        state = attrs.evolve(state, tree=step.tree, steps=(*state.steps, step))
        laps.lap("build")
        if len(step.positions):
            state.statistics.costs.record_source(name, step.num_rows, (laps.now - begin) * 1e3)
    return state


def _draft_step(
    source: Source, candidates: Ints, parts: Parts, request: Request, state: RoundState, laps: Laps
) -> StepRecord:
    """One source's step: rescore, choose positions, draft, graft."""
    tree, drafter, acceptance = state.tree, source.drafter, state.statistics.acceptance
    question = DraftRequest(
        tree=tree,
        positions=np.zeros(0, np.int64),
        branching=source.branching,
        max_nodes=source.width * source.branching + parts.budget.max_nodes(state),
        max_depth=_max_depth(source, state),
        vocab_size=parts.target.vocab_size,
        committed=request.sampler.tokens,
        edge_scorer=source.edge_scorer,
    )
    rescored: Ints = np.zeros(0, np.int64)
    own_ms = 0.0
    num_rows = 0
    if source.rescore:
        laps.lap("build")
        rescoring = drafter.rescore(tree, candidates, question)
        own_ms += laps.source_lap(source.name)
        _require(bool(np.all(rescoring.log_prob <= 0)), source, "rescored log_prob finite and <= 0")
        edges = acceptance.calibrated(source.index, rescoring.log_prob, tree.depth[rescoring.rows])
        tree = tree.rescored(rescoring.rows, edges, source.index, source.overrules)
        candidates, rescored, num_rows = rescoring.processed, rescoring.rows, drafter.num_rows
    best = np.lexsort((tree.depth[candidates], -tree.path_score[candidates]))[: source.width]
    tree = tree.mark(candidates[best], source.index)
    question = attrs.evolve(question, tree=tree, positions=candidates[best])
    laps.lap("build")
    expansion = drafter.draft(question)
    own_ms += laps.source_lap(source.name)
    num_rows = max(num_rows, drafter.num_rows)
    _check_expansion(expansion, question, source)
    edges = acceptance.calibrated(source.index, expansion.log_prob, expansion.depths(tree))
    expansion = attrs.evolve(expansion, log_prob=edges)
    grown = source.graft_policy.graft(tree, expansion, source)
    own_depth = grown.depth[grown.step == tree.num_steps - 1]  # others may reach beyond this drafter's context
    _require(own_depth.max(initial=0) <= question.max_depth, source, "D5 no proposal below max_depth")
    return StepRecord(source.name, state.tree, grown, question.positions, expansion, rescored, num_rows, own_ms)


def _opening_state(parts: Parts, request: Request) -> RoundState:
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
    nothing = np.zeros(0, np.int64)
    return StepRecord(name, tree, tree, nothing, Expansion.empty(), nothing, num_rows=0, latency_ms=0.0)


def _max_depth(source: Source, state: RoundState) -> int:
    """Deepest proposal: the request's limit, and one below the last position that the drafter can process."""
    own = source.drafter.max_length
    return state.limits.max_depth if own is None else min(state.limits.max_depth, own - state.position)


def _candidates(source: Source, state: RoundState) -> Ints:
    """Rows that `source` may draft below: its selector's, else the leaves that it has not expanded."""
    tree = state.tree
    shallow = tree.depth < _max_depth(source, state)
    rows = source.selector.candidates(tree, source)
    rows = rows[shallow[rows]]
    if not len(rows):
        rows = np.flatnonzero(tree.leaves() & shallow & ~tree.visited_by(source.index))
    return rows


def _check_expansion(expansion: Any, request: DraftRequest, source: Source) -> None:
    """Refuse an expansion that breaks a rule, before it can reach the tree."""
    _require(isinstance(expansion, Expansion), source, "draft returns an Expansion")
    anchor, token, log_prob = expansion.anchor, expansion.token, expansion.log_prob
    size = len(anchor)
    _require(size == len(token) == len(log_prob), source, "anchor, token and log_prob of one length")
    if not size:
        return
    # Anchors as places in [proposals reversed ; tree rows], so that one look-up serves both kinds.
    allowed = np.zeros(size + len(request.tree), dtype=np.bool_)
    allowed[size + request.positions] = True
    place = anchor + size
    known = place.min() >= 0 and place.max() < len(allowed)
    later = anchor[anchor < 0] if known else anchor[:0]
    if len(later):
        known = bool((~later < np.flatnonzero(anchor < 0)).all())
        allowed[:size] = True
    _require(known and bool(allowed[place].all()), source, "D1 anchors: requested rows, earlier proposals")
    _require(token.min() >= 0 and token.max() < request.vocab_size, source, "D2 tokens in [0, vocab_size)")
    # Not a number fails either comparison.
    _require(log_prob.max() <= 0 and log_prob.min() > -np.inf, source, "D4 log_prob finite and <= 0")
    _require(size <= request.max_nodes, source, "D5 at most max_nodes proposals")
    _require(np.bincount(place).max() <= request.branching, source, "D5 at most `branching` proposals a node")


def _require(holds: bool | np.bool_, source: Source, rule: str) -> None:
    if not holds:
        raise InvariantError(f"sources.{source.name}", "its drafter broke a rule", f"Rule: {rule}.")


def _observe(wants: Wants, request: Request, scores: Scores, pruned: DraftTree, verdict: Verdict, laps: Laps) -> None:
    """Tell the drafters which tokens passed through the target, and what it said after each."""
    if not request.sources:
        return
    rows = np.concatenate([np.zeros(1, np.int64), verdict.path])
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


def _learn(state: RoundState, pruned: DraftTree, verdict: Verdict, tokens: tuple[int, ...], laps: Laps) -> None:
    """Update the statistics: costs from the clock, calibration and gains from what the target chose."""
    costs, acceptance = state.statistics.costs, state.statistics.acceptance
    spent_ms = laps.ms["target"] + laps.ms["verify"] + laps.ms["commit"]
    costs.record_target(len(pruned), state.position, spent_ms)
    target_ms = costs.target_ms(np.arange(1, state.limits.verify_nodes + 2), state.position)
    modelled_ms = float(target_ms[len(pruned) - 1])
    rate = state.statistics.rate(state.position)
    worth = -rate * float(target_ms[0])  # of the root alone
    for number, step in enumerate(state.steps):
        if not len(step.positions):
            continue
        modelled_ms += float(costs.source_ms(step.source, step.num_rows))
        before, worth = worth, best_budget(step.tree.path_score, rate, target_ms)[1]
        mass = float(np.exp(step.tree_before.path_score[step.positions]).sum())
        acceptance.learn_step(step.source, number, (worth - before) / max(mass, MIN_MASS), step.num_rows)
    _learn_edges(state, tokens)
    acceptance.learn_round(len(tokens), len(verdict.path), len(pruned) - 1, modelled_ms)
    laps.lap("learn")


def _learn_edges(state: RoundState, tokens: tuple[int, ...]) -> None:
    """Label the children of every node on the emitted path: did the target choose them?"""
    tree, acceptance = state.tree, state.statistics.acceptance
    parent, drafted = tree.parent.tolist(), tree.token.tolist()
    next_token = {0: tokens[0]}  # by row on the emitted path
    rows: list[int] = []
    labels: list[bool] = []
    # Children come after their parents, so that one pass follows the path.
    for row in range(1, len(parent)):
        if parent[row] in next_token:
            chosen = drafted[row] == next_token[parent[row]]
            rows.append(row)
            labels.append(chosen)
            if chosen and tree.depth[row] < len(tokens):
                next_token[row] = tokens[tree.depth[row]]
    labelled, accepted = tree.nodes[rows], np.array(labels, dtype=np.bool_)
    for scorer in set(labelled["scorer"].tolist()):
        own = labelled["scorer"] == scorer
        acceptance.learn_edges(scorer, labelled["edge_score"][own], labelled["depth"][own], accepted[own])
