"""Tests of the tests: decoders with well-known mistakes are told from right ones, by the same enumeration."""

import attrs
import numpy as np
import pytest
import torch

from treegraft import Pipeline, Source, Verdict, Verifier
from treegraft.sampling import Scores, TokenSampler
from treegraft.testing import (
    MarkovTarget,
    TableDrafter,
    exact_generations,
    markov_table,
    max_difference,
    target_distribution,
)
from treegraft.tree import DraftTree
from treegraft.verify import MatchVerifier
from treegraft_plugins.budgets import FixedBudget
from treegraft_plugins.costs import FixedCosts
from treegraft_plugins.graft_policies import NonDestructive
from treegraft_plugins.pruners import TopPaths
from treegraft_plugins.schedulers.fixed import FixedScheduler
from treegraft_plugins.selectors import NewestSelector

PROMPT = [0, 1]
TABLE = markov_table(3, order=2, seed=1, spread=0.7)


def composed(verifier: Verifier, target: MarkovTarget) -> Pipeline:
    """A tree of two levels with siblings on each, around what is under test."""
    drafter = TableDrafter(markov_table(3, order=2, seed=2))
    source = Source(
        "toy", 0, drafter, NewestSelector(), NonDestructive(), width=1, branching=2,
        rank=0, rescore=False, overrules=(True,),
    )  # fmt: skip
    return Pipeline(
        name="planted", target=target, sources=[source], scheduler=FixedScheduler(["toy"]), budget=FixedBudget(),
        pruner=TopPaths(), verifier=verifier, costs=FixedCosts(), steps=2,
    )  # fmt: skip


def bias(verifier: Verifier, target: MarkovTarget | None = None) -> float:
    """Largest error in the probability of an output of three tokens."""
    found: dict[tuple[int, ...], float] = {}
    accepted = 0.0
    for weight, generation in exact_generations(composed(verifier, target or MarkovTarget(TABLE)), PROMPT, 3):
        output = tuple(generation.token_ids)
        found[output] = found.get(output, 0.0) + weight
        accepted += weight * generation.accepted_per_round
    assert accepted > 0.1, "the mistake must have an occasion"
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-9)
    return max_difference(found, target_distribution(MarkovTarget(TABLE), PROMPT, 3))


# -- the mistakes -----------------------------------------------------------------------------------------------------


class Planted(Verifier):
    """A rule of its own: `walk` gives the accepted rows and the bonus token, which are then emitted as they are."""

    lossless = True
    accepts = frozenset({"deterministic"})

    def walk(self, tree: DraftTree, scores: Scores, sampler: TokenSampler) -> tuple[list[int], int]:
        raise NotImplementedError

    def verify(self, tree: DraftTree, scores: Scores, sampler: TokenSampler) -> Verdict:
        path, bonus = self.walk(tree, scores, sampler)
        for token in [*tree.token[path].tolist(), bonus]:
            certain = torch.full((1, scores.tensor.shape[-1]), -torch.inf)
            certain[0, token] = 0.0
            sampler.begin(tree, Scores(certain))
            assert sampler.next(0) == token
        return Verdict(np.array(path, np.int32), bonus, sampler.stop_reason)


def target_probs(scores: Scores, row: int) -> torch.Tensor:
    return scores.logits(row).double().softmax(-1)


def drawn(probs: torch.Tensor, sampler: TokenSampler) -> int:
    return sampler.draws.choose(probs[None], np.array([0]))[0]


def children(tree: DraftTree, row: int) -> list[int]:
    return np.flatnonzero(tree.parent == row).tolist()


class RightByHand(Planted):
    """No mistake: match verification written against the same scaffold, so that the scaffold is not the bias."""

    def walk(self, tree, scores, sampler):
        path, row = [], 0
        while True:
            token = drawn(target_probs(scores, row), sampler)
            child = tree.child(row, token)
            if child is None:
                return path, token
            path.append(row := child)


class AcceptsWithoutResidual(Planted):
    """Accepts each child with its own probability, and falls back on the target's full distribution."""

    def walk(self, tree, scores, sampler):
        path, row = [], 0
        while True:
            probs = target_probs(scores, row)
            for child in children(tree, row):
                accept = probs[int(tree.token[child])]
                if drawn(torch.stack([1 - accept, accept]), sampler):
                    path.append(row := child)
                    break
            else:
                return path, drawn(probs, sampler)


class KeepsTheLongestPath(Planted):
    """Judges root paths apart, each by draws of its own, and keeps the one that got furthest."""

    def walk(self, tree, scores, sampler):
        best: tuple[list[int], int] = ([], -1)
        for leaf in np.flatnonzero(tree.leaves()).tolist():
            path: list[int] = []
            for row, child in zip(tree.path(leaf), [*tree.path(leaf)[1:], None], strict=True):
                token = drawn(target_probs(scores, row), sampler)
                if child is None or token != tree.token[child]:
                    break
                path.append(child)
            if len(path) > len(best[0]) or best[1] < 0:
                best = (path, token)
        return best


class TreeSeesTheDraw(Planted):
    """Draws at a node before it is accepted, and prunes it if that was improbable: it will be drawn at again."""

    def walk(self, tree, scores, sampler):
        path, token = [], drawn(target_probs(scores, 0), sampler)
        while True:
            child = tree.child(path[-1] if path else 0, token)
            if child is None:
                return path, token
            probs = target_probs(scores, child)
            following = drawn(probs, sampler)
            if following != int(probs.argmax()):
                return path, token
            path.append(child)
            token = following


class DrawsAgainForTheBonus(Planted):
    """Drops a draw that no child carries, and draws the bonus afresh."""

    def walk(self, tree, scores, sampler):
        path, row = [], 0
        while True:
            probs = target_probs(scores, row)
            child = tree.child(row, drawn(probs, sampler))
            if child is None:
                return path, drawn(probs, sampler)
            path.append(row := child)


@attrs.define(eq=False)
class CommitsASibling(MarkovTarget):
    """Keeps the cache row of the accepted node's sibling."""

    def commit(self, paths):
        (tree,) = self._scored
        wrong = [[children(tree, int(tree.parent[row]))[0] for row in path] for path in paths]
        super().commit([np.array(path, np.int64) for path in wrong])


@attrs.define(eq=False)
class ForgetsTheRoot(MarkovTarget):
    """Commits the accepted path without the root above it."""

    def commit(self, paths):
        super().commit(paths)
        (cache,), (path,) = self._caches, paths
        del cache[len(cache) - len(path) - 1]


# -- told apart -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verifier", [MatchVerifier(), RightByHand()])
def test_right_decoders_have_no_bias(verifier):
    assert bias(verifier) < 1e-9


@pytest.mark.parametrize(
    "verifier", [AcceptsWithoutResidual(), KeepsTheLongestPath(), TreeSeesTheDraw(), DrawsAgainForTheBonus()]
)
def test_wrong_verifiers_are_caught(verifier):
    assert bias(verifier) > 1e-3


@pytest.mark.parametrize("target", [CommitsASibling, ForgetsTheRoot])
def test_wrong_commits_are_caught(target):
    assert bias(MatchVerifier(), target(TABLE)) > 1e-3
