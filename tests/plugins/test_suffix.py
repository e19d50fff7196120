"""The suffix drafter: equal to a slow and obvious reference, and to rules D1 to D11."""

import math
import tracemalloc
from collections import Counter

import attrs
import numpy as np
import pytest
from bare_parts import request
from hypothesis import given
from hypothesis import strategies as st

from treegraft.interfaces import DraftRequest, Observation, Wants
from treegraft.testing.strategies import draft_trees
from treegraft.tree import DraftTree, Expansion
from treegraft_plugins.drafters.suffix import SuffixDrafter

VOCAB = 5
ALL = 10_000  # more than any call has proposals here
Path = tuple[int, ...]


def observation(tokens: list[int]) -> Observation:
    return Observation(np.array(tokens, np.int64))


def started(committed: list[int], outputs: tuple[list[int], ...] = (), **options) -> SuffixDrafter:
    """A drafter that has seen all committed tokens but the root, after requests with these outputs."""
    drafter = SuffixDrafter(**options)
    for output in outputs:
        drafter.start(observation([]))
        drafter.observe(observation([0, *output]))  # 0 is the prompt, and the first root
        drafter.stop()
    drafter.start(observation(committed[:-1]))
    return drafter


def path_of(asked: DraftRequest, row: int) -> Path:
    return tuple(asked.tree.token[asked.tree.path(row)[1:]].tolist())


def by_path(asked: DraftRequest, expansion: Expansion) -> dict[Path, float]:
    """The probability of every proposal, by its path below the root."""
    paths: list[Path] = []
    for anchor, token in zip(expansion.anchor.tolist(), expansion.token.tolist(), strict=True):
        paths.append((*(path_of(asked, anchor) if anchor >= 0 else paths[~anchor]), token))
    assert len(set(paths)) == len(paths)
    return dict(zip(paths, np.exp(expansion.log_prob).tolist(), strict=True))


class Reference:
    """The drafter as its description reads: every string counted by a scan, every draft grown node by node."""

    def __init__(
        self, committed, outputs=(), max_depth=32, factor=1.0, offset=4.0, min_prob=0.1, interpolate=True,
        global_tokens=0,
    ):  # fmt: skip
        self.committed, self.max_match, self.min_prob = committed, max_depth - 1, min_prob
        self.factor, self.offset, self.interpolate = factor, offset, interpolate
        self.outputs = list(outputs)
        while sum(map(len, self.outputs)) > global_tokens:
            self.outputs.pop(0)

    def contexts(self, texts, tokens):
        """(length, what followed how often) of the suffixes that were followed, from the longest on."""
        found = []
        for length in range(min(self.max_match, len(tokens)), 0, -1):
            suffix = tokens[len(tokens) - length :]
            counts = Counter(
                text[end] for text in texts for end in range(length, len(text)) if text[end - length : end] == suffix
            )
            if counts and (not found or counts != found[-1][1]):
                found.append((length, counts))
        return found

    def guess(self, path, branching):
        """The match's length, and the best tokens with their probabilities."""
        tokens = self.committed + list(path)
        contexts = max(
            self.contexts([self.committed], tokens), self.contexts(self.outputs, tokens),
            key=lambda found: found[0][0] if found else 0,
        )  # fmt: skip
        if not contexts:
            return 0, {}
        probs, left = Counter(), 1.0
        for _, counts in contexts[: 3 if self.interpolate else 1]:
            kinds = len(counts) if self.interpolate else 0
            share = left / (counts.total() + kinds)
            probs.update({token: share * count for token, count in counts.items()})
            left = share * kinds
        best = sorted(probs.items(), key=lambda item: (-item[1], item[0]))
        return contexts[0][0], dict(best[:branching])

    def draft(self, asked):
        """All proposals' probabilities by path, and the products along the draft, node by node."""
        rows = [row for row in asked.positions.tolist() if asked.tree.depth[row] < asked.max_depth]
        guesses = {path_of(asked, row): self.guess(path_of(asked, row), asked.branching) for row in rows}
        proposals = {(*path, token): prob for path, (_, probs) in guesses.items() for token, prob in probs.items()}
        if not proposals:
            return {}, []
        begin = max(guesses, key=lambda path: (guesses[path][0], len(path)))
        room = math.floor(self.factor * guesses[begin][0] + self.offset)
        chances = {begin: 1.0}
        offered = {}

        def offer(path, probs):
            for token, prob in probs.items():
                offered[*path, token] = chances[path] * prob, prob

        offer(begin, guesses[begin][1])
        while offered and len(chances) <= room:
            path = max(offered, key=lambda path: offered[path][0])  # of equal ones the first offered
            chance, prob = offered.pop(path)
            if chance < self.min_prob:
                break
            chances[path] = chance
            proposals.setdefault(path, prob)
            if path not in guesses and len(path) < asked.max_depth:
                offer(path, self.guess(path, asked.branching)[1])
        return proposals, list(chances.values())[1:]


CONTEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=50)
OUTPUTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=30), max_size=3)
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "max_depth": st.sampled_from([24, 64]),
        "factor": st.sampled_from([0, 0.5, 1, 4.0]),
        "offset": st.sampled_from([0, 3.5, 8]),
        "min_prob": st.sampled_from([0.01, 0.3, 1]),
        "interpolate": st.booleans(),
        "global_tokens": st.sampled_from([10, 1000]),
    },
)
TREES = draft_trees(vocab_size=3)


def rerooted(tree: DraftTree, token: int) -> DraftTree:
    """The same tree of tokens below another root."""
    rows = list(range(1, len(tree)))
    new = DraftTree.rooted(token)
    anchor = [0 if tree.parent[row] == 0 else ~(int(tree.parent[row]) - 1) for row in rows]
    return new.append(Expansion(anchor, tree.token[rows], tree.edge_score[rows]), 0, [True])


# -- what it proposes -------------------------------------------------------------------------------------------------


@given(CONTEXTS, TREES, OPTIONS, OUTPUTS, st.sets(st.integers(0, 20)), st.integers(1, 4), st.integers(1, 40))
def test_proposals_and_probabilities_are_the_references(committed, tree, options, outputs, rows, branching, max_depth):
    tree = rerooted(tree, committed[-1])
    asked = request(committed, tree, [row for row in sorted(rows) if row < len(tree)], branching, ALL, max_depth)
    expansion = started(committed, outputs, **options).draft(asked)
    proposals, chances = Reference(committed, outputs, **options).draft(asked)
    assert by_path(asked, expansion) == pytest.approx(proposals)
    assert expansion.signals["draft_score"] == pytest.approx(sum(chances))


def test_probabilities_are_the_shares_of_the_longest_match_where_nothing_is_interpolated():
    committed = [1, 2, 7, 1, 2, 7, 1, 2, 8, 2, 9, 1, 2]
    asked = request(committed)
    drafter = started(committed, interpolate=False, factor=0, offset=0)
    assert by_path(asked, drafter.draft(asked)) == pytest.approx({(7,): 2 / 3, (8,): 1 / 3})


def test_three_contexts_are_interpolated_and_what_is_left_is_left():
    committed = [1, 2, 7, 5, 2, 8, 1, 2]
    asked = request(committed)
    # After (1, 2) came 7 alone, once: half is left. After 2 came two kinds, once each: half of that is left.
    assert by_path(asked, started(committed, factor=0, offset=0).draft(asked)) == pytest.approx(
        {(7,): 1 / 2 + 1 / 2 * 1 / 4, (8,): 1 / 2 * 1 / 4}
    )
    committed = [1, 2, 3, 4, 50, 2, 3, 4, 60, 3, 4, 70, 4, 80, 1, 2, 3, 4]
    found = by_path(asked := request(committed), started(committed, factor=0, offset=0).draft(asked))
    assert found.keys() == {(50,), (60,), (70,)}


@pytest.mark.parametrize("kinds", [16, 17])
def test_a_context_of_more_than_sixteen_kinds_is_read_only_if_it_is_the_longest(kinds):
    others = [token for kind in range(kinds - 1) for token in (2, 100 + kind)]
    committed = [1, 2, 7, *others, 1, 2]  # after (1, 2) came 7; after 2 each of so many kinds
    asked = request(committed, branching=ALL)
    found = by_path(asked, started(committed, factor=0, offset=0).draft(asked))
    assert len(found) == (kinds if kinds <= 16 else 1)
    committed = [*committed[1:-2], 3, 2]
    asked = request(committed, branching=ALL)
    assert len(by_path(asked, started(committed, factor=0, offset=0).draft(asked))) == kinds


def test_suffixes_that_were_followed_at_the_same_places_count_once():
    committed = [1, 2, 3, 7, 1, 2, 3]
    asked = request(committed)
    assert by_path(asked, started(committed, factor=0, offset=0).draft(asked)) == pytest.approx({(7,): 1 / 2})


def test_what_follows_the_last_token_seen_is_the_root():
    committed = [4, 4]
    asked = request(committed)
    assert by_path(asked, started(committed, interpolate=False, factor=0, offset=0).draft(asked)) == {(4,): 1.0}


# -- drafts -----------------------------------------------------------------------------------------------------------


def longest_path(asked: DraftRequest, drafter: SuffixDrafter) -> list[int]:
    return list(max(by_path(asked, drafter.draft(asked)), key=len))


def test_a_match_of_length_l_is_drafted_from_for_floor_of_factor_times_l_plus_offset_nodes():
    committed = [1, 2, *range(10, 60), 1, 2]
    asked = request(committed)
    for factor, offset, size in [(0, 0, 1), (1, 0, 2), (1.5, 0, 3), (2, 1.9, 5), (0, 7, 7), (10, 0, 20)]:
        drafter = started(committed, factor=factor, offset=offset, min_prob=0)
        assert longest_path(asked, drafter) == list(range(10, 10 + size))
    assert longest_path(request(committed, max_depth=3), drafter) == [10, 11, 12]


def test_a_draft_is_a_tree_grown_by_products_and_cut_at_min_prob():
    begun = [1, 2, 3]
    committed = [*begun, 4, 5, *begun, 4, 6, *begun, 4, 6, *begun, 7, 8, *begun]
    asked = request(committed)
    shares = {(4,): 3 / 4, (4, 6): 1 / 2, (7,): 1 / 4, (7, 8): 1 / 4, (7, 8, 1): 1 / 4, (4, 5): 1 / 4}
    for min_prob in (0.3, 0.2):
        drafter = started(committed, interpolate=False, factor=100, min_prob=min_prob)
        found = by_path(asked, drafter.draft(asked))
        products = {path: math.prod(found[path[: end + 1]] for end in range(len(path))) for path in found}
        assert min(share for path, share in products.items() if len(path) > 1) >= min_prob
        assert {path: products.get(path) for path in shares if shares[path] >= min_prob} == pytest.approx(
            {path: share for path, share in shares.items() if share >= min_prob}
        )
    few = started(committed, interpolate=False, factor=0, offset=2).draft(asked)
    # Greedily the best two; the root's other continuation is proposed by itself.
    assert by_path(asked, few).keys() == {(4,), (4, 6), (7,)} and few.signals["draft_score"] == pytest.approx(5 / 4)


def test_a_draft_goes_on_where_the_text_ends_so_that_a_loop_goes_on():
    committed = [9, 1, 2, 3, 1, 2, 3, 1]
    drafter = started(committed, factor=5, offset=0, min_prob=0)
    assert longest_path(request(committed), drafter) == [2, 3, 1] * 6 + [2, 3]


def test_the_draft_begins_below_the_longest_match_of_the_deepest_node():
    committed = [1, 2, 3, 4, 5, 6, 7, 8, 0, 3, 1, 2]
    tree = DraftTree.rooted(2).append(Expansion([0, ~0, 0], [3, 4, 0], [-0.1, -0.1, -0.1]), 0, [True])
    found = by_path(
        asked := request(committed, tree, [0, 1, 2, 3]), started(committed, offset=0, factor=1, min_prob=0).draft(asked)
    )
    assert [path for path in found if len(path) > 3] == [(3, 4, 5, 6), (3, 4, 5, 6, 7), (3, 4, 5, 6, 7, 8)]
    assert sorted(path for path in found if len(path) <= 3) == [(0, 3), (3,), (3, 1), (3, 4), (3, 4, 5)]


def test_a_draft_ends_where_another_requested_node_begins():
    committed = [9, 5, 1, 2, 3, 4, 9]
    tree = DraftTree.rooted(9).append(Expansion([0, ~0, ~1], [3, 4, 9], [-0.1] * 3), 0, [True])
    drafter = started(committed, min_prob=0)
    alone, both = (request(committed, tree, positions) for positions in ([2], [2, 3]))
    assert max(by_path(alone, drafter.draft(alone)), key=len)[:5] == (3, 4, 9, 5, 1)
    # The 9 below was only reached by the text itself; what follows it is looked up anew, once.
    assert by_path(both, drafter.draft(both)).keys() == {(3, 4, 9), (3, 4, 9, 5)}
    assert drafter.draft(both).anchor.tolist() == [2, 3]


# -- earlier outputs --------------------------------------------------------------------------------------------------


def test_earlier_outputs_are_drafted_from_only_where_asked_for():
    committed = [5, 1, 2]
    for global_tokens, drafted in [(0, []), (100, [3, 4])]:
        drafter = started(committed, [[1, 2, 3, 4]], global_tokens=global_tokens)
        found = by_path(asked := request(committed), drafter.draft(asked))
        assert list(max(found, key=len, default=())) == drafted


def test_prompts_are_not_remembered_and_outputs_end_where_they_end():
    drafter = SuffixDrafter(global_tokens=100)
    drafter.start(observation([1, 2]))
    drafter.observe(observation([3, 4]))  # 3 is the prompt's last token
    drafter.observe(observation([5, 6]))
    drafter.start(observation([]))  # without a `stop`
    for token, follower in [(1, None), (2, None), (3, None), (4, 5), (5, 6), (6, None)]:
        found = by_path(asked := request([token]), drafter.draft(asked))
        assert next(iter(found), (None,))[0] == follower
    drafter.observe(observation([0, 7, 8]))
    drafter.stop()
    drafter.stop()
    drafter.start(observation([]))
    assert not len(drafter.draft(request([6])))
    assert drafter.draft(request([7])).token.tolist() == [8]


@pytest.mark.parametrize(
    ("output", "follower"), [([1, 2, 3, 8], 8), ([5, 2, 3, 8], 9), ([2, 3, 8], 9), ([5, 5, 3, 8], 9), ([4, 8], 9)]
)
def test_the_longer_match_counts_and_of_equal_ones_the_request_s_own(output, follower):
    committed = [2, 3, 9, 0, 1, 2, 3]
    drafter = started(committed, [output], global_tokens=100, interpolate=False, factor=0, offset=0)
    assert drafter.draft(request(committed)).token.tolist() == [follower]


def test_the_oldest_outputs_go_first_and_whole():
    outputs = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    drafter = started([0], outputs, global_tokens=8)
    assert [drafter.draft(request([token])).token.tolist()[:1] for token in (1, 2, 4, 7)] == [[], [], [5], [8]]


# -- the rules of drafters --------------------------------------------------------------------------------------------


@given(
    CONTEXTS, TREES, OPTIONS, OUTPUTS, st.lists(st.integers(0, 30), max_size=6, unique=True), st.integers(1, 4),
    st.integers(0, 30), st.integers(0, 8),
)  # fmt: skip
def test_d1_to_d6_and_d9(committed, tree, options, outputs, rows, branching, max_nodes, max_depth):
    tree = rerooted(tree, committed[-1])
    positions = [row for row in rows if row < len(tree)]
    before = tree.token.tolist(), tree.path_score.tolist()
    asked = request(committed, tree, positions, branching, max_nodes, max_depth, vocab_size=VOCAB)
    expansion = started(committed, outputs, **options).draft(asked)
    anchor, own = expansion.anchor, np.arange(len(expansion))
    assert np.isin(anchor[anchor >= 0], positions).all() and (~anchor < own)[anchor < 0].all()  # D1
    assert ((expansion.token >= 0) & (expansion.token < VOCAB)).all()  # D2
    assert len(by_path(asked, expansion)) == len(expansion)  # D3, which by_path asserts
    assert (expansion.log_prob <= 0).all() and np.isfinite(expansion.log_prob).all()  # D4
    assert len(expansion) <= max_nodes and max(Counter(anchor.tolist()).values(), default=0) <= branching  # D5
    tree.append(expansion, 0, [True]).check()
    assert max(map(len, by_path(asked, expansion)), default=0) <= max_depth  # D5
    assert (tree.token.tolist(), tree.path_score.tolist()) == before  # D6
    assert len(positions) or not len(expansion)  # D9


@given(CONTEXTS, TREES, OPTIONS, OUTPUTS, st.integers(0, 60))
def test_of_too_many_proposals_the_best_paths_are_kept(committed, tree, options, outputs, max_nodes):
    tree = rerooted(tree, committed[-1])
    drafter = started(committed, outputs, **options)
    everything = drafter.draft(request(committed, tree, range(len(tree)), max_nodes=ALL))
    asked = request(committed, tree, range(len(tree)), max_nodes=max_nodes)
    kept, whole = by_path(asked, drafter.draft(asked)), by_path(asked, everything)
    assert len(kept) == min(max_nodes, len(whole)) and kept.items() <= whole.items()
    row_of = {path_of(asked, row): row for row in range(len(tree))}

    def score(path):
        above = path[:-1]
        return math.log(whole[path]) + (tree.path_score[row_of[above]] if above in row_of else score(above))

    if kept and len(kept) < len(whole):
        assert min(map(score, kept)) >= max(score(path) for path in whole if path not in kept) - 1e-9


def same(one: Expansion, other: Expansion) -> bool:
    names = ("anchor", "token", "log_prob")
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names) and (
        one.signals == other.signals
    )


@given(CONTEXTS, OPTIONS, OUTPUTS, st.lists(st.integers(1, 12), max_size=12))
def test_d7_d8_d13_how_the_tokens_came_in_makes_no_difference(committed, options, outputs, sizes):
    at_once, piecewise = started(committed, outputs, **options), started([0], outputs, **options)
    end = 0
    for size in [*sizes, len(committed)]:
        begin, end = end, min(end + size, len(committed) - 1)
        piecewise.observe(observation(committed[begin:end]))
        other = request([*committed[: end + 1], 4])  # what is asked in between leaves no trace
        assert same(piecewise.draft(other), piecewise.draft(other))
    assert same(at_once.draft(request(committed)), piecewise.draft(request(committed)))


@given(CONTEXTS, CONTEXTS, OPTIONS)
def test_d10_start_forgets_and_so_do_stop_and_clone(first, second, options):
    options = options | {"global_tokens": 0}
    stopped, again = started(first, **options), started(first, **options)
    stopped.stop()
    clone = again.clone()
    fresh, asked = started(second, **options), request(second)
    for drafter in (stopped, again, clone):
        drafter.start(observation(second[:-1]))
        assert same(drafter.draft(asked), fresh.draft(asked))


def test_a_clone_has_the_options_and_nothing_that_was_remembered():
    drafter = started(
        [0], [[1, 2, 3]], global_tokens=50, max_depth=24, factor=3, offset=2, min_prob=0.2, interpolate=False
    )
    clone = drafter.clone()
    assert clone.identity == drafter.identity and type(clone) is SuffixDrafter
    clone.start(observation([]))
    assert len(drafter.draft(request([1]))) and not len(clone.draft(request([1])))


def test_d9_d11_a_one_token_prompt():
    drafter = SuffixDrafter()
    drafter.start(observation([]))
    assert not len(drafter.draft(request([3])))
    drafter.observe(observation([3]))
    asked = request([3, 3])
    assert by_path(asked, drafter.draft(asked))[3,] == pytest.approx(0.5)
    assert drafter.draft(asked).signals["match_length"] == 1


def test_without_a_match_there_are_no_proposals_and_the_signals_say_so():
    expansion = started([1, 2, 3]).draft(request([1, 2, 4]))
    assert not len(expansion)
    assert expansion.signals == {"match_length": 0.0, "match_confidence": 0.0, "draft_score": 0.0}


def test_signals_are_the_longest_match_the_best_probability_and_the_draft_s_sum():
    committed = [1, 2, 3, 8, 1, 2, 3]
    expansion = started(committed, factor=1, offset=0, interpolate=False).draft(request(committed))
    assert expansion.signals == {"match_length": 3.0, "match_confidence": 1.0, "draft_score": 3.0}


def test_only_what_was_observed_and_the_tree_are_read_never_the_context_again():
    committed = np.random.default_rng(0).integers(0, 3, 200).tolist()
    tree = DraftTree.rooted(committed[-1]).append(Expansion([0, ~0, 0], [1, 2, 2], [-0.1] * 3), 0, [True])
    asked = request(committed, tree, range(4))
    drafter = started(committed)
    assert same(drafter.draft(asked), drafter.draft(attrs.evolve(asked, committed=None)))


# -- options and size -------------------------------------------------------------------------------------------------


def test_it_asks_nothing_of_the_target():
    assert SuffixDrafter.wants == Wants() and SuffixDrafter.proposals == "deterministic"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_depth": 23}, "max_depth: got 23; allowed: an int in [24, 64]."),
        ({"max_depth": "32"}, "max_depth: got '32'; allowed: an int in [24, 64]."),
        ({"factor": -1}, "factor: got -1; allowed: a finite number >= 0."),
        ({"offset": None}, "offset: got None; allowed: a finite number >= 0."),
        ({"min_prob": 1.5}, "min_prob: got 1.5; allowed: a number in [0, 1]."),
        ({"interpolate": 1}, "interpolate: got 1; allowed: true or false."),
        ({"global_tokens": -1}, "global_tokens: got -1; allowed: an int >= 0."),
    ],
)
def test_what_is_not_allowed_is_refused(options, message):
    with pytest.raises((TypeError, ValueError)) as caught:
        SuffixDrafter(**options)
    assert str(caught.value) == message


@pytest.mark.parametrize("num_tokens", [2, 4, 300, 150_000])
def test_a_position_takes_at_most_300_bytes(num_tokens):
    size = 16_384
    tokens = np.random.default_rng(0).integers(0, num_tokens, size).tolist()
    drafter = SuffixDrafter()
    tracemalloc.start()
    drafter.start(observation(tokens))
    used, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used / size <= 300 and peak / size <= 350
