"""The suffix index counts what a scan counts, however its texts came in, and whatever went since."""

from collections import Counter
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treegraft_plugins.drafters.suffix_index import Match, OutputIndex, SuffixIndex

# Few letters, so that strings repeat; and texts of one letter, whose suffixes occur everywhere.
TEXTS = st.integers(0, 2).flatmap(lambda most: st.lists(st.integers(0, most) | st.just(70_000), max_size=25))
LETTERS = (0, 1, 2, 70_000)


def occurrences(texts: Iterable[Sequence[int]], max_depth: int) -> Counter[tuple[int, ...]]:
    """Of every string of up to `max_depth` tokens."""
    return Counter(
        tuple(text[begin:end])
        for text in texts
        for begin in range(len(text))
        for end in range(begin + 1, min(begin + max_depth, len(text)) + 1)
    )


def matched(index: SuffixIndex, tokens: Sequence[int]) -> Match:
    match = index.start
    for token in tokens:
        match = index.step(match, token)
    return match


Contexts = list[tuple[int, int, dict[int, int]]]
ALL = 100  # more than any match has contexts here


def scanned(counts: Counter[tuple[int, ...]], suffixes: list[tuple[int, ...]], widest: int = ALL) -> Contexts:
    """What `contexts` gives for a match with these suffixes, longest first."""
    contexts: Contexts = []
    for suffix in suffixes:
        following = {token: counts[(*suffix, token)] for token in LETTERS if counts[(*suffix, token)]}
        if contexts and len(following) > widest:
            break
        if following and (not contexts or following != contexts[-1][2]):
            contexts.append((len(suffix), sum(following.values()), following))
    return contexts


def check(index: SuffixIndex, texts: Sequence[Sequence[int]], others: Sequence[int], gone: bool = False) -> None:
    """The index's answers on every string of the texts, and along another text, are those of a scan."""
    longest = index.max_depth - 1
    counts = occurrences(texts, index.max_depth)
    for string in counts:
        if len(string) <= longest:
            assert matched(index, string)[1] == len(string)
    match = index.start
    for end in range(1, len(others) + 1):
        match = index.step(match, others[end - 1])
        suffixes = [tuple(others[end - n : end]) for n in range(min(longest, end), 0, -1)]
        assert match[1] == next((len(suffix) for suffix in suffixes if counts[suffix]), 0)
        expected = scanned(counts, suffixes)
        assert index.contexts(match, ALL, ALL) == expected and index.contexts(match, 2, ALL) == expected[:2]
        if not gone:  # else what followed once counts as a kind
            assert index.contexts(match, ALL, 2) == scanned(counts, suffixes, 2)


@given(st.integers(2, 6), st.lists(TEXTS, max_size=6), TEXTS)
def test_counts_of_one_text_are_those_of_a_scan_however_it_came_in(max_depth, pieces, others):
    index, text = SuffixIndex(max_depth), []
    for piece in pieces:
        index.extend(piece)
        text += piece
        assert index.end == matched(index, text)
    check(index, [text], [*others, *text])


@given(st.integers(2, 6), st.lists(TEXTS, max_size=5), st.data())
def test_counts_of_several_texts_and_of_those_left(max_depth, texts, data):
    index = SuffixIndex(max_depth)
    for text in texts:
        index.begin()
        index.extend(text)
    others = data.draw(TEXTS)
    check(index, texts, others)
    gone = data.draw(st.sets(st.sampled_from(range(len(texts))))) if texts else set()
    for number in gone:
        index.remove(texts[number])
    left = [text for number, text in enumerate(texts) if number not in gone]
    check(index, left, others, gone=True)
    index.begin()
    index.extend(others)
    check(index, [*left, others], [*others, *others], gone=True)


@given(st.integers(2, 6), TEXTS, st.sampled_from(LETTERS), TEXTS)
def test_a_token_beyond_the_end_counts_as_if_it_were_taken_in(max_depth, text, beyond, others):
    index, longer = SuffixIndex(max_depth), SuffixIndex(max_depth)
    index.extend(text)
    longer.extend([*text, beyond])
    for end in range(len(others) + 1):
        found = index.contexts(matched(index, others[:end]), ALL, ALL, beyond)
        assert found == longer.contexts(matched(longer, others[:end]), ALL, ALL)


@given(st.integers(2, 5), st.integers(0, 30), st.lists(TEXTS, max_size=12), TEXTS)
def test_outputs_are_kept_whole_and_the_latest_ones(max_depth, max_tokens, texts, others):
    outputs = OutputIndex(max_depth, max_tokens)
    for number, text in enumerate(texts):
        outputs.add(text)
        kept = texts[: number + 1]
        while sum(map(len, kept)) > max_tokens:
            kept = kept[1:]
        check(outputs.index, kept, others, gone=True)


def test_an_index_of_outputs_does_not_grow_with_what_has_gone():
    outputs = OutputIndex(24, max_tokens=300)
    for number in range(60):
        outputs.add([(number * token * token) % 97 for token in range(100)])
        # The 300 tokens kept, as many gone, and one more text; two states a token at most.
        assert len(outputs.index._states) <= 5 * 2 * (300 + 300 + 100)


@pytest.mark.parametrize("text", [[1] * 300, [1, 2] * 150, [*range(100)] * 3], ids=["one", "two", "hundred"])
def test_a_loop_is_counted_up_to_the_depth_and_no_further(text):
    index = SuffixIndex(24)
    index.extend(text)
    period = len(set(text))
    string = (text * 2)[:23]
    times = (len(text) - 24) // period + 1
    assert index.contexts(matched(index, string), 1, ALL) == [(23, times, {text[23 % period]: times})]
    assert index.end[1] == 23 == matched(index, text)[1]
