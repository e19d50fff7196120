"""What the suffix drafter remembers of texts: how often every string of bounded length occurred in them."""

from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_NONE, _SEVERAL = -1, -2  # in the place of a token: a state without a transition, and one with more than one


class Match(NamedTuple):
    """The end of some text as far as it occurred: its last `length` tokens, all of them in one state."""

    state: int
    length: int


class SuffixIndex:
    """Counts of every string of up to `max_depth` tokens in a set of texts, in a suffix automaton.

    A state stands for all strings that end at the same places; its longest has `_length` tokens, and `_link` leads to
    the state of the longest shorter suffix that ends at other places too. From there on up, states stand for ever
    shorter suffixes, so that a text's next token adds one to the states of its suffixes and to no others. Those whose
    shortest string is longer than `max_depth` are not counted. A state's transitions are its strings' continuations;
    most states have one, which needs no dictionary.

    A token takes amortised O(1) to append and at most `max_depth` steps to count. A text of n tokens makes less than 2n
    states and 3n transitions, whatever it says.

    Args:
        max_depth: the longest string counted. A match is at most a token shorter, so that what follows it is counted.

    Source: Blumer et al., The smallest automaton recognizing the subwords of a text (1985), here of several texts.
    """

    start = Match(0, 0)
    """The match of an empty text."""

    def __init__(self, max_depth: int):
        self.max_depth = max_depth
        self._length, self._link, self._count = array("i"), array("i"), array("i")
        # By state: the token and the next state of its only transition, or `_SEVERAL` and an index into `_branches`.
        self._token, self._next = array("i"), array("i")
        self._branches: list[dict[int, int]] = []
        self._add_state(0)
        self.begin()

    def begin(self) -> None:
        """End the text so far: what follows belongs to another one, and no string runs across."""
        self._whole = self._tail = 0  # the states of all the text, and of its last `max_depth` tokens or more

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            self._append(token)
        self._tail = self._tally(self._tail, tokens, 1)

    def remove(self, tokens: Sequence[int]) -> None:
        """Discount a whole text that was taken in and ended; its states stay."""
        self._tally(0, tokens, -1)

    @property
    def end(self) -> Match:
        """The match of the text itself."""
        return self._capped(self._tail, self._length[self._tail])

    def step(self, match: Match, token: int) -> Match:
        """The match of a text that goes on with `token`: its longest suffix that occurred."""
        state, length = match
        while (to := self._transition(state, token)) < 0 or not self._count[to]:
            if not state:
                return self.start
            state = self._link[state]
            length = self._length[state]
        return self._capped(to, length + 1)

    def contexts(self, match: Match, beyond: int | None = None) -> Iterator[tuple[int, dict[int, int]]]:
        """The suffixes of `match` that anything followed, from the longest on, each with what followed how often.

        Suffixes that were followed at the same places are one context, of which the longest is given.

        Args:
            match: of some text.
            beyond: the token known to follow the end of the index's text, though it is not taken in yet.

        Yields:
            The suffix's length, and counts by token.
        """
        state, length = match
        known = 0
        while state:
            counts = self._continuations(state)
            if beyond is not None and self._is_at_the_end(state):
                counts[beyond] = counts.get(beyond, 0) + 1
            total = sum(counts.values())
            if total > known:  # a shorter suffix is followed wherever a longer one is
                known = total
                yield length, counts
            state = self._link[state]
            length = self._length[state]

    def _capped(self, state: int, length: int) -> Match:
        """A match of no more than the longest match's tokens."""
        longest = self.max_depth - 1
        while length > longest and self._length[self._link[state]] >= longest:
            state = self._link[state]
        return Match(state, min(length, longest))

    def _continuations(self, state: int) -> dict[int, int]:
        token, to, count = self._token[state], self._next[state], self._count
        if token == _NONE:
            return {}
        if token == _SEVERAL:
            return {token: count[to] for token, to in self._branches[to].items() if count[to]}
        return {token: count[to]} if count[to] else {}

    def _is_at_the_end(self, state: int) -> bool:
        at, length = self._tail, self._length[state]
        while self._length[at] > length:
            at = self._link[at]
        return at == state

    def _tally(self, state: int, tokens: Sequence[int], change: int) -> int:
        """Count the suffixes of every prefix of `tokens`, which begin in `state`; returns the state they lead to."""
        length, link, count, max_depth = self._length, self._link, self._count, self.max_depth
        for token in tokens:
            state = self._transition(state, token)
            while length[link[state]] >= max_depth:
                state = link[state]
            suffix = state
            while suffix:
                count[suffix] += change
                suffix = link[suffix]
        return state

    # -- the automaton ------------------------------------------------------------------------------------------------

    def _append(self, token: int) -> None:
        length, link, at = self._length, self._link, self._whole
        known = self._transition(at, token)
        if known >= 0:  # all of this text is the beginning of an earlier one
            self._whole = self._of_length(length[at] + 1, known, at, token)
            return
        self._whole = self._add_state(length[at] + 1)
        while at >= 0 and (known := self._transition(at, token)) < 0:
            self._connect(at, token, self._whole)
            at = link[at]
        link[self._whole] = self._of_length(length[at] + 1, known, at, token) if at >= 0 else 0

    def _of_length(self, size: int, state: int, at: int, token: int) -> int:
        """The state of the strings in `state` of up to `size` tokens: split off where there are longer ones, too.

        `state` is what `token` leads to from `at`, and from suffixes of that.
        """
        length, link = self._length, self._link
        if length[state] == size:
            return state
        shorter = self._add_state(size)
        link[shorter], self._count[shorter] = link[state], self._count[state]
        self._token[shorter], self._next[shorter] = self._token[state], self._next[state]
        if self._token[state] == _SEVERAL:
            self._next[shorter] = len(self._branches)
            self._branches.append(self._branches[self._next[state]].copy())
        link[state] = shorter
        while at >= 0 and self._transition(at, token) == state:
            self._connect(at, token, shorter)
            at = link[at]
        return shorter

    def _add_state(self, length: int) -> int:
        self._length.append(length)
        self._link.append(-1)
        self._count.append(0)
        self._token.append(_NONE)
        self._next.append(-1)
        return len(self._length) - 1

    def _transition(self, state: int, token: int) -> int:
        """Where `token` leads to from `state`, or -1."""
        only = self._token[state]
        if only == token:
            return self._next[state]
        if only == _SEVERAL:
            return self._branches[self._next[state]].get(token, -1)
        return -1

    def _connect(self, state: int, token: int, to: int) -> None:
        only = self._token[state]
        if only == _SEVERAL:
            self._branches[self._next[state]][token] = to
        elif only in (_NONE, token):
            self._token[state], self._next[state] = token, to
        else:
            self._branches.append({only: self._next[state], token: to})
            self._token[state], self._next[state] = _SEVERAL, len(self._branches) - 1


class OutputIndex:
    """A suffix index of the latest whole texts that have `max_tokens` tokens or fewer together.

    The oldest go first, and their counts at once. Their states go when half of all tokens in the index are gone: it is
    then made anew, which costs each token at most one more insertion.

    Args:
        max_depth: the longest string counted.
        max_tokens: the most tokens kept; a longer text is not.
    """

    def __init__(self, max_depth: int, max_tokens: int):
        self.max_tokens = max_tokens
        self.index = SuffixIndex(max_depth)
        self._texts: deque[array[int]] = deque()
        self._num_tokens = self._num_gone = 0

    def add(self, tokens: Sequence[int]) -> None:
        """Take in a text."""
        self._take_in(tokens)
        self._texts.append(array("i", tokens))
        self._num_tokens += len(tokens)
        while self._num_tokens > self.max_tokens:
            oldest = self._texts.popleft()
            self.index.remove(oldest)
            self._num_tokens -= len(oldest)
            self._num_gone += len(oldest)
        if self._num_gone > self._num_tokens:
            self.index = SuffixIndex(self.index.max_depth)
            self._num_gone = 0
            for text in self._texts:
                self._take_in(text)

    def _take_in(self, tokens: Sequence[int]) -> None:
        self.index.begin()
        self.index.extend(tokens)
