"""What the suffix drafter remembers of texts: how often every string of bounded length occurred in them."""

from array import array
from collections import deque
from collections.abc import Sequence

# A state is a record of five integers in one array, so that reading it touches one line of the processor's cache. Its
# number is the place of the first: the length of its longest string, then its suffix link, its count, and either the
# token and the state of its only transition or `_SEVERAL` and the number of a dictionary.
_LINK, _COUNT, _TOKEN, _NEXT, _SIZE = 1, 2, 3, 4, 5
_NONE, _SEVERAL = -1, -2  # in the place of a token

Match = tuple[int, int]
"""The end of some text as far as it occurred: the state of its last tokens, and how many they are."""


class SuffixIndex:
    """Counts of every string of up to `max_depth` tokens in a set of texts, in a suffix automaton.

    A state stands for all strings that end at the same places, and links to the state of their longest suffix that ends
    at other places too. From there on up, states stand for ever shorter suffixes, so that a text's next token adds one
    to the states of its suffixes and to no others. Those whose shortest string is longer than `max_depth` are not
    counted. A state's transitions are its strings' continuations; most states have one, which needs no dictionary.

    A token takes amortised O(1) to append and at most `max_depth` steps to count. A text of n tokens makes less than 2n
    states and 3n transitions, whatever it says.

    Args:
        max_depth: the longest string counted. A match is at most a token shorter, so that what follows it is counted.

    Source: Blumer et al., The smallest automaton recognizing the subwords of a text (1985), here of several texts.
    """

    start: Match = (0, 0)
    """The match of an empty text."""

    def __init__(self, max_depth: int):
        self.max_depth = max_depth
        self._states = array("i")
        self._branches: list[dict[int, int]] = []
        self._add_state(0)
        self.begin()

    def begin(self) -> None:
        """End the text so far: what follows belongs to another one, and no string runs across."""
        self._whole = self._tail = 0  # the states of all the text, and of its last `max_depth` tokens or more
        self._ends: set[int] | None = None

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            self._append(token)
        self._tail = self._tally(self._tail, tokens, 1)
        self._ends = None

    def remove(self, tokens: Sequence[int]) -> None:
        """Discount a whole text that was taken in and ended; its states stay."""
        self._tally(0, tokens, -1)

    @property
    def end(self) -> Match:
        """The match of the text itself."""
        return self._capped(self._tail, self._states[self._tail])

    def step(self, match: Match, token: int) -> Match:
        """The match of a text that goes on with `token`: its longest suffix that occurred."""
        states = self._states
        state, length = match
        while (to := self._transition(state, token)) < 0 or not states[to + _COUNT]:
            if not state:
                return self.start
            state = states[state + _LINK]
            length = states[state]
        return self._capped(to, length + 1)

    def contexts(
        self, match: Match, limit: int, widest: int, beyond: int | None = None
    ) -> list[tuple[int, int, dict[int, int]]]:
        """The longest suffixes of `match` that anything followed, with what followed how often.

        Suffixes that were followed at the same places are one context, of which the longest is given.

        Args:
            match: of some text.
            limit: the most contexts.
            widest: none after the first that more kinds of token than this ever followed, nor any shorter one: they say
                little, and take the longest to read.
            beyond: the token known to follow the end of the index's text, though it is not taken in yet.

        Returns:
            Length, number of times that it was followed, and counts by token, longest first.
        """
        states, ends = self._states, self._endings() if beyond is not None else ()
        state, length = match
        found: list[tuple[int, int, dict[int, int]]] = []
        known = 0
        while state and len(found) < limit:
            _, link, _, token, to = states[state : state + _SIZE]
            if token == _SEVERAL:
                branches = self._branches[to]
                if found and len(branches) > widest:
                    break
                counts = {token: count for token, to in branches.items() if (count := states[to + _COUNT])}
            else:
                counts = {token: count} if token != _NONE and (count := states[to + _COUNT]) else {}
            if state in ends:
                counts[beyond] = counts.get(beyond, 0) + 1
            total = sum(counts.values())
            if total > known:  # a shorter suffix is followed wherever a longer one is
                known = total
                found.append((length, total, counts))
            state, length = link, states[link]
        return found

    def _capped(self, state: int, length: int) -> Match:
        """A match of no more than the longest match's tokens."""
        states, longest = self._states, self.max_depth - 1
        if length <= longest:
            return state, length
        while states[link := states[state + _LINK]] >= longest:
            state = link
        return state, longest

    def _endings(self) -> set[int]:
        """The states of the text's suffixes that are counted."""
        if self._ends is None:
            self._ends, state = set(), self._tail
            while state:
                self._ends.add(state)
                state = self._states[state + _LINK]
        return self._ends

    def _tally(self, state: int, tokens: Sequence[int], change: int) -> int:
        """Count the suffixes of every prefix of `tokens`, which begin in `state`; returns the state they lead to."""
        states, max_depth = self._states, self.max_depth
        for token in tokens:
            state = self._transition(state, token)
            while states[link := states[state + _LINK]] >= max_depth:
                state = link
            suffix = state
            while suffix:
                states[suffix + _COUNT] += change
                suffix = states[suffix + _LINK]
        return state

    # -- the automaton ------------------------------------------------------------------------------------------------

    def _append(self, token: int) -> None:
        states, at = self._states, self._whole
        length = states[at] + 1
        known = self._transition(at, token)
        if known >= 0:  # all of this text is the beginning of an earlier one
            self._whole = self._of_length(length, known, at, token)
            return
        self._whole = self._add_state(length)
        while at >= 0 and (known := self._transition(at, token)) < 0:
            self._connect(at, token, self._whole)
            at = states[at + _LINK]
        link = self._of_length(states[at] + 1, known, at, token) if at >= 0 else 0
        states[self._whole + _LINK] = link

    def _of_length(self, length: int, state: int, at: int, token: int) -> int:
        """The state of the strings in `state` of up to `length` tokens: split off where there are longer ones, too.

        `state` is what `token` leads to from `at`, and from suffixes of that.
        """
        states = self._states
        if states[state] == length:
            return state
        shorter = self._add_state(length)
        states[shorter + _LINK : shorter + _SIZE] = states[state + _LINK : state + _SIZE]
        if states[state + _TOKEN] == _SEVERAL:
            states[shorter + _NEXT] = len(self._branches)
            self._branches.append(self._branches[states[state + _NEXT]].copy())
        states[state + _LINK] = shorter
        while at >= 0 and self._transition(at, token) == state:
            self._connect(at, token, shorter)
            at = states[at + _LINK]
        return shorter

    def _add_state(self, length: int) -> int:
        self._states.extend((length, -1, 0, _NONE, -1))
        return len(self._states) - _SIZE

    def _transition(self, state: int, token: int) -> int:
        """Where `token` leads to from `state`, or -1."""
        states = self._states
        only = states[state + _TOKEN]
        if only == token:
            return states[state + _NEXT]
        if only == _SEVERAL:
            return self._branches[states[state + _NEXT]].get(token, -1)
        return -1

    def _connect(self, state: int, token: int, to: int) -> None:
        states = self._states
        only = states[state + _TOKEN]
        if only == _SEVERAL:
            self._branches[states[state + _NEXT]][token] = to
        elif only in (_NONE, token):
            states[state + _TOKEN], states[state + _NEXT] = token, to
        else:
            states[state + _TOKEN], only_to = _SEVERAL, states[state + _NEXT]
            states[state + _NEXT] = len(self._branches)
            self._branches.append({only: only_to, token: to})


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
