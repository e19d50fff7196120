"""Cascade speculative drafting: one chain, begun by a language model that a lookup speeds up, ended by the lookup."""

from typing import Any, Literal

import attrs
import numpy as np
from numpy.typing import NDArray

from treegraft.interfaces import Drafter, DraftRequest, Observation, TargetModel
from treegraft.tree import DraftTree, Expansion, Ints
from treegraft_plugins.drafters.ngram import NGramDrafter
from treegraft_plugins.hf.drafter import HFCausalLMDrafter
from treegraft_plugins.hf.loading import Loadable
from treegraft_plugins.options import whole

_Link = tuple[int, float]
"""A token of the chain and its log probability (nats)."""


@attrs.define(eq=False)
class CascadeDrafter(Drafter):
    """Drafts one chain below the best position: its first tokens are a language model's own, the others a lookup's.

    Vertical cascade: the language model (the middle) decodes greedily, and speculatively itself. The n-gram drafter
    (the small one) guesses; the middle reads the guess in one forward, keeps what it would have said too, and adds
    its own next token. Horizontal cascade: the tokens behind, which are reached more rarely, are the small one's
    guess as it stands. A token's log probability is the middle's where the middle has read it, else the small one's.

    One call a round drafts all there is: schedule it as `[NAME, null]`.

    Args:
        model: the middle, as in `hf_causal_lm`.
        middle_tokens: most tokens of the middle.
        small_tokens: most tokens of the small one behind them.
        max_n, mode, fallback: of the small one, as in `ngram`.
        vocabulary, self_check: of the middle, as in `hf_causal_lm`.

    Raises:
        ModelError: the model cannot be loaded, or cannot be served, or fails the self-check.

    Source: Cascade Speculative Drafting, arXiv 2312.11462; the middle takes its arg-max, without lenience.
    """

    model: Loadable
    middle_tokens: int = attrs.field(default=2, kw_only=True, validator=whole(1))
    small_tokens: int = attrs.field(default=16, kw_only=True, validator=whole(0))
    max_n: int = attrs.field(default=4, kw_only=True)
    mode: Literal["mix", "copy", "top_tokens"] = attrs.field(default="mix", kw_only=True)
    fallback: bool = attrs.field(default=True, kw_only=True)
    vocabulary: str = attrs.field(default="same", kw_only=True)
    self_check: bool = attrs.field(default=True, kw_only=True)

    def __attrs_post_init__(self) -> None:
        self._small = NGramDrafter(max_n=self.max_n, mode=self.mode, fallback=self.fallback)
        self._middle = HFCausalLMDrafter(self.model, vocabulary=self.vocabulary, self_check=self.self_check)
        self.wants, self.max_length = self._small.wants, self._middle.max_length
        self.model_name = self._middle.model_name
        self.identity = f"csd {self.middle_tokens} {self.small_tokens} {self._small.identity} {self._middle.identity}"

    # -- the request's course, which both take ------------------------------------------------------------------------

    def bind(self, target: TargetModel) -> None:
        self._small.bind(target)
        self._middle.bind(target)

    def start(self, observation: Observation) -> None:
        self._small.start(observation)
        self._middle.start(observation)

    def observe(self, observation: Observation) -> None:
        self._small.observe(observation)
        self._middle.observe(observation)

    def num_missed(self, committed: NDArray[np.int64]) -> int:
        return self._middle.num_missed(committed)

    def checkpoint(self) -> Any:
        return self._small.checkpoint(), self._middle.checkpoint()

    def restore(self, checkpoint: Any) -> None:
        small, middle = checkpoint
        self._small.restore(small)
        self._middle.restore(middle)

    def stop(self) -> None:
        self._small.stop()
        self._middle.stop()

    def clone(self) -> "CascadeDrafter":
        return attrs.evolve(self, model=self._middle.clone().model, self_check=False)

    # -- drafting -----------------------------------------------------------------------------------------------------

    def draft(self, request: DraftRequest) -> Expansion:
        self.num_rows = 0
        if not len(request.positions):
            return Expansion.empty()
        position = int(request.positions[0])
        path = request.tree.token[request.tree.path(position)].tolist()
        room = min(request.max_nodes, request.max_depth + 1 - len(path))
        num_first = min(self.middle_tokens, room)

        links: list[_Link] = []
        while len(links) < num_first:
            said = self._said(request, _along(path, links), num_first - len(links))
            if not said:
                break  # the path ends in a token that the middle does not know
            links += said
        links += self._guessed(request, _along(path, links), min(self.small_tokens, room - len(links)))

        anchor = [position, *(~above for above in range(len(links)))][: len(links)]
        return Expansion(anchor, [token for token, _ in links], [log_prob for _, log_prob in links])

    def _said(self, request: DraftRequest, path: list[int], limit: int) -> list[_Link]:
        """The middle's next tokens after `path`, 1 to `limit`: what it would say of the guess, and one more."""
        read = _along(path, self._guessed(request, path, limit - 1))
        below = np.arange(len(path) - 1, len(read))
        expansion = self._middle.draft(_asked(request, read, below, len(below)))
        self.num_rows += self._middle.num_rows
        said: list[_Link] = []
        for row, link in zip(expansion.anchor.tolist(), _links(expansion), strict=True):
            said.append(link)
            if read[row + 1 : row + 2] != [link[0]]:
                break
        return said

    def _guessed(self, request: DraftRequest, path: list[int], limit: int) -> list[_Link]:
        """The small one's next tokens after `path`, at most `limit`; it is asked again where one of its chains ends."""
        guess: list[_Link] = []
        while len(guess) < limit:
            read = _along(path, guess)
            last = np.array([len(read) - 1])
            more = _links(self._small.draft(_asked(request, read, last, limit - len(guess))))
            if not more:
                break
            guess += more
        return guess


def _asked(request: DraftRequest, path: list[int], positions: Ints, max_nodes: int) -> DraftRequest:
    """The request anew, for a tree that is nothing but `path` (tokens from the root on, so that row is depth).

    Nodes are known by their paths: what the middle forwards of one such tree serves all of the round. One child a
    node makes a chain of each answer.
    """
    size = len(path) - 1
    anchor = [0, *(~above for above in range(size))][:size]
    tree = DraftTree.rooted(path[0]).append(Expansion(anchor, path[1:], np.zeros(size)), 0, (False,))
    return attrs.evolve(request, tree=tree, positions=positions, branching=1, max_nodes=max_nodes)


def _along(path: list[int], links: list[_Link]) -> list[int]:
    """The tokens of `path` and of what follows it."""
    return [*path, *(token for token, _ in links)]


def _links(chain: Expansion) -> list[_Link]:
    return list(zip(chain.token.tolist(), chain.log_prob.tolist(), strict=True))
