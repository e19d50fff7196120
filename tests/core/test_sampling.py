"""Draws, scores, options and the token sampler of a request."""

import random
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treegraft import sampling
from treegraft.errors import RequestError
from treegraft.sampling import (
    Draws,
    ProposalSampler,
    SamplingOptions,
    SamplingRules,
    Scores,
    SeededDraws,
    Stream,
    TokenSampler,
    top_tokens,
)
from treegraft.tree import DraftTree, Expansion

# -- draws ------------------------------------------------------------------------------------------------------------


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def chosen(draws: SeededDraws, probs: torch.Tensor, positions: np.ndarray) -> np.ndarray:
    """The token at each of `positions`, all from `probs` [V]."""
    rows = draws.choose(probs.expand(len(positions), -1), positions)
    return np.array([rows[row] for row in range(len(positions))])


@given(st.integers(0, 2**64 - 1), st.lists(st.integers(0, 2**40), min_size=1, max_size=6))
def test_a_draw_is_a_function_of_seed_and_position(seed, positions):
    """Whatever was read before, in whatever order, and with whatever company in the batch."""
    one, other = SeededDraws(seed), SeededDraws((seed, 0))
    expected = {p: one.exponentials(p, 3).tolist() for p in positions}
    assert {p: other.exponentials(p, 3).tolist() for p in reversed(positions)} == expected
    probs = torch.full((1, 1100), 1 / 1100, dtype=torch.float64)
    together = other.choose(probs.expand(len(positions), -1), np.array(positions))
    backwards = [together[row] for row in reversed(range(len(positions)))][::-1]
    assert backwards == [one.choose(probs, np.array([p]))[0] for p in positions]
    assert backwards == [together[row] for row in range(len(positions))], "a row that is read again stays what it was"


def test_seeds_keep_their_meaning():
    """Pinned: a seed noted down today gives the same text tomorrow."""
    # Processors differ in the last bit of a logarithm.
    assert SeededDraws(0).exponentials(0, 2) == pytest.approx([0.011613935705874755, 0.276477342630254], rel=1e-14)
    assert SeededDraws((7, 3)).exponentials(41, 2) == pytest.approx([0.9542064188398276, 0.5032476261357559], rel=1e-14)
    probs = torch.arange(2000, dtype=torch.float64) / (1000 * 1999)
    assert chosen(SeededDraws(7), probs, np.arange(5)).tolist() == [201, 1086, 567, 1875, 1695]


def test_positions_rows_and_seeds_draw_apart():
    """No number of one stream stands in another, however long: neighbouring positions do not run into each other."""
    draws = [SeededDraws(seed) for seed in (0, 1, (0, 1), (1, 1), 2**63, 2**64 - 1)]
    streams = [d.exponentials(p, 3000).tolist() for d in draws for p in (0, 1, 2, 3, 750, 2**32)]
    assert len({number for stream in streams for number in stream}) == len(streams) * 3000


def test_a_padded_vocabulary_draws_the_same():
    """Some checkpoints of a family pad the vocabulary further than others; fewer numbers are a prefix of more."""
    probs = torch.rand(1300, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    probs /= probs.sum()
    draws, positions = SeededDraws(2), np.arange(50)
    for padding in (1, 236, 800):
        padded = torch.nn.functional.pad(probs, (0, padding))
        assert chosen(draws, padded, positions).tolist() == chosen(draws, probs, positions).tolist()


def test_without_a_seed_a_fresh_one_is_reported_and_repeats_the_run():
    first, second = SeededDraws(), SeededDraws(None)
    assert first.seed != second.seed
    assert SeededDraws(first.seed).exponentials(5, 4).tolist() == first.exponentials(5, 4).tolist()
    assert SeededDraws((3, 4)).seed == (3, 4) and SeededDraws(3).seed == 3


@pytest.mark.parametrize("seed", [-1, 2**64, 1.0, True, "1", (1,), (1, 2, 3), (1, -1), (0, True), [1, 2], (0, 2**64)])
def test_seeds_are_refused_not_coerced(seed):
    with pytest.raises(RequestError, match="seed"):
        SeededDraws(seed)


def test_global_random_state_is_untouched():
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    chosen(SeededDraws(), torch.full((4,), 0.25, dtype=torch.float64), np.arange(3))
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before


def test_exponentials_are_exponential():
    """Chi-square over 64 bins, of single ones, of neighbours together, across positions, seeds, rows and tokens."""
    by_position = [SeededDraws(11).exponentials(p, 1)[0] for p in range(6400)]
    by_seed = [SeededDraws(s).exponentials(11, 1)[0] for s in range(6400)]
    by_row = [SeededDraws((11, r)).exponentials(11, 1)[0] for r in range(6400)]
    by_token = SeededDraws(11).exponentials(11, 6400)
    for exponentials in (by_position, by_seed, by_row, by_token):
        uniforms = np.exp(-np.array(exponentials))
        singles = np.bincount((uniforms * 64).astype(int), minlength=64)
        pairs = np.bincount((uniforms[:-1] * 8).astype(int) * 8 + (uniforms[1:] * 8).astype(int), minlength=64)
        # 63 degrees of freedom: 110 is exceeded by chance once in 5000, and the seeds are fixed.
        assert chi_square(singles, np.full(64, 100.0)) < 110
        assert chi_square(pairs, np.full(64, 6399 / 64)) < 110


def test_exponentials_are_positive_finite_and_fine_near_zero(monkeypatch):
    """All that random words can be: a token of probability 1e-17 wins by an exponential below 1e-16."""
    words = np.array([0, 1, 2, 2**63, 2**64 - 1], dtype=np.uint64)
    monkeypatch.setattr(np.random, "Philox", lambda **_: SimpleNamespace(random_raw=lambda size: words[:size]))
    found = SeededDraws(0).exponentials(0, 5)
    assert (np.diff(found) > 0).all() and found[0] > 0 and np.isfinite(found).all()
    assert found[:3] == pytest.approx(np.array([0.5, 1.5, 2.5]) * 2.0**-64, rel=1e-12)
    assert found[3] == pytest.approx(np.log(2))


@pytest.mark.parametrize("block", [1, 2, 3, 512])
def test_choices_follow_the_probabilities(block, monkeypatch):
    """Also of neighbouring positions together. Blocks of one token: all is decided among blocks; of 512: within one."""
    monkeypatch.setattr(sampling, "_BLOCK", block)
    probs = np.array([0.4, 0.0, 0.3, 0.2, 0.1])
    tokens = chosen(SeededDraws(5), torch.from_numpy(probs), np.arange(4000))
    counts, mass = np.bincount(tokens, minlength=5), probs > 0
    assert counts[1] == 0
    assert chi_square(counts[mass], 4000 * probs[mass]) < 16.3  # 3 degrees of freedom, 1 in 1000
    pairs, both = np.bincount(tokens[:-1] * 5 + tokens[1:], minlength=25), np.outer(probs, probs).ravel()
    assert chi_square(pairs[both > 0], 3999 * both[both > 0]) < 37.7  # 15 degrees of freedom, 1 in 1000


def test_choices_follow_the_probabilities_in_a_large_vocabulary():
    probs = torch.randn(5000, generator=torch.Generator().manual_seed(1), dtype=torch.float64).mul(2).softmax(-1)
    tokens = chosen(SeededDraws(6), probs, np.arange(6000))
    bins = np.random.default_rng(0).permutation(5000) % 64  # neither blocks nor places in one
    expected = np.bincount(bins, weights=probs.numpy()) * 6000
    assert chi_square(np.bincount(bins[tokens], minlength=64), expected) < 103.5  # 63 degrees of freedom, 1 in 1000


class EqualNoise(SeededDraws):
    """Every exponential is the given one."""

    def __init__(self, value: float):
        super().__init__(0)
        self.value = value

    def exponentials(self, position: int, size: int) -> np.ndarray:
        return np.full(size, self.value)


WEIGHTS = st.lists(
    st.sampled_from([0.0, 5e-324, 1e-300, 1e-17, 0.1, 1 / 3, 1.0]) | st.floats(0, 1), min_size=1, max_size=8
).filter(lambda weights: sum(weights) > 1e-300)


@given(WEIGHTS, st.integers(1, 3), st.sampled_from([2.0**-65, 1.0, 36.7]) | st.integers(0, 2**32))
def test_a_token_without_mass_is_never_chosen(weights, block, noise):
    probs = torch.tensor(weights, dtype=torch.float64)
    probs = probs / probs.sum()
    draws = EqualNoise(noise) if isinstance(noise, float) else SeededDraws(noise)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "_BLOCK", block)
        (token,) = chosen(draws, probs, np.array([0]))
    assert probs[token] > 0


def test_rounding_changes_a_choice_hardly_ever():
    """Errors as float32 makes them, in every logit of a long-tailed distribution; by inverse CDF they tell often."""
    rng = np.random.default_rng(0)
    logits = -1.1 * np.log(np.arange(1, 20001))
    draws, by_race, by_inverse_cdf = SeededDraws(0), 0, 0
    for position in range(500):
        rng.shuffle(logits)
        rows = torch.from_numpy(np.stack([logits, logits + rng.normal(0, 1e-5, logits.size)])).softmax(-1)
        one, other = draws.choose(rows, np.array([position, position]))
        by_race += one != other
        one, other = torch.searchsorted(rows.cumsum(-1), torch.full((2, 1), rng.random(), dtype=rows.dtype))
        by_inverse_cdf += int(one != other)
    assert by_race == 0 and by_inverse_cdf > 4


@pytest.mark.parametrize("block", [1, 3, 512])
def test_the_gap_of_a_token_is_what_its_log_probability_lacks(block, monkeypatch):
    """And none is drawn for errors in all log probabilities of less than half its gap."""
    monkeypatch.setattr(sampling, "_BLOCK", block)
    probs = torch.tensor([0.3, 0.0, 0.1, 0.25, 0.15, 0.2], dtype=torch.float64)
    draws, rng = SeededDraws(3), np.random.default_rng(3)

    def drawn(log_errors: np.ndarray) -> int:
        return draws.choose(probs[None] * torch.from_numpy(np.exp(log_errors)), np.array([position]))[0]

    for position, token in product(range(40), range(6)):
        alone, gap = np.eye(6)[token], draws.gap(probs, position, token)
        assert (gap == 0) == (drawn(0 * alone) == token) and (gap == np.inf) == (token == 1)
        if 0 < gap < np.inf:
            assert all(drawn(rng.uniform(-0.49, 0.49, 6) * gap) != token for _ in range(5))
            assert drawn(0.99 * gap * alone) != token
            # Where blocks and tokens both race, its block has to gain as much as a whole.
            block_too = np.arange(6) // block == token // block if block == 3 else 0
            assert drawn(1.01 * gap * (alone + block_too)) == token


# -- scores -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_scores_are_float32_copies(dtype):
    scores = Scores(torch.arange(6, dtype=dtype).reshape(2, 3))
    for given_out in (scores.logits(1), scores.batch()):
        assert given_out.dtype == torch.float32
        given_out.zero_()
    assert scores.logits(1).tolist() == [3.0, 4.0, 5.0] and scores.batch().tolist() == [[0, 1, 2], [3, 4, 5]]


def test_top_tokens_and_hidden_states():
    logits = torch.tensor([[0.0, 2.0, 1.0], [5.0, -torch.inf, 4.0], [0.0, 100.0, 0.0]], dtype=torch.float64)
    scores = Scores(logits, torch.arange(6.0).reshape(3, 1, 2))
    ids, log_probs = scores.top(np.array([2, 0]), 2)
    assert ids[:, 0].tolist() == [1, 1] and ids[1].tolist() == [1, 2]
    assert np.allclose(log_probs[1], logits[0].log_softmax(-1)[[1, 2]]) and (log_probs <= 0).all()
    assert scores.top(np.array([0]), 99)[0].shape == (1, 3)
    assert scores.hidden(np.array([2, 0])).tolist() == [[[4.0, 5.0]], [[0.0, 1.0]]]
    assert Scores(logits).hidden(np.array([0])) is None
    assert top_tokens(logits[:0], 2)[0].shape == (0, 2)


# -- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", value) for value in (-0.1, float("nan"), float("inf"), "1", None, True)),
        *(("top_p", value) for value in (0.0, 1.1, float("nan"), "1", True)),
        *(("top_k", value) for value in (-1, 1.0, True, None)),
        *(("stop", value) for value in ("END", ("",), (1,), ["END"])),
    ],
)
def test_options_are_refused_not_coerced(name, value):
    with pytest.raises(RequestError, match=name):
        SamplingOptions(**{"temperature": 1.0, name: value})


def test_options_that_greedy_decoding_would_drop_are_refused():
    for options in ({"top_p": 0.9}, {"top_k": 5}):
        with pytest.raises(RequestError, match="temperature"):
            SamplingOptions(temperature=0.0, **options)
    SamplingOptions(temperature=0.7, top_p=0.9, top_k=5, stop=("END",))


# -- the token sampler ------------------------------------------------------------------------------------------------


class Recorded(Draws):
    """Takes the last token with mass, and notes which positions are read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def choose(self, probs, positions):
        draws = self

        class Rows:
            def __getitem__(self, row: int) -> int:
                draws.read.append(int(positions[row]))
                return int(torch.nonzero(probs[row])[-1])

        return Rows()

    def draw(self, probs, key):
        self.read.append(key)
        return int(np.flatnonzero(probs)[-1])


def one_hot(*tokens: int, vocab_size: int = 4) -> Scores:
    """Row i leaves all mass on `tokens[i]`."""
    logits = torch.full((len(tokens), vocab_size), -torch.inf, dtype=torch.float64)
    logits[torch.arange(len(tokens)), torch.tensor(tokens)] = 0.0
    return Scores(logits)


def on_accelerator(scores: Scores) -> SimpleNamespace:
    """The same scores, said to live on a device whose arg-maxes are read at once."""
    device = SimpleNamespace(type="cuda")
    return SimpleNamespace(tensor=SimpleNamespace(device=device), batch=scores.batch, logits=scores.logits)


@pytest.fixture(autouse=True)
def waited_for(monkeypatch):
    """The accelerators that were waited for."""
    waited: list[object] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    return waited


CHAIN = DraftTree.rooted(0).append(Expansion([0, -1, -2], [1, 2, 3], [-1.0] * 3), 0, [True])


def begun(rules: SamplingRules, scores: Scores, max_tokens: int = 10, draws: Draws | None = None) -> TokenSampler:
    sampler = TokenSampler([2, 0], rules, draws or SeededDraws(0), max_tokens)
    sampler.begin(CHAIN, scores)
    return sampler


@pytest.mark.parametrize("place", [lambda scores: scores, on_accelerator])
def test_tokens_in_order_at_consecutive_positions(place):
    draws = Recorded()
    sampler = begun(SamplingRules(greedy=False), place(one_hot(1, 2, 3, 0)), draws=draws)
    assert [sampler.next(row) for row in range(3)] == [1, 2, 3]
    assert draws.read == [2, 3, 4], "the position of each emitted token, and rows that were not reached are not read"
    assert sampler.emitted == [1, 2, 3] and sampler.num_emitted == 3 and sampler.num_prompt == 2
    assert sampler.tokens.tolist() == [2, 0, 1, 2, 3] and not sampler.tokens.flags.writeable
    sampler.begin(DraftTree.rooted(3), place(one_hot(1)))
    assert sampler.next(0) == 1 and draws.read[-1] == 5


@pytest.mark.parametrize("greedy", [True, False])
@given(seed=st.integers(0, 2**32))
def test_a_round_read_at_once_gives_what_rows_read_one_by_one_give(greedy, seed):
    logits = torch.from_numpy(np.random.default_rng(seed).integers(-2, 3, (4, 5)).astype(np.float64))
    doubled = lambda ids, scores: scores * 2.0  # noqa: E731
    rules = SamplingRules(greedy=greedy, processors=(doubled,), warpers=(doubled,))
    lazy, batched = begun(rules, Scores(logits)), begun(rules, on_accelerator(Scores(logits)))
    assert [lazy.next(row) for row in range(4)] == [batched.next(row) for row in range(4)]


def test_greedy_takes_the_first_of_equal_maxima():
    tied = Scores(torch.tensor([[0.0, 3.0, 3.0, 3.0]]))
    same = lambda ids, scores: scores  # noqa: E731
    for rules in (SamplingRules(), SamplingRules(processors=(same,))):
        assert begun(rules, tied).next(0) == begun(rules, on_accelerator(tied)).next(0) == 1


def test_processors_see_the_true_prefix_once_a_token():
    """Row by row, in order, float32, with everything emitted so far; and they may write into their scores."""
    seen: list[list[int]] = []

    def ban_what_was_seen(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert scores.dtype == torch.float32 and scores.shape == (1, 4) and ids.dtype == torch.int64
        seen.append(ids[0].tolist())
        scores[:, ids[0]] = -torch.inf
        return scores

    scores = Scores(torch.zeros(4, 4))
    sampler = begun(SamplingRules(processors=(ban_what_was_seen,)), scores)
    assert [sampler.next(0), sampler.next(1)] == [1, 3]
    assert seen == [[2, 0], [2, 0, 1]]
    assert not scores.tensor.any(), "the forward's rows are not the processor's to change"


def test_processors_run_in_order_before_temperature_like_softmax():
    double = lambda ids, scores: scores * 2  # noqa: E731
    keep_largest = lambda ids, scores: scores.masked_fill(scores < 3, -torch.inf)  # noqa: E731
    draws = Recorded()
    rules = SamplingRules(greedy=False, processors=(double, keep_largest))
    assert begun(rules, Scores(torch.tensor([[1.6, 2.0, 1.0, 0.0]])), draws=draws).next(0) == 1


@pytest.mark.parametrize("limit", ["length", "context_limit"])
def test_the_limit_ends_a_request_by_its_name(limit):
    sampler = TokenSampler([0], SamplingRules(), SeededDraws(0), 2, limit)
    sampler.begin(CHAIN, one_hot(1, 2, 3))
    assert (sampler.next(0), sampler.stop_reason) == (1, None)
    assert (sampler.next(1), sampler.stop_reason) == (2, limit)
    with pytest.raises(RuntimeError, match="after the end"):
        sampler.next(2)
    assert sampler.emitted == [1, 2]


def test_nothing_to_emit_is_the_end_at_once():
    sampler = TokenSampler([0], SamplingRules(), SeededDraws(0), 0)
    assert sampler.stop_reason == "length" and sampler.emitted == []
    sampler.begin(CHAIN, one_hot(1))
    with pytest.raises(RuntimeError, match="length"):
        sampler.next(0)


def test_next_needs_a_round():
    with pytest.raises(RuntimeError, match="before begin"):
        TokenSampler([0], SamplingRules(), SeededDraws(0), 5).next(0)


def test_eos_and_criteria_are_tested_after_every_token():
    seen: list[list[int]] = []

    def two_in_a_row(ids: torch.Tensor, scores: object) -> torch.Tensor:
        seen.append(ids[0].tolist())
        return ids[:, -1] == ids[:, -2]

    rules = SamplingRules(criteria=(two_in_a_row,), eos_ids=frozenset({3}))
    sampler = begun(rules, one_hot(1, 1, 1, 1))
    assert [sampler.next(0), sampler.next(1)] == [1, 1] and sampler.stop_reason == "stop"
    assert seen == [[2, 0, 1], [2, 0, 1, 1]]
    sampler = begun(rules, one_hot(1, 3, 1))
    assert [sampler.next(0), sampler.next(1)] == [1, 3] and sampler.stop_reason == "eos"


def test_the_first_reason_to_end_is_reported():
    always = lambda ids, scores: True  # noqa: E731
    for rules, reason in [
        (SamplingRules(eos_ids=frozenset({1}), criteria=(always,)), "eos"),
        (SamplingRules(criteria=(always,)), "stop"),
        (SamplingRules(), "length"),
    ]:
        sampler = begun(rules, one_hot(1), max_tokens=1)
        sampler.next(0)
        assert sampler.stop_reason == reason


def test_the_buffer_grows():
    """Beyond its first 256 tokens, and again, with the prefix intact for processors and criteria."""
    lengths: list[int] = []

    def watch(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        lengths.append(ids.shape[1])
        return scores

    sampler = TokenSampler([3, 1], SamplingRules(processors=(watch,)), SeededDraws(0), 1500)
    tokens = [i % 4 for i in range(1500)]
    early = sampler.tokens
    for token in tokens:
        sampler.begin(CHAIN, one_hot(token))
        sampler.next(0)
    assert sampler.tokens.tolist() == [3, 1, *tokens] and early.tolist() == [3, 1]
    assert lengths == list(range(2, 1502)) and sampler.stop_reason == "length"


@pytest.mark.parametrize("greedy", [True, False])
def test_draws_wait_for_the_forward_first_and_arg_maxes_by_being_read(greedy, waited_for):
    begun(SamplingRules(greedy=greedy), on_accelerator(one_hot(1, 2, 3, 0)))
    assert len(waited_for) == (not greedy)


def test_probabilities_that_carry_gradients_are_drawn_from_like_others():
    probs = torch.rand(3, 300, dtype=torch.float64).softmax(-1)
    tracked = probs.clone().requires_grad_()
    positions = np.arange(3)
    plain, own = (SeededDraws(5).choose(each, positions) for each in (probs, tracked))
    assert [plain[row] for row in range(3)] == [own[row] for row in range(3)]
    assert SeededDraws(5).gap(tracked[0], 0, own[0]) == 0.0


# -- draws of others --------------------------------------------------------------------------------------------------

KEYS = st.tuples(st.integers(0, 2**40), st.integers(0, 2**20), st.integers(0, 9))


@given(st.integers(0, 2**64 - 1), st.lists(KEYS, min_size=1, max_size=6))
def test_a_keyed_draw_is_a_function_of_seed_and_key(seed, keys):
    probs = np.full(100_000, 1e-5)
    expected = [SeededDraws(seed).draw(probs, key) for key in keys]
    again = SeededDraws((seed, 0))
    assert [again.draw(probs, key) for key in reversed(keys)] == expected[::-1]


def test_keyed_draws_keep_their_meaning():
    """Pinned, as those by position are."""
    probs = np.full(1000, 1e-3)
    assert [SeededDraws(7).draw(probs, key) for key in [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)]] == [
        832,
        950,
        600,
        210,
    ]
    assert SeededDraws((7, 1)).draw(probs, (0, 0, 0)) != 832


def test_no_key_has_the_noise_of_another_or_of_a_position():
    """Neighbours in each of the three parts of a key, and the words that positions read."""
    probs = np.full(2**20, 2.0**-20)
    keys = list(product((0, 1, 2, 700), (0, 1, 2), (0, 1, 2)))
    drawn = [SeededDraws(3).draw(probs, key) for key in keys]
    assert len(set(drawn)) == len(keys)
    words = {tuple(SeededDraws(3)._words([0, position, 0, 0], 4)) for position in (0, 1, 2, 700)}
    own = {tuple(SeededDraws(3)._words([0, round, ordinal, 1 + stream], 4)) for round, ordinal, stream in keys}
    assert len(own) == len(keys) and not words & own


@pytest.mark.parametrize("vary", range(3))
def test_keyed_draws_follow_the_probabilities(vary):
    """Along each part of the key, of any sum; what has no mass is not drawn."""
    probs = np.array([0.0, 0.8, 0.0, 0.6, 0.4, 0.2, 0.0])
    keys = [tuple(i if part == vary else 5 for part in range(3)) for i in range(4000)]
    tokens = np.array([SeededDraws(2).draw(probs, key) for key in keys])
    counts, mass = np.bincount(tokens, minlength=7), probs > 0
    assert counts[~mass].sum() == 0
    assert chi_square(counts[mass], 2000 * probs[mass]) < 16.3  # 3 degrees of freedom, 1 in 1000
    pairs, both = np.bincount(tokens[:-1] * 7 + tokens[1:], minlength=49), np.outer(probs, probs).ravel() / 4
    assert chi_square(pairs[both > 0], 3999 * both[both > 0]) < 37.7  # 15 degrees of freedom, 1 in 1000


@given(WEIGHTS, st.sampled_from([0, 1, 2**63, 2**64 - 1]) | st.integers(0, 2**64 - 1))
def test_a_keyed_draw_never_takes_what_has_no_mass(weights, word):
    draws = SeededDraws(0)
    draws._words = lambda counter, size: np.array([word], np.uint64)
    assert weights[draws.draw(np.array(weights), (0, 0, 0))] > 0


def test_a_stream_reads_each_key_once_and_knows_its_round():
    read = Recorded()
    sampler = TokenSampler([2, 0], SamplingRules(greedy=False), read, 10, num_unseen=5)
    assert sampler.proposals(2).stream.draw(np.ones(3)) == 2
    sampler.begin(CHAIN, one_hot(1, 2, 3))
    assert sampler.stream.happens(0.5) and sampler.stream.happens(1.0) and not sampler.stream.happens(0.0)
    sampler.emit(0, 1)
    sampler.stream.draw(np.ones(3))  # still the same round
    assert read.read == [(7, 0, 3), (7, 0, 0), (7, 1, 0)], "what is certain is not drawn"
    sampler.begin(CHAIN, one_hot(1, 2, 3))
    sampler.stream.draw(np.ones(3))
    assert read.read[-1] == (8, 0, 0)


def test_proposals_are_drawn_as_the_target_draws():
    """Under the request's warpers alone: what reads the text is not asked about text that may never be."""

    def never(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise AssertionError("asked")

    halved = lambda ids, scores: scores / 2.0  # noqa: E731
    logits = torch.tensor([[0.0, 2.0, 4.0], [8.0, 0.0, 0.0]], dtype=torch.bfloat16)
    for rules in (
        SamplingRules(greedy=False, processors=(halved,), warpers=(halved,)),
        SamplingRules(greedy=False, processors=(never, halved), warpers=(halved,)),
    ):
        sampler = ProposalSampler(rules, Stream(SeededDraws(0), 0, 1))
        tokens, probs = sampler.draw(logits)
        assert sampler.tokens.tolist() == tokens.tolist() and sampler.draft_probs.tolist() == probs.tolist()
        kept = sampler.tokens.tolist(), sampler.draft_probs.tolist()
        for array in (tokens, probs.copy(), sampler.tokens, sampler.draft_probs):
            array[:] = 0  # copies, all of them
        assert (sampler.tokens.tolist(), sampler.draft_probs.tolist()) == kept and sampler.num_drawn == 2
        assert probs == pytest.approx((logits.double() / 2).softmax(-1).numpy(), abs=1e-7)
        again = Stream(SeededDraws(0), 0, 1)
        assert tokens.dtype == np.int64 and sampler.tokens.tolist() == [again.draw(row) for row in probs]
    tokens, probs = ProposalSampler(SamplingRules(), Stream(SeededDraws(0), 0, 1)).draw(logits)
    assert tokens.tolist() == [2, 0] and probs.tolist() == [[0, 0, 1], [1, 0, 0]]
    assert logits[0].tolist() == [0.0, 2.0, 4.0], "they are the drafter's"


def test_stateless_are_rules_whose_processors_are_all_warpers():
    """By which they are, not by how many: a target may put its own in their place."""
    halved, penalised = (lambda ids, scores, by=by: scores / by for by in (2.0, 3.0))
    assert SamplingRules().stateless and SamplingRules(processors=(halved,), warpers=(halved,)).stateless
    for processors in ((penalised,), (penalised, halved), (halved, penalised)):
        assert not SamplingRules(processors=processors, warpers=(halved,)).stateless


@pytest.mark.parametrize("place", [lambda scores: scores, on_accelerator])
@pytest.mark.parametrize("greedy", [True, False])
def test_probs_are_what_next_draws_from_and_emit_takes_what_was_chosen(greedy, place):
    logits = torch.tensor([[0.0, 2.0, 4.0], [8.0, 0.0, 0.0]])
    doubled = lambda ids, scores: scores * 2.0  # noqa: E731
    rules = SamplingRules(greedy=greedy, processors=(doubled,), warpers=(doubled,), keep_scores=True, keep_logits=True)
    sampler = begun(rules, place(Scores(logits)), max_tokens=2)
    expected = (logits * 2).double().softmax(-1) if not greedy else torch.eye(3, dtype=torch.float64)[[2, 0]]
    assert sampler.probs([1, 0]).tolist() == expected[[1, 0]].tolist() and sampler.probs([0]).shape == (1, 3)
    sampler.emit(0, 1)
    sampler.emit(1, 2)
    assert sampler.emitted == [1, 2] and sampler.stop_reason == "length"
    assert [row.tolist() for row in sampler.logits] == logits[:, None].tolist()
    assert [row.tolist() for row in sampler.scores] == (2 * logits)[:, None].tolist()
    for asked in (lambda: sampler.emit(1, 0), lambda: sampler.probs([1])):
        with pytest.raises(RuntimeError, match="after the end"):
            asked()
