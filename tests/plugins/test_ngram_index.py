"""The n-gram index finds every occurrence and no other, however it grew and whatever its hashes do."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treegraft_plugins.drafters import ngram_index
from treegraft_plugins.drafters.ngram_index import NGramIndex, TopTokens

TOKENS = st.lists(st.integers(0, 2) | st.just(100_000), max_size=12)


def occurrences(index: NGramIndex, gram: list[int]) -> list[int]:
    """Where a gram ends, by the index: from its last occurrence to the first."""
    found, n = index.last_occurrences(gram), len(gram)
    position = found[n - 1] if len(found) == n else -1
    positions = []
    while position >= 0:
        positions.append(position)
        position = index.earlier[position * index.max_n + n - 1]
    return positions


@pytest.mark.parametrize("multiplier", [ngram_index._MULTIPLIER, 0], ids=["hashed", "all hashes equal"])
@given(max_n=st.integers(1, 4), pieces=st.lists(TOKENS, max_size=8), other=TOKENS)
def test_occurrences_are_those_a_scan_finds(multiplier, max_n, pieces, other):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ngram_index, "_MULTIPLIER", multiplier)
        patch.setattr(ngram_index, "_SMALLEST_CAPACITY", 4)  # so that short texts outgrow it several times
        index, text = NGramIndex(max_n), []
        for piece in pieces:
            index.extend(piece)
            text += piece
        assert index.tokens == text
        for n in range(1, max_n + 1):
            grams = [text[end - n : end] for end in range(n, len(text) + 1)] + [other[:n]] * (len(other) >= n)
            for gram in grams:
                scan = [end - 1 for end in range(len(text), n - 1, -1) if text[end - n : end] == gram]
                assert occurrences(index, gram) == scan


def test_an_ending_is_matched_as_far_as_it_occurred():
    index = NGramIndex(max_n=4)
    index.extend([1, 2, 3, 9, 2, 3])
    assert index.last_occurrences([1, 2, 3]) == [5, 5, 2]
    assert index.last_occurrences([7, 2, 3]) == [5, 5]
    assert index.last_occurrences([3, 3]) == [5]
    assert index.last_occurrences([7]) == index.last_occurrences([]) == []
    assert NGramIndex(max_n=2).last_occurrences([1]) == []


def test_top_tokens_are_kept_as_they_grow_and_are_padded_with_probability_zero():
    rng = np.random.default_rng(0)
    ids, probs = rng.integers(0, 50, (700, 5)), rng.uniform(0.01, 0.2, (700, 5))
    top = TopTokens(num_top=3)
    top.extend(1, None, None)
    for begin in range(0, 700, 70):
        top.extend(70, ids[begin : begin + 70], np.log(probs[begin : begin + 70]))
    top.extend(2, ids[:2, :2], np.log(probs[:2, :2]))
    kept_ids, kept_probs = top.after([0, 1, 700, 702])
    assert kept_probs[0].tolist() == [0, 0, 0]
    assert np.array_equal(kept_ids[1:3], ids[[0, 699], :3])
    np.testing.assert_allclose(kept_probs[1:3], probs[[0, 699], :3], rtol=1e-6)
    assert kept_ids[3, :2].tolist() == ids[1, :2].tolist() and kept_probs[3, 2] == 0
