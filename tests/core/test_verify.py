"""The verifiers' rules V1-V4 over drawn trees, chains and targets, and stopping inside a path."""

import itertools
from collections import defaultdict

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treegraft.errors import InvariantError
from treegraft.interfaces import Verdict, Wants
from treegraft.sampling import Draws, SamplingRules, Scores, SeededDraws, TokenSampler
from treegraft.testing import MarkovTarget, outcomes
from treegraft.testing.strategies import draft_trees, markov_tables
from treegraft.tree import DraftTree, Expansion
from treegraft.verify import BlockVerifier, MatchVerifier

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
    assert MatchVerifier.lossless and MatchVerifier.accepts == {"deterministic"} and MatchVerifier.repeats_plain
    assert BlockVerifier.lossless and BlockVerifier.accepts == {"sampled"} and not BlockVerifier.repeats_plain


# -- drawn chains -----------------------------------------------------------------------------------------------------


def the_same(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores


AS_A_BLOCK = SAMPLED
TOKEN_BY_TOKEN = SamplingRules(greedy=False, processors=(the_same,))  # it might read the text
WEIGHTS = st.lists(st.sampled_from([0.0, 1.0, 2.0]) | st.floats(0.1, 5.0), min_size=3, max_size=3).filter(any)
DRAFTS = st.lists(WEIGHTS, max_size=3).map(lambda rows: [np.array(row) / sum(row) for row in rows])


def chain(tokens: list[int], draft_probs: list[np.ndarray], root: int = 0) -> DraftTree:
    log_prob = [float(np.log(probs[token])) for token, probs in zip(tokens, draft_probs, strict=True)]
    expansion = Expansion(-np.arange(len(tokens)), tokens, log_prob, np.array(draft_probs).reshape(-1, 3))
    return DraftTree.rooted(root).append(expansion, 0, [True])


def judged(
    target: MarkovTarget, draft_probs: list[np.ndarray], rules: SamplingRules, draws: Draws, max_tokens: int = 9
) -> tuple[Verdict, TokenSampler, DraftTree]:
    """A chain drawn below the prompt [1, 0], and its verification."""
    sampler = TokenSampler([1, 0], rules, draws, max_tokens)
    stream = sampler.proposals(0).stream
    tree = chain([stream.draw(probs) for probs in draft_probs], draft_probs)
    target.prefill([np.array([1, 0])], Wants())
    (scores,) = target.score([tree])
    sampler.begin(tree, scores)
    return BlockVerifier().verify(tree, scores, sampler), sampler, tree


@pytest.mark.parametrize("rules", [AS_A_BLOCK, TOKEN_BY_TOKEN], ids=["block", "tokens"])
@given(DRAFTS, markov_tables())
def test_v1_a_drawn_chain_goes_on_as_the_target_would(rules, draft_probs, table):
    """Whatever the drafter drew from: what is emitted, and then as many of the target's own tokens as are missing."""
    target, length = MarkovTarget(table), len(draft_probs) + 1
    found: dict[tuple[int, ...], float] = defaultdict(float)
    for weight, (_, sampler, _) in outcomes(lambda draws: judged(target, draft_probs, rules, draws)):
        for text in itertools.product(range(3), repeat=length):
            emitted = tuple(sampler.emitted)
            if text[: len(emitted)] == emitted:
                rest = probability(target, [1, 0, *text]) / (probability(target, [1, 0, *emitted]) or 1.0)
                found[text] += weight * rest
    for text, weight in found.items():
        assert weight == pytest.approx(probability(target, [1, 0, *text]), abs=1e-9)


@pytest.mark.parametrize("rules", [AS_A_BLOCK, TOKEN_BY_TOKEN], ids=["block", "tokens"])
@given(DRAFTS, markov_tables(), st.integers(0, 99), st.sets(st.integers(0, 2)), st.integers(1, 4))
def test_v2_v3_of_a_drawn_chain_a_root_path_and_at_least_one_token(rules, drafts, table, seed, eos_ids, max_tokens):
    rules = attrs.evolve(rules, eos_ids=frozenset(eos_ids))
    verdict, sampler, tree = judged(MarkovTarget(table), drafts, rules, SeededDraws(seed), max_tokens)
    assert verdict.path.tolist() == list(range(1, len(verdict.path) + 1))
    bonus = [] if verdict.bonus_token is None else [verdict.bonus_token]
    assert sampler.emitted == [*tree.token[verdict.path].tolist(), *bonus] and 0 < len(sampler.emitted) <= max_tokens
    assert verdict.stop_reason == sampler.stop_reason and (bonus or verdict.stop_reason)


@pytest.mark.parametrize("greedy", [True, False])
@given(st.lists(st.integers(0, 2), min_size=1, max_size=4), st.lists(st.integers(0, 2), min_size=5, max_size=5))
def test_v4_a_certain_target_accepts_what_it_would_have_said(greedy, tokens, continuation):
    logits = torch.full((len(tokens) + 1, 3), -torch.inf)
    logits[torch.arange(len(logits)), torch.tensor(continuation[: len(logits)])] = 0.0
    tree = chain(tokens, [np.array([0.2, 0.3, 0.5])] * len(tokens))
    sampler = TokenSampler([0], SamplingRules(greedy=greedy), SeededDraws(0), 99)
    sampler.begin(tree, Scores(logits))
    verdict = BlockVerifier().verify(tree, Scores(logits), sampler)
    shared = next((i for i, token in enumerate(tokens) if token != continuation[i]), len(tokens))
    assert verdict.path.tolist() == list(range(1, shared + 1)) and verdict.bonus_token == continuation[shared]


def expected_accepted(target: MarkovTarget, drafts: list[np.ndarray], rules: SamplingRules) -> float:
    return sum(w * len(verdict.path) for w, (verdict, _, _) in outcomes(lambda d: judged(target, drafts, rules, d)))


@given(DRAFTS, markov_tables())
def test_a_block_accepts_no_less_than_its_tokens_one_by_one(drafts, table):
    target = MarkovTarget(table)
    whole, single = (expected_accepted(target, drafts, rules) for rules in (AS_A_BLOCK, TOKEN_BY_TOKEN))
    assert whole >= single - 1e-9


def test_what_is_accepted_by_hand():
    """Target (1/3, 2/3) at both places, drafter (2/3, 1/3): the example of the paper's introduction."""
    target = MarkovTarget(np.log(np.array([[1 / 3, 2 / 3, 1e-300]] * 3)))
    drafts = [np.array([2 / 3, 1 / 3, 0.0])] * 2
    assert expected_accepted(target, drafts, AS_A_BLOCK) == pytest.approx(11 / 9, abs=1e-6)
    assert expected_accepted(target, drafts, TOKEN_BY_TOKEN) == pytest.approx(10 / 9, abs=1e-6)


@pytest.mark.parametrize("rules", [AS_A_BLOCK, TOKEN_BY_TOKEN], ids=["block", "tokens"])
def test_a_drafter_like_the_target_is_accepted_for_certain_and_one_apart_from_it_never(rules):
    row, target = np.full(3, 1 / 3), MarkovTarget(np.zeros((3, 3)))
    assert {len(v.path) for _, (v, _, _) in outcomes(lambda draws: judged(target, [row] * 3, rules, draws))} == {3}
    apart = MarkovTarget(np.array([[-np.inf, 0.0, 0.0]] * 3))
    drafts = [np.array([1.0, 0.0, 0.0])] * 2
    assert {len(v.path) for _, (v, _, _) in outcomes(lambda draws: judged(apart, drafts, rules, draws))} == {0}


def test_processors_that_read_the_text_see_the_true_prefix_once_a_token():
    seen: list[list[int]] = []

    def watch(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(ids[0].tolist())
        return scores

    rules = SamplingRules(greedy=False, processors=(watch,), keep_scores=True, keep_logits=True)
    for seed in range(20):
        seen.clear()
        drafts = [np.array([0.6, 0.3, 0.1])] * 3
        _, sampler, _ = judged(MarkovTarget(np.zeros((3, 3))), drafts, rules, SeededDraws(seed))
        assert seen == [[1, 0, *sampler.emitted[:i]] for i in range(len(sampler.emitted))]
        assert len(sampler.scores) == len(sampler.logits) == len(sampler.emitted)


def test_kept_scores_are_those_of_the_emitted_tokens():
    rules = SamplingRules(greedy=False, keep_scores=True)
    target = MarkovTarget(np.arange(27.0).reshape(3, 3, 3) % 5)
    for seed in range(20):
        _, sampler, _ = judged(target, [np.array([0.6, 0.3, 0.1])] * 2, rules, SeededDraws(seed))
        text = [1, 0, *sampler.emitted]
        rows = [target.table[text[i], text[i + 1]].tolist() for i in range(len(sampler.emitted))]
        assert [row[0].tolist() for row in sampler.scores] == rows


def test_what_is_no_drawn_chain_is_refused():
    siblings = Expansion([0, 0], [1, 2], [-1.0, -1.0], np.full((2, 3), 1 / 3))
    for expansion in (siblings, Expansion([0, -1], [1, 2], [-1.0, -1.0])):
        tree = DraftTree.rooted(0).append(expansion, 0, [True])
        sampler = TokenSampler([0], SAMPLED, SeededDraws(0), 9)
        scores = Scores(torch.zeros(3, 3))
        sampler.begin(tree, scores)
        with pytest.raises(InvariantError, match=r"(?s)not a chain of drawn tokens.*verifier match"):
            BlockVerifier().verify(tree, scores, sampler)
