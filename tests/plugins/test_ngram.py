"""The n-gram drafter: equal to a slow and obvious reference, and to rules D1 to D11."""

import math
import tracemalloc
from collections import Counter, defaultdict

import numpy as np
import pytest
from bare_parts import request
from hypothesis import example, given
from hypothesis import strategies as st

from treegraft.interfaces import Drafter, DraftRequest, Observation, Wants
from treegraft.testing.strategies import draft_trees
from treegraft.tree import DraftTree, Expansion
from treegraft_plugins.drafters.ngram import NGramDrafter

VOCAB = 5
MODES = ["mix", "copy", "top_tokens"]
ALL = 100  # more than any node has proposals here


def observation(tokens: list[int], top_ids: np.ndarray | None = None, probs: np.ndarray | None = None) -> Observation:
    return Observation(np.array(tokens, np.int64), top_ids, None if probs is None else np.log(probs))


def seen(committed: list[int], begin: int = 0, end: int | None = None) -> Observation:
    """What the target said about committed[begin:end], drawn anew from the tokens so far: a toy target."""
    end = len(committed) if end is None else end
    rows = [np.random.default_rng([7, *committed[max(0, at - 3) : at + 1]]) for at in range(begin, end)]
    ids = np.array([row.permutation(VOCAB)[:3] for row in rows]).reshape(-1, 3)
    probs = np.array([np.sort(row.dirichlet(np.ones(4)))[:0:-1] for row in rows]).reshape(-1, 3)
    return observation(committed[begin:end], ids, probs)


def started(committed: list[int], **options) -> NGramDrafter:
    """A drafter that has seen all committed tokens but the root."""
    drafter = NGramDrafter(**options)
    drafter.start(seen(committed, 0, len(committed) - 1))
    return drafter


def by_path(asked: DraftRequest, expansion: Expansion) -> dict[tuple[int, ...], float]:
    """The probability of every proposal, by its path below the root."""
    paths: list[tuple[int, ...]] = []
    for anchor, token in zip(expansion.anchor.tolist(), expansion.token.tolist(), strict=True):
        above = tuple(asked.tree.token[asked.tree.path(anchor)[1:]].tolist()) if anchor >= 0 else paths[~anchor]
        paths.append((*above, token))
    assert len(set(paths)) == len(paths)
    return dict(zip(paths, np.exp(expansion.log_prob).tolist(), strict=True))


class Reference:
    """The drafter as its description reads: tuples in dictionaries, everything computed when asked for."""

    def __init__(self, committed, max_n=4, max_matches=8, mode="mix", fallback=True, chain_factor=4.0, chain_max=16):
        self.committed, self.max_n, self.max_matches = committed, max_n, max_matches
        self.share = {"mix": 0.5, "copy": 1.0, "top_tokens": 0.0}[mode]
        self.shortest = 1 if fallback else 2
        self.chain_factor, self.chain_max = chain_factor, chain_max
        told = seen(committed, 0, len(committed) - 1)
        self.expected = [
            dict(zip(ids, np.exp(log_probs), strict=True))
            for ids, log_probs in zip(told.top_ids.tolist(), told.top_log_probs, strict=True)
        ]
        self.ends = defaultdict(list)
        for end in range(len(committed) - 1):
            for n in range(1, min(max_n, end + 1) + 1):
                self.ends[tuple(committed[end - n + 1 : end + 1])].insert(0, end)

    def matches(self, context):
        """(length, position, weight) of the best matches, best first, not normalised."""
        found = []
        for n in range(min(self.max_n, len(context)), self.shortest - 1, -1):
            for j, position in enumerate(self.ends[tuple(context[-n:])]):
                found.append((n, position, 2.0 ** -(self.max_n - n) / (j + 1)))
        return found[: self.max_matches]

    def distribution(self, path):
        """Token probabilities below the path (tokens below the root)."""
        found = self.matches(self.committed + path)
        total = sum(weight for *_, weight in found)
        mass = Counter()
        for _, position, weight in found:
            if self.share:
                mass[self.committed[position + 1]] += self.share * weight / total
            if self.share < 1:
                for token, prob in self.expected[position].items():
                    mass[token] += (1 - self.share) * weight / total * prob
        return mass

    def chain(self, paths, max_depth=100):
        """{path: probability} of the one chain that a call with these nodes returns, less its first token."""
        lengths = [(self.matches(self.committed + path)[:1] or [(0, 0, 0)])[0] for path in paths]
        best = max(range(len(paths)), key=lambda index: (lengths[index][0], len(paths[index])))
        (n, position, _), path = lengths[best], paths[best]
        if not n:
            return {}
        beyond = min(math.floor(self.chain_factor * n), self.chain_max, max_depth - len(path) - 1)
        text, copied, prob = self.committed + path, {}, 0.0
        for step in range(beyond + 1):
            token = text[position + 1 + step]
            if position + step < len(self.expected):
                prob = self.share + (1 - self.share) * self.expected[position + step].get(token, 0.0)
            if prob == 0:
                break
            text = [*text, token]
            copied[tuple(text[len(self.committed) :])] = prob
        return dict(list(copied.items())[1:])


CONTEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=40)
OPTIONS = st.fixed_dictionaries(
    {"max_n": st.integers(2, 4), "max_matches": st.integers(1, 8), "mode": st.sampled_from(MODES)},
    optional={"fallback": st.booleans(), "chain_factor": st.sampled_from([0, 0.5, 1, 4.0]), "chain_max": st.just(5)},
)
TREES = draft_trees(vocab_size=3)


def rerooted(tree: DraftTree, token: int) -> DraftTree:
    """The same tree of tokens below another root."""
    rows = list(range(1, len(tree)))
    new = DraftTree.rooted(token)
    anchor = [0 if tree.parent[row] == 0 else ~(int(tree.parent[row]) - 1) for row in rows]
    return new.append(Expansion(anchor, tree.token[rows], tree.edge_score[rows]), 0, [True])


# -- what it proposes -------------------------------------------------------------------------------------------------


@given(CONTEXTS, TREES, OPTIONS)
def test_proposals_and_probabilities_are_the_references(committed, tree, options):
    tree = rerooted(tree, committed[-1])
    asked = request(committed, tree, range(len(tree)), branching=ALL, max_nodes=10 * ALL)
    drafted = by_path(asked, started(committed, **options).draft(asked))
    reference = Reference(committed, **options)
    paths = [tree.token[tree.path(row)[1:]].tolist() for row in range(len(tree))]
    expected = {
        (*path, token): prob for path in paths for token, prob in reference.distribution(path).items() if prob > 0
    }
    expected |= {path: prob for path, prob in reference.chain(paths).items() if path not in expected}
    assert drafted == pytest.approx(expected, rel=1e-5)


def test_the_longest_match_comes_first():
    committed = [1, 2, 3, 7, 9, 2, 3, 8, 9, 3, 6, 9, 1, 2, 3]
    for max_n, follower in [(1, 6), (2, 8), (3, 7), (4, 7)]:
        drafter = started(committed, max_n=max_n, max_matches=1, mode="copy", chain_factor=0)
        assert drafter.draft(request(committed)).token.tolist() == [follower]


def test_interpolation_weights():
    committed = [1, 2, 7, 9, 2, 8, 1, 2]
    asked = request(committed)
    expansion = started(committed, max_n=2, mode="copy", chain_factor=0).draft(asked)
    # The pair (1, 2) once, weight 1; the token 2 at its last and its first occurrence, weights 1/2 and 1/4.
    assert by_path(asked, expansion) == pytest.approx({(7,): 1.25 / 1.75, (8,): 0.5 / 1.75})


def test_half_of_a_match_is_the_target_s_own_distribution():
    drafter = NGramDrafter(max_n=1, chain_factor=0)
    drafter.start(observation([1, 2], np.array([[5, 2], [0, 0]]), np.array([[0.75, 0.125], [0.5, 0.25]])))
    asked = request([1, 2, 1])
    assert by_path(asked, drafter.draft(asked)) == pytest.approx({(2,): 0.5 + 0.0625, (5,): 0.375})


def test_at_most_eight_matches_share_the_most_recent_ones():
    committed = [token for follower in range(10, 22) for token in (5, follower)] + [5]
    expansion = started(committed, mode="copy", chain_factor=0).draft(request(committed, branching=ALL))
    assert expansion.token.tolist() == list(range(21, 13, -1))


def test_what_follows_the_last_position_seen_is_the_root():
    committed = [4, 4]
    assert started(committed, mode="copy", chain_factor=0).draft(request(committed)).token.tolist() == [4]


def test_without_fallback_one_token_is_no_match():
    committed = [1, 2, 3, 9, 1]
    assert started(committed, mode="copy").draft(request(committed)).token.tolist()[0] == 2
    assert len(started(committed, mode="copy", fallback=False).draft(request(committed))) == 0
    longer = [1, 2, 3, 9, 1, 2]
    drafter = started(longer, mode="copy", fallback=False, chain_factor=0)
    assert drafter.draft(request(longer)).token.tolist() == [3]


# -- chains -----------------------------------------------------------------------------------------------------------


def chain_of(drafter: Drafter, asked: DraftRequest) -> list[int]:
    """The tokens of the deepest path proposed."""
    return list(max(by_path(asked, drafter.draft(asked)), key=len))


def test_a_match_is_copied_on_as_a_chain():
    committed = [1, 2, *range(10, 40), 1, 2]
    for factor, beyond in [(0, 0), (1, 2), (1.5, 3), (4, 8), (8, 16), (100, 16)]:
        drafter = started(committed, mode="copy", chain_factor=factor)
        assert chain_of(drafter, request(committed)) == list(range(10, 11 + beyond))
    assert chain_of(started(committed, chain_max=3), request(committed)) == [10, 11, 12, 13]
    assert chain_of(started(committed), request(committed, max_depth=5)) == [10, 11, 12, 13, 14]


def test_a_chain_runs_into_what_it_has_copied_so_that_a_loop_goes_on():
    committed = [9, 1, 2, 3, 1, 2, 3, 1]
    assert chain_of(started(committed), request(committed)) == [2, 3, 1] * 5 + [2, 3]


def test_chain_tokens_are_scored_as_if_their_match_were_the_only_one():
    drafter = NGramDrafter(chain_factor=1)
    tops, probs = np.array([[2, 0], [3, 0], [0, 1], [0, 1]]), np.array([[0.5, 0.25], [0.25, 0.125]] * 2)
    drafter.start(observation([1, 2, 3, 9], tops, probs))
    asked = request([1, 2, 3, 9, 1])
    assert by_path(asked, drafter.draft(asked))[2, 3] == pytest.approx(0.5 + 0.5 * 0.25)


def test_the_chain_goes_to_the_longest_match_of_the_deepest_node():
    committed = [1, 2, 3, 4, 5, 6, 7, 8, 0, 3, 1, 2]
    tree = DraftTree.rooted(2).append(Expansion([0, ~0, 0], [3, 4, 0], [-0.1, -0.1, -0.1]), 0, [True])
    drafted = by_path(
        asked := request(committed, tree, [0, 1, 2, 3]), started(committed, mode="copy", chain_factor=1).draft(asked)
    )
    assert max(drafted, key=len) == (3, 4, 5, 6, 7, 8, 0)[: 2 + 1 + 4]
    assert sum(len(path) > 3 for path in drafted) == 4  # one chain only


# -- the rules of drafters --------------------------------------------------------------------------------------------


@given(
    CONTEXTS, TREES, OPTIONS, st.lists(st.integers(0, 30), max_size=6, unique=True), st.integers(1, 4),
    st.integers(0, 30), st.integers(0, 8),
)  # fmt: skip
def test_d1_to_d6_and_d9(committed, tree, options, rows, branching, max_nodes, max_depth):
    tree = rerooted(tree, committed[-1])
    positions = [row for row in rows if row < len(tree)]
    before = tree.token.tolist(), tree.path_score.tolist()
    asked = request(committed, tree, positions, branching, max_nodes, max_depth, vocab_size=VOCAB)
    expansion = started(committed, **options).draft(asked)
    anchor, own = expansion.anchor, np.arange(len(expansion))
    assert np.isin(anchor[anchor >= 0], positions).all() and (~anchor < own)[anchor < 0].all()  # D1
    assert ((expansion.token >= 0) & (expansion.token < VOCAB)).all()  # D2
    assert len(by_path(asked, expansion)) == len(expansion)  # D3, which by_path asserts
    assert (expansion.log_prob <= 0).all() and np.isfinite(expansion.log_prob).all()  # D4
    assert len(expansion) <= max_nodes and max(Counter(anchor.tolist()).values(), default=0) <= branching  # D5
    grown = tree.append(expansion, 0, [True])
    grown.check()
    if len(expansion):
        assert max(map(len, by_path(asked, expansion))) <= max_depth  # D5
    assert (tree.token.tolist(), tree.path_score.tolist()) == before  # D6
    assert len(positions) or not len(expansion)  # D9


@example(
    committed=[2, 2, 1],  # a copy passes through a node of the tree, which has a better score than the drafter's
    tree=DraftTree.rooted(0).append(Expansion([0, ~0], [2, 1], [0.0, 0.0]), 0, [True]),
    options={"max_n": 2, "max_matches": 2, "mode": "mix"},
    max_nodes=1,
)
@given(CONTEXTS, TREES, OPTIONS, st.integers(0, 60))
def test_of_too_many_proposals_the_best_paths_are_kept(committed, tree, options, max_nodes):
    tree = rerooted(tree, committed[-1])
    drafter = started(committed, **options)
    everything = drafter.draft(request(committed, tree, range(len(tree)), max_nodes=10_000))
    asked = request(committed, tree, range(len(tree)), max_nodes=max_nodes)
    kept, whole = by_path(asked, drafter.draft(asked)), by_path(asked, everything)
    assert len(kept) == min(max_nodes, len(whole)) and kept.items() <= whole.items()
    scores = []
    for anchor, log_prob in zip(everything.anchor.tolist(), everything.log_prob.tolist(), strict=True):
        scores.append(log_prob + (tree.path_score[anchor] if anchor >= 0 else scores[~anchor]))
    if kept and len(kept) < len(whole):
        score = dict(zip(whole, scores, strict=True))
        assert min(score[path] for path in kept) >= max(score[path] for path in whole if path not in kept) - 1e-9


def same(one: Expansion, other: Expansion) -> bool:
    names = ("anchor", "token", "log_prob")
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names) and (
        one.signals == other.signals
    )


@given(CONTEXTS, OPTIONS, st.lists(st.integers(1, 12), max_size=12))
def test_d7_d8_how_the_tokens_came_in_makes_no_difference(committed, options, sizes):
    at_once, piecewise = started(committed, **options), NGramDrafter(**options)
    end = 0
    piecewise.start(seen(committed, 0, 0))
    for size in [*sizes, len(committed)]:
        begin, end = end, min(end + size, len(committed) - 1)
        piecewise.observe(seen(committed, begin, end))
    asked = request(committed)
    assert same(at_once.draft(asked), piecewise.draft(asked))
    assert same(at_once.draft(asked), at_once.draft(asked))


def test_d8_across_growing_arrays():
    committed = np.random.default_rng(1).integers(0, 12, 1200).tolist()
    at_once, piecewise = started(committed), started(committed[:101])
    for begin in range(100, len(committed) - 1, 7):
        piecewise.observe(seen(committed, begin, min(begin + 7, len(committed) - 1)))
    asked = request(committed)
    expansion = at_once.draft(asked)
    assert len(expansion) > 5 and same(expansion, piecewise.draft(asked))


@given(CONTEXTS, CONTEXTS, OPTIONS)
def test_d10_start_forgets_and_so_does_stop(first, second, options):
    drafter = started(first, **options)
    drafter.stop()
    drafter.start(seen(second, 0, len(second) - 1))
    again = started(first, **options)
    again.start(seen(second, 0, len(second) - 1))
    fresh, asked = started(second, **options), request(second)
    assert same(drafter.draft(asked), fresh.draft(asked)) and same(again.draft(asked), fresh.draft(asked))


def test_d9_d11_a_one_token_prompt_and_one_shorter_than_the_n_gram():
    drafter = NGramDrafter()
    drafter.start(observation([]))
    assert len(drafter.draft(request([3]))) == 0
    drafter.observe(observation([3], np.array([[3, 4]]), np.array([[0.5, 0.25]])))
    asked = request([3, 3])
    assert by_path(asked, drafter.draft(asked))[4,] == pytest.approx(0.125)
    assert drafter.draft(asked).signals["match_length"] == 1


def test_without_a_match_there_are_no_proposals_and_the_signals_say_so():
    expansion = started([1, 2, 3]).draft(request([1, 2, 3]))
    assert len(expansion) == 0 and expansion.signals == {"match_length": 0.0, "match_confidence": 0.0}


def test_signals_are_the_longest_match_and_the_best_probability():
    committed = [1, 2, 3, 8, 1, 2, 3]
    expansion = started(committed, mode="copy").draft(request(committed))
    assert expansion.signals == {"match_length": 3.0, "match_confidence": 1.0}


# -- requests that share ----------------------------------------------------------------------------------------------


def test_shared_drafts_from_earlier_requests_and_never_across_their_ends():
    drafter = started([1, 2, 3, 4], mode="copy", shared=True)
    drafter.stop()
    later = [2, 1, 2]
    drafter.start(seen(later, 0, 2))
    # The pair (1, 2) of the first request leads to its 3, and the copy ends where that request's text does.
    assert chain_of(drafter, request(later)) == [3]
    # Its last token is followed by nothing, although another text was taken in after it.
    assert len(drafter.draft(request([2, 1, 3]))) == 0
    assert len(started(later, mode="copy", max_n=2).draft(request([2, 1, 3]))) == 0


@given(CONTEXTS, TREES, OPTIONS)
def test_sharing_makes_no_difference_to_a_first_request(committed, tree, options):
    tree = rerooted(tree, committed[-1])
    asked = request(committed, tree, range(len(tree)))
    assert same(started(committed, shared=True, **options).draft(asked), started(committed, **options).draft(asked))


# -- options and size -------------------------------------------------------------------------------------------------


def test_it_asks_for_the_target_s_top_tokens_unless_it_only_copies():
    assert NGramDrafter().wants == Wants(num_top=10)
    assert NGramDrafter(num_top=3).wants == Wants(num_top=3)
    assert NGramDrafter(mode="copy").wants == Wants()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_n": 0}, "max_n: got 0; allowed: an int >= 1."),
        ({"num_top": "10"}, "num_top: got '10'; allowed: an int >= 1."),
        ({"max_matches": 0}, "max_matches: got 0; allowed: an int >= 1."),
        ({"mode": "both"}, "mode: got 'both'; allowed: one of mix, copy, top_tokens."),
        ({"chain_factor": -1}, "chain_factor: got -1; allowed: a finite number >= 0."),
        ({"chain_max": -1}, "chain_max: got -1; allowed: an int >= 0."),
        ({"fallback": 1}, "fallback: got 1; allowed: true or false."),
        ({"shared": None}, "shared: got None; allowed: true or false."),
        ({"max_n": 1, "fallback": False}, "max_n: got 1 with fallback off"),
    ],
)
def test_what_is_not_allowed_is_refused(options, message):
    with pytest.raises((TypeError, ValueError)) as caught:
        NGramDrafter(**options)
    assert str(caught.value).startswith(message)


def test_a_position_takes_at_most_600_bytes():
    size = 16_384
    rng = np.random.default_rng(0)
    # Distinct tokens nearly everywhere: nothing is shared, the worst case.
    told = observation(
        rng.integers(0, 150_000, size).tolist(), rng.integers(0, 150_000, (size, 10)), np.full((size, 10), 0.1)
    )
    drafter = NGramDrafter()
    tracemalloc.start()
    drafter.start(told)
    drafter.observe(observation([1, 2], np.zeros((2, 10), np.int64), np.full((2, 10), 0.1)))
    used, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used / size <= 600 and peak / size <= 600


def test_a_chain_passes_through_what_a_requested_node_proposes_by_itself():
    """The copy runs along a path of the tree whose nodes are looked up too: no path is proposed twice."""
    committed = [1, 2, 3, 4, 5, 6, 7, 8, 1]
    tree = DraftTree.rooted(1).append(Expansion([0, ~0, ~1], [2, 3, 4], [-0.1] * 3), 0, [False])
    expansion = started(committed).draft(request(committed, tree, range(len(tree)), max_nodes=10_000))
    paths = []
    for anchor, token in zip(expansion.anchor.tolist(), expansion.token.tolist(), strict=True):
        above = tuple(tree.token[tree.path(anchor)[1:]].tolist()) if anchor >= 0 else paths[~anchor]
        paths.append((*above, token))
    assert len(set(paths)) == len(paths)
    assert (2, 3, 4, 5, 6, 7) in paths
