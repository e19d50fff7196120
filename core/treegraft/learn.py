"""What a finished round teaches: costs from the clock, calibration and gains from what the target chose."""

from collections.abc import Sequence

import numpy as np

from treegraft.interfaces import RoundState, Verdict
from treegraft.statistics import best_budget
from treegraft.tree import Bools, DraftTree, Floats, Ints

MIN_MASS = 1e-3  # below so little probability mass, a gain says nothing about the drafter


def learn(
    state: RoundState,
    pruned: DraftTree,
    verdict: Verdict,
    tokens: tuple[int, ...],
    verification_ms: float,
) -> None:
    """Update the pipeline's statistics.

    Args:
        state: the round's last state.
        pruned: the tree that was verified.
        verdict: what became of it.
        tokens: what was emitted.
        verification_ms: measured latency of all that was not drafting (ms).
    """
    costs, acceptance = state.statistics.costs, state.statistics.acceptance
    costs.record_target(len(pruned), state.position, verification_ms)
    if acceptance.are_options_read:
        _learn_gains(state, tokens)
    if len(state.tree) > 1:
        _learn_edges(state, tokens)
    drafted_ms = [costs.source_ms(step.source, step.num_rows) for step in state.steps if len(step.positions)]
    modelled_ms = float(costs.target_ms(len(pruned), state.position)) + sum(map(float, drafted_ms))
    acceptance.learn_round(len(tokens), len(verdict.path), len(pruned) - 1, modelled_ms)


def _learn_gains(state: RoundState, tokens: tuple[int, ...]) -> None:
    """Record by how much each step raised the tree's worth, for each unit of mass drafted below."""
    target_ms = state.statistics.costs.target_ms(np.arange(1, state.limits.verify_nodes + 2), state.position)
    rate = state.statistics.rate(state.position)
    worth = -rate * float(target_ms[0])  # of the root alone
    for number, step in enumerate(state.steps):
        if len(step.positions):
            before, worth = worth, _worth(step.tree, tokens, rate, target_ms)
            mass = max(float(np.exp(step.tree_before.path_score[step.positions]).sum()), MIN_MASS)
            state.statistics.acceptance.learn_step(step.source, number, (worth - before) / mass, step.num_rows)


def _worth(tree: DraftTree, tokens: tuple[int, ...], rate: float, target_ms: Floats) -> float:
    """What verifying the best nodes of a step's tree was worth (tokens): half as expected, half as it came out.

    Expectations vary little but favour hopeful drafters over those that correct them; outcomes are fair but vary.
    """
    best = tree.ranked()[: len(target_ms)]
    budget, expected = best_budget(tree.path_score[best], rate, target_ms)
    chosen = set(best[: budget + 1].tolist())
    row = num_accepted = 0
    for token in tokens:
        child = tree.child(row, token)
        if child is None or child not in chosen:
            break
        row, num_accepted = child, num_accepted + 1
    return 0.5 * expected + 0.5 * (num_accepted - rate * float(target_ms[budget]))


def _learn_edges(state: RoundState, tokens: tuple[int, ...]) -> None:
    """Calibrate each scorer on what the target chose among the nodes that it scored."""
    tree, acceptance = state.tree, state.statistics.acceptance
    rows, accepted = labels(tree, tokens)
    scorers = tree.scorer[rows]
    for scorer in set(scorers.tolist()):
        own = scorers == scorer
        labelled = rows[own]
        acceptance.learn_edges(scorer, tree.edge_score[labelled], tree.depth[labelled], accepted[own])


def labels(tree: DraftTree, tokens: Sequence[int]) -> tuple[Ints, Bools]:
    """The children of every node on the emitted path, level by level: rows [E], and whether the target chose each [E].

    Args:
        tree: before pruning, so that nodes left out are labelled too.
        tokens: what was emitted, at least one.
    """
    row, rows, chosen = 0, [], []
    for token in tokens:
        children = (tree.parent == row).nonzero()[0]
        hit = tree.token[children] == token
        rows.append(children)
        chosen.append(hit)
        if not hit.any():
            break
        row = int(children[hit.argmax()])
    return np.concatenate(rows), np.concatenate(chosen)
