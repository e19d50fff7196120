"""MatchVerifier: rules V1-V4 over drawn trees and targets, and stopping inside a path."""

from collections import defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treegraft.interfaces import Verdict, Wants
from treegraft.sampling import Draws, SamplingRules, Scores, SeededDraws, TokenSampler
from treegraft.testing import MarkovTarget, outcomes
from treegraft.testing.strategies import draft_trees, markov_tables
from treegraft.tree import DraftTree, Expansion
from treegraft.verify import MatchVerifier

SAMPLED = SamplingRules(greedy=False)


def verified(
    target: MarkovTarget, tree: DraftTree, rules: SamplingRules, draws: Draws, max_tokens: int = 9
) -> tuple[Verdict, TokenSampler]:
    """One verification of `tree` below the prompt [1, root]."""
    prompt = [1, int(tree.token[0])]
    sampler = TokenSampler(prompt, rules, draws, max_tokens)
    target.prefill([np.array(prompt)], Wants())
    (scores,) = target.score([tree])
    sampler.begin(tree, scores)
    return MatchVerifier().verify(tree, scores, sampler), sampler


def probability(target: MarkovTarget, tokens: list[int]) -> float:
    """Of `tokens` after their first two, from the table alone."""
    prob = 1.0
    for i in range(2, len(tokens)):
        row = torch.tensor(target.table[tokens[i - 2], tokens[i - 1]]).float().double().softmax(-1)
        prob *= float(row[tokens[i]])
    return prob


@given(draft_trees(), markov_tables(), st.integers(1, 3))
def test_v1_what_is_emitted_has_the_targets_probability(tree, table, max_tokens):
    target = MarkovTarget(table)
    found: dict[tuple[int, ...], float] = defaultdict(float)
    for weight, (_, sampler) in outcomes(lambda draws: verified(target, tree, SAMPLED, draws, max_tokens)):
        found[tuple(sampler.emitted)] += weight
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-9)
    for emitted, weight in found.items():
        assert weight == pytest.approx(probability(target, [1, int(tree.token[0]), *emitted]), abs=1e-9)


@given(draft_trees(), markov_tables())
def test_as_many_are_accepted_as_any_rule_could(tree, table):
    """The expected number of accepted tokens is the sum over nodes of the target's probability of their path."""
    target = MarkovTarget(table)
    accepted = sum(w * len(v.path) for w, (v, _) in outcomes(lambda draws: verified(target, tree, SAMPLED, draws)))
    nodes = range(1, len(tree))
    possible = sum(probability(target, [1, *tree.token[tree.path(row)].tolist()]) for row in nodes)
    assert accepted == pytest.approx(possible, abs=1e-9)


@given(draft_trees(), markov_tables(), st.integers(0, 99), st.sets(st.integers(0, 2)), st.integers(1, 4))
def test_v2_v3_a_root_path_and_at_least_one_token(tree, table, seed, eos_ids, max_tokens):
    rules = SamplingRules(greedy=False, eos_ids=frozenset(eos_ids))
    verdict, sampler = verified(MarkovTarget(table), tree, rules, SeededDraws(seed), max_tokens)
    assert tree.parent[verdict.path].tolist() == [0, *verdict.path.tolist()][: len(verdict.path)]
    bonus = [] if verdict.bonus_token is None else [verdict.bonus_token]
    assert sampler.emitted == [*tree.token[verdict.path].tolist(), *bonus] and sampler.emitted
    assert verdict.stop_reason == sampler.stop_reason
    if verdict.bonus_token is None:
        assert verdict.stop_reason is not None
    else:
        last = int(verdict.path[-1]) if len(verdict.path) else 0
        assert tree.child(last, verdict.bonus_token) is None


@given(draft_trees(), st.lists(st.integers(0, 2), min_size=10, max_size=10), st.booleans())
def test_v4_a_certain_target_accepts_the_path_that_carries_it(tree, continuation, greedy):
    logits = torch.full((len(tree), 3), -torch.inf)
    for row in range(len(tree)):
        logits[row, continuation[tree.depth[row]]] = 0.0
    sampler = TokenSampler([0], SamplingRules(greedy=greedy), SeededDraws(0), 99)
    sampler.begin(tree, Scores(logits))
    verdict = MatchVerifier().verify(tree, Scores(logits), sampler)
    row = 0
    expected = []
    while (child := tree.child(row, continuation[len(expected)])) is not None:
        expected.append(row := child)
    assert verdict.path.tolist() == expected
    assert verdict.bonus_token == continuation[len(expected)]


@pytest.mark.parametrize("stop_at", range(4))
def test_eos_ends_the_path_where_it_stands(stop_at):
    """At every position of a block: nothing after it is accepted, and there is no bonus after it."""
    tokens = [1, 1, 1, 1]
    tokens[stop_at] = 2
    tree = DraftTree.rooted(0).append(Expansion([0, -1, -2], tokens[:3], [-0.1] * 3), 0, [True])
    logits = torch.full((4, 3), -9.0)
    logits[torch.arange(4), torch.tensor(tokens)] = 0.0
    sampler = TokenSampler([0], SamplingRules(eos_ids=frozenset({2})), SeededDraws(0), 9)
    sampler.begin(tree, Scores(logits))
    verdict = MatchVerifier().verify(tree, Scores(logits), sampler)
    assert verdict.stop_reason == "eos" and sampler.emitted == tokens[: stop_at + 1]
    assert len(verdict.path) == min(stop_at + 1, 3)
    assert verdict.bonus_token == (2 if stop_at == 3 else None)


def test_what_it_declares():
    assert MatchVerifier.lossless and MatchVerifier.accepts == {"deterministic"}
