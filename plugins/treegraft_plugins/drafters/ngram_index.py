"""What the n-gram drafter remembers of a text, in flat arrays: where every n-gram occurred, and what might follow."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from treegraft.tree import Floats, Ints

_MULTIPLIER = 0x9E3779B97F4A7C15  # odd: multiplying modulo 2**64 loses nothing, and mixes into the high bits
_MASK = 2**64 - 1
_SLOTS_PER_GRAM = 2
_SMALLEST_CAPACITY = 256


class NGramIndex:
    """The 1..N-grams of a text, each linked to its earlier occurrences; there are no false matches and no missed ones.

    A gram has a number: `position * N + n - 1`, of its last token's position and its length n. `_latest` is a hash
    table with linear probing: the number of every distinct gram's last occurrence. `earlier` leads on from there. A
    slot counts only where its tokens are equal, so that colliding hashes cost a step and nothing else.

    Args:
        max_n: N, the longest gram.

    Attributes:
        tokens: the text so far.
        earlier: int32 by gram number, the position of the same gram's previous occurrence or -1.
    """

    def __init__(self, max_n: int):
        self.max_n = max_n
        self.tokens: list[int] = []
        self._rebuild()

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens. A text that outgrows its arrays is indexed afresh in twice the room, all at once."""
        begin = len(self.tokens)
        self.tokens.extend(tokens)
        if len(self.tokens) > self._capacity:
            self._rebuild()
            return
        for position in range(begin, len(self.tokens)):
            self._insert(position)

    def last_occurrences(self, ending: Sequence[int]) -> list[int]:
        """Where the last 1, 2, ... tokens of `ending` last occurred: positions of their final token.

        The list ends before the first length that never occurred, and at N.
        """
        found: list[int] = []
        hashed = 0
        for n in range(1, min(self.max_n, len(ending)) + 1):
            hashed = ((hashed ^ (ending[-n] + 1)) * _MULTIPLIER) & _MASK
            _, number = self._find(hashed, ending[-n:])
            if number < 0:
                break
            found.append(number // self.max_n)
        return found

    def _insert(self, position: int) -> None:
        tokens, max_n = self.tokens, self.max_n
        hashed = 0
        for n in range(1, min(max_n, position + 1) + 1):
            begin = position - n + 1
            hashed = ((hashed ^ (tokens[begin] + 1)) * _MULTIPLIER) & _MASK
            slot, number = self._find(hashed, tokens[begin : position + 1])
            self.earlier[position * max_n + n - 1] = number // max_n  # -1 stays -1
            self._latest[slot] = position * max_n + n - 1

    def _find(self, hashed: int, gram: Sequence[int]) -> tuple[int, int]:
        """The slot that holds `gram` and its number, or the free slot where it belongs and -1."""
        tokens, latest, max_n, length = self.tokens, self._latest, self.max_n, len(gram)
        slot = hashed >> self._shift
        while True:
            number = latest[slot]
            if number < 0:
                return slot, -1
            end, shorter = divmod(number, max_n)
            if shorter + 1 == length and tokens[end - shorter : end + 1] == gram:
                return slot, number
            slot = (slot + 1) % len(latest)

    def _rebuild(self) -> None:
        """Index the whole text, with room for as much again: sorting finds equal grams many at a time."""
        size, max_n = len(self.tokens), self.max_n
        self._capacity = max(_SMALLEST_CAPACITY, 1 << (size - 1).bit_length())
        bits = (self._capacity * max_n * _SLOTS_PER_GRAM - 1).bit_length()
        self._shift = 64 - bits
        latest = np.full(1 << bits, -1, np.int32)
        earlier = np.full((self._capacity, max_n), -1, np.int32)
        text = np.array(self.tokens, np.int64)
        hashed = np.zeros(size, np.uint64)
        _, group = np.unique(text, return_inverse=True)
        words = group
        for n in range(1, min(max_n, size) + 1):
            # [size - n + 1]: one entry a gram of length n. Equal entries of `group` are equal grams.
            if n > 1:
                _, group = np.unique(group[:-1] * size + words[n - 1 :], return_inverse=True)
            ends, sources, lasts = _links(group)
            earlier[ends + n - 1, n - 1] = sources + n - 1
            hashed = (hashed[n > 1 :] ^ (text[: size - n + 1] + 1).astype(np.uint64)) * np.uint64(_MULTIPLIER)
            _place(latest, hashed[lasts] >> np.uint64(self._shift), (lasts + n - 1) * max_n + n - 1)
        self.earlier, self._latest = earlier.reshape(-1).data, latest.data  # memoryviews: fast to read one by one


def _links(group: Ints) -> tuple[Ints, Ints, Ints]:
    """Occurrences that have an earlier one of the same group, those earlier ones, and the last of every group."""
    order = np.argsort(group, kind="stable")
    repeats = group[order][1:] == group[order][:-1]
    return order[1:][repeats], order[:-1][repeats], order[np.append(~repeats, True)]


def _place(latest: Ints, slot: Ints, number: Ints) -> None:
    """Put distinct grams into the table, each in the first free slot from its own on."""
    slot = slot.astype(np.int64)
    while len(number):
        free = latest[slot] < 0
        latest[slot[free]] = number[free]  # of several that want one slot, the last stays
        ousted = latest[slot] != number
        slot, number = (slot[ousted] + 1) % len(latest), number[ousted]


class TopTokens:
    """The target's K best tokens after each position of a text; positions without any have probability 0 throughout.

    Args:
        num_top: K.
    """

    def __init__(self, num_top: int):
        self.num_top = num_top
        self._ids = np.zeros((0, num_top), np.int32)
        self._probs = np.zeros((0, num_top), np.float32)
        self._size = 0

    def extend(self, length: int, ids: Ints | None, log_probs: Floats | None) -> None:
        """Append `length` positions: ids and log probabilities [length, at most K], or None for none."""
        begin, self._size = self._size, self._size + length
        if self._size > len(self._ids):
            room = max(_SMALLEST_CAPACITY, 1 << (self._size - 1).bit_length()) - len(self._ids)
            self._ids = np.concatenate([self._ids, np.zeros((room, self.num_top), np.int32)])
            self._probs = np.concatenate([self._probs, np.zeros((room, self.num_top), np.float32)])
        if ids is not None and log_probs is not None:
            width = min(self.num_top, ids.shape[1])
            self._ids[begin : self._size, :width] = ids[:, :width]
            self._probs[begin : self._size, :width] = np.exp(log_probs[:, :width])

    def after(self, positions: Sequence[int]) -> tuple[Ints, NDArray[np.float32]]:
        """ids and probabilities [P, K] of the best tokens after each position."""
        rows = np.fromiter(positions, np.intp, len(positions))
        return self._ids[rows], self._probs[rows]
