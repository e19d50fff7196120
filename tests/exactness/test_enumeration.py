"""The instrument itself: branching draws, and the distributions computed with them."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treegraft.errors import InvariantError, ModelError
from treegraft.interfaces import Wants
from treegraft.sampling import SamplingOptions
from treegraft.testing import (
    EnumeratedDraws,
    MarkovTarget,
    markov_table,
    max_difference,
    outcomes,
    table_row,
    target_distribution,
)
from treegraft.tree import DraftTree, Expansion

AT = np.array([0])


def rows(*probs: list[float]) -> torch.Tensor:
    return torch.tensor(probs, dtype=torch.float64)


def test_every_path_once_with_its_probability():
    coin, die = rows([0.25, 0.75]), rows([0.5, 0.0, 0.3, 0.2])

    def run(draws: EnumeratedDraws) -> tuple[int, ...]:
        first = draws.choose(coin, AT)[0]
        return (first, draws.choose(die, AT)[0]) if first else (first,)

    assert list(outcomes(run)) == [
        (0.25, (0,)),
        (0.75 * 0.5, (1, 0)),
        (pytest.approx(0.75 * 0.3), (1, 2)),
        (pytest.approx(0.75 * 0.2), (1, 3)),
    ]


def test_nothing_random_is_one_certain_outcome():
    assert list(outcomes(lambda draws: "always")) == [(1.0, "always")]


def test_rows_branch_on_their_first_read_and_keep_their_token():
    coins = rows([0.5, 0.5], [0.5, 0.5], [0.5, 0.5])

    def run(draws: EnumeratedDraws) -> tuple[int, int, int]:
        chosen = draws.choose(coins, np.arange(3))
        return chosen[2], chosen[0], chosen[2]

    found = list(outcomes(run))
    assert [weight for weight, _ in found] == [0.25] * 4, "the row that is never read does not branch"
    assert {result for _, result in found} == {(a, b, a) for a in (0, 1) for b in (0, 1)}


def test_reads_of_one_position_are_independent():
    """Two `choose` calls are two variables, also where their position is the same."""
    coin = rows([0.5, 0.5])
    found = {r for _, r in outcomes(lambda d: (d.choose(coin, AT)[0], d.choose(coin, AT)[0]))}
    assert found == {(0, 0), (0, 1), (1, 0), (1, 1)}


@given(st.lists(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=3), max_size=4))
def test_weights_sum_to_one(weights):
    tensors = [rows([w / sum(row) for w in row]) for row in weights]
    found = list(outcomes(lambda draws: tuple(draws.choose(probs, AT)[0] for probs in tensors)))
    assert len(found) == math.prod(len(row) for row in weights)
    assert sum(weight for weight, _ in found) == pytest.approx(1.0, abs=1e-12)


def test_runs_that_are_no_function_of_their_draws_are_found_out():
    """A clock, a counter, a random number of another kind: the enumeration would be wrong, so it refuses."""
    calls = iter(range(99))
    with pytest.raises(InvariantError, match="other probabilities"):
        list(outcomes(lambda d: d.choose(rows([0.5, 0.5] if next(calls) == 0 else [0.4, 0.6]), AT)[0]))
    lengths = iter([2, 1])
    with pytest.raises(InvariantError, match="were due"):
        list(outcomes(lambda d: [d.choose(rows([0.5, 0.5]), AT)[0] for _ in range(next(lengths))]))


def test_target_distribution_by_hand():
    """Order 1, two tokens: products of softmax rows; EOS ends an output early."""
    half, quarter = math.log(0.5), math.log(0.25)
    table = np.array([[half, half], [quarter, math.log(0.75)]])
    found = target_distribution(MarkovTarget(table), [0], 2)
    expected = {(0, 0): 0.25, (0, 1): 0.25, (1, 0): 0.125, (1, 1): 0.375}
    assert max_difference(found, expected) < 1e-7  # the table passes through float32
    found = target_distribution(MarkovTarget(table, eos_ids={1}), [0], 2)
    assert max_difference(found, {(0, 0): 0.25, (0, 1): 0.25, (1,): 0.5}) < 1e-7
    assert target_distribution(MarkovTarget(table), [0], 0) == {(): 1.0}


def test_target_distribution_honours_the_options():
    table = np.log(np.array([[0.5, 0.3, 0.2]] * 3))
    target = MarkovTarget(table)
    assert target_distribution(target, [0], 2, SamplingOptions()) == {(0, 0): 1.0}
    found = target_distribution(target, [0], 1, SamplingOptions(temperature=1.0, top_k=2))
    assert max_difference(found, {(0,): 0.625, (1,): 0.375}) < 1e-7
    found = target_distribution(target, [0], 1, SamplingOptions(temperature=0.5))
    assert max_difference(found, {(0,): 25 / 38, (1,): 9 / 38, (2,): 4 / 38}) < 1e-7


def test_max_difference_counts_what_one_side_lacks():
    assert max_difference({(1,): 0.5, (2,): 0.5}, {(1,): 0.5}) == 0.5
    assert max_difference({(1,): 1.0}, {(1,): 1.0}) == 0.0


@pytest.mark.parametrize("order", [1, 2, 3])
def test_toy_target_keeps_the_rules_of_a_target(order):
    """T1-T3: rows equal one-by-one forwards; commit equals a fresh prefill; scoring twice is equal."""
    target = MarkovTarget(markov_table(4, order, seed=order))
    tree = DraftTree.rooted(3).append(Expansion([0, 0, -1, -3], [1, 2, 0, 3], [-1.0] * 4), 0, [True])
    target.prefill([np.array([2, 0, 3])], Wants())
    (scores,) = target.score([tree])
    for row in range(len(tree)):
        context = [2, 0, *tree.token[tree.path(row)].tolist()]
        assert np.array_equal(scores.tensor[row].numpy(), table_row(target.table, context))
    assert torch.equal(target.score([tree])[0].tensor, scores.tensor)
    target.commit([np.array([1, 3, 4])])
    following = target.score([DraftTree.rooted(1)])[0].tensor
    target.prefill([np.array([2, 0, 3, 1, 0, 3, 1])], Wants())
    assert torch.equal(target.score([DraftTree.rooted(1)])[0].tensor, following)


def test_toy_target_shows_its_best_tokens_after_the_prompt():
    target = MarkovTarget(markov_table(4, 2))
    (seen,) = target.prefill([np.array([2, 0, 3])], Wants(num_top=2))
    assert seen.tokens.tolist() == [2, 0] and seen.top_ids.shape == (2, 2)
    assert seen.top_ids[1, 0] == table_row(target.table, [2, 0]).argmax()
    (seen,) = target.prefill([np.array([2])], Wants(num_top=2))
    assert seen.tokens.tolist() == [] and seen.top_ids.shape == (0, 2)


def test_toy_target_refuses_what_it_cannot_be():
    with pytest.raises(ModelError, match="table"):
        MarkovTarget(np.zeros((3, 4)))
    with pytest.raises(ModelError, match="hidden"):
        MarkovTarget(np.zeros((3, 3))).prefill([np.array([0])], Wants(hidden_layers=(1,)))
