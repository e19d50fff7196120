"""Randomness that branches: every path through the random choices of a computation, with its probability."""

from collections.abc import Callable, Iterator
from typing import TypeVar

import attrs
import numpy as np
import torch

from treegraft.errors import InvariantError
from treegraft.sampling import Draws, Key, Rows
from treegraft.tree import Floats, Ints

T = TypeVar("T")


@attrs.define(eq=False)
class _Branch:
    """A choice made along the current path: the tokens that have mass, and which of them is taken."""

    probs: Floats
    options: Ints
    taken: int = 0

    @property
    def token(self) -> int:
        return int(self.options[self.taken])


class EnumeratedDraws(Draws):
    """Draws that follow one path of choices; `advance` turns to the next path, depth first.

    A row branches when it is first read and keeps its token from then on; a row that is never read does not branch.
    Every other read is a choice of its own, also at a position that was read before. That is stricter than
    `SeededDraws`, where a position keeps its noise: a decoder that drops a draw and draws again is found out here,
    while there it would happen to get the same token.

    >>> draws, probs = EnumeratedDraws(), torch.tensor([[0.25, 0.0, 0.75]], dtype=torch.float64)
    >>> draws.choose(probs, np.array([0]))[0], draws.weight, draws.advance()
    (0, 0.25, True)
    >>> draws.choose(probs, np.array([0]))[0], draws.weight, draws.advance()
    (2, 0.75, False)
    """

    def __init__(self) -> None:
        self._branches: list[_Branch] = []
        self._num_read = 0
        self._keys: set[Key] = set()  # read on the current path

    @property
    def weight(self) -> float:
        """Probability of the choices read so far on the current path."""
        return float(np.prod([branch.probs[branch.token] for branch in self._branches[: self._num_read]]))

    def choose(self, probs: torch.Tensor, positions: Ints) -> Rows:
        return _BranchingRows(self, probs)

    def draw(self, probs: Floats, key: Key) -> int:
        if key in self._keys:
            raise InvariantError(
                "Draws.draw", f"the key {key} a second time",
                "Allowed: each key once: what is drawn by the same noise is not drawn independently.",
                "Take sampler.stream in a verifier, request.sample in a drafter.",
            )  # fmt: skip
        self._keys.add(key)
        return self.read(probs / probs.sum())

    def read(self, probs: Floats) -> int:
        """The current path's choice from `probs` [V]: a fresh variable."""
        if self._num_read == len(self._branches):
            self._branches.append(_Branch(probs, np.flatnonzero(probs > 0)))
        branch = self._branches[self._num_read]
        if not np.array_equal(branch.probs, probs):
            raise _not_repeatable(f"choice {self._num_read} has other probabilities than on the path before")
        self._num_read += 1
        return branch.token

    def advance(self) -> bool:
        """Turn to the next path, to be followed from its start; False when every path has been followed.

        Raises:
            InvariantError: the last run read fewer choices than the run before had led it to.
        """
        if self._num_read != len(self._branches):
            raise _not_repeatable(f"{self._num_read} choices were read where {len(self._branches)} were due")
        self._num_read = 0
        self._keys.clear()
        while self._branches and self._branches[-1].taken == len(self._branches[-1].options) - 1:
            self._branches.pop()
        if not self._branches:
            return False
        self._branches[-1].taken += 1
        return True


class _BranchingRows:
    """Rows of a `choose` call, each of which branches on its first read."""

    def __init__(self, draws: EnumeratedDraws, probs: torch.Tensor):
        self._draws, self._probs, self._tokens = draws, probs, dict[int, int]()

    def __getitem__(self, row: int, /) -> int:
        if row not in self._tokens:
            self._tokens[row] = self._draws.read(self._probs[row].double().cpu().numpy())
        return self._tokens[row]


def _not_repeatable(found: str) -> InvariantError:
    return InvariantError(
        "EnumeratedDraws", found,
        "Allowed: runs that are a function of their draws alone.",
        "Look for state that outlives a run, for clocks, and for other sources of randomness.",
    )  # fmt: skip


def outcomes(run: Callable[[EnumeratedDraws], T]) -> Iterator[tuple[float, T]]:
    """Every (probability, result) of a computation whose only randomness is the draws it is given.

    >>> coin = torch.tensor([[0.5, 0.5]], dtype=torch.float64)
    >>> list(outcomes(lambda draws: "heads" if draws.choose(coin, np.array([0]))[0] == 0 else "tails"))
    [(0.5, 'heads'), (0.5, 'tails')]
    """
    draws = EnumeratedDraws()
    while True:
        result = run(draws)
        yield draws.weight, result
        if not draws.advance():
            return
