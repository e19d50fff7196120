"""Drafting from counts: how often each token followed the longest suffix of the text that occurred before."""

import itertools
import math
from heapq import heappop, heappush
from typing import NamedTuple

import attrs
import numpy as np

from treegraft.interfaces import Drafter, DraftRequest, Observation
from treegraft.tree import Expansion
from treegraft_plugins.drafters.suffix_index import Match, OutputIndex, SuffixIndex
from treegraft_plugins.options import number, switch, whole

_NUM_CONTEXTS = 3  # that share in a prediction; more cost time and bring nothing that could be measured


class _Node(NamedTuple):
    """A node to draft below, of the tree or proposed.

    Attributes:
        row: its row in the tree, or -1 where the tree lacks it.
        anchor: what its children attach to: its row, or ~i of the proposal.
        depth: in the tree.
        matches: its path's, one an index.
        score: its path score (nats).
        chance: the product of the probabilities from where the draft began, 0 outside the draft.
    """

    row: int
    anchor: int
    depth: int
    matches: tuple[Match, ...]
    score: float
    chance: float = 0.0


class _Guess(NamedTuple):
    """What may follow a node: the length of the match, and tokens with probabilities, best first."""

    length: int
    tokens: list[tuple[int, float]]


@attrs.define(eq=False, kw_only=True)
class SuffixDrafter(Drafter):
    """Counts what followed before where the text, and a node's path, ended in the same tokens.

    A node's match is the longest suffix of the text and its path that was followed by anything. A token is as probable
    as its share in what followed the match and the two next shorter contexts, interpolated after Witten and Bell: n
    tokens of d kinds leave d / (n + d) to the next context, and the last to tokens never seen there.

    Requested nodes get their most probable tokens. Below the one with the longest match, of several the deepest, a
    whole draft is grown: the next node is always the one with the greatest product of probabilities, down to
    `min_prob`, up to floor(factor * l + offset) nodes for a match of length l. Its nodes are looked up as requested
    ones are, so that a draft goes on from a shorter match where the text ends, and a loop goes on. It ends where
    another requested node begins.

    Args:
        max_depth: the longest string counted; a match is at most a token shorter.
        factor: nodes that a draft may have for each token of the match.
        offset: nodes that it may have besides.
        min_prob: the least product of probabilities along a draft.
        interpolate: without, shares are those of the longest match alone, and leave nothing.
        global_tokens: draft from earlier requests' outputs, too, of which the latest whole ones of so many tokens
            together are kept; 0 for none. Whichever has the longer match counts, of equal ones the request's own text.

    Source: SuffixDecoding (growth, scores, earlier outputs); Witten and Bell, The zero-frequency problem (1991).
    """

    max_depth: int = attrs.field(default=32, validator=whole(24, 64))
    factor: float = attrs.field(default=2.0, validator=number(0))
    offset: float = attrs.field(default=4.0, validator=number(0))
    min_prob: float = attrs.field(default=0.1, validator=number(0, 1))
    interpolate: bool = attrs.field(default=True, validator=switch)
    global_tokens: int = attrs.field(default=0, validator=whole(0))
    _text: SuffixIndex = attrs.field(init=False)
    _output: list[int] = attrs.field(init=False, factory=list)
    _earlier: OutputIndex = attrs.field(init=False)
    _earlier_match: Match = attrs.field(init=False, default=SuffixIndex.start)

    def __attrs_post_init__(self) -> None:
        growth = (self.factor, self.offset, self.min_prob, self.interpolate)
        self.identity = f"suffix {(self.max_depth, *growth, self.global_tokens)}"
        self._text = SuffixIndex(self.max_depth)
        self._earlier = OutputIndex(self.max_depth, self.global_tokens)

    def start(self, observation: Observation) -> None:
        self.stop()
        self._take_in(observation.tokens.tolist())

    def observe(self, observation: Observation) -> None:
        tokens = observation.tokens.tolist()
        self._take_in(tokens)
        if self.global_tokens:
            self._output += tokens

    def stop(self) -> None:
        # The first token observed is the last one of the prompt.
        if len(self._output) > 1:
            self._earlier.add(self._output[1:])
        self._output = []
        self._text = SuffixIndex(self.max_depth)
        self._earlier_match = SuffixIndex.start

    def clone(self) -> "SuffixDrafter":
        return attrs.evolve(self)

    def draft(self, request: DraftRequest) -> Expansion:
        root = int(request.tree.token[0])
        nodes, below = self._requested(request)
        guesses = {node.row: self._guess(node.matches, root, request.branching) for node in nodes}
        begin = max(nodes, key=lambda node: (guesses[node.row].length, node.depth), default=None)
        if begin is None or not guesses[begin.row].length:
            return Expansion.empty({"match_length": 0.0, "match_confidence": 0.0, "draft_score": 0.0})
        length = guesses[begin.row].length
        room = math.floor(self.factor * length + self.offset)

        # By path score: the best are kept where there are too many, and each after the one that it hangs below.
        queue: list[tuple[float, int, _Node, int, float]] = []
        order = itertools.count()

        def offer(node: _Node, guess: _Guess) -> None:
            for child, prob in guess.tokens:
                heappush(queue, (-node.score - math.log(prob), next(order), node, child, prob))

        for node in nodes:
            offer(node._replace(chance=1.0) if node is begin else node, guesses[node.row])
        anchor, token, probs, chances = [], [], [], []
        while queue and len(token) < request.max_nodes:
            cost, _, node, child, prob = heappop(queue)
            chance = node.chance * prob
            drafted = node.chance > 0 and chance >= self.min_prob and len(chances) < room
            if not drafted and node.anchor < 0:
                continue
            anchor.append(node.anchor)
            token.append(child)
            probs.append(prob)
            if drafted:
                chances.append(chance)
                row = below.get((node.row, child), -1)
                if row not in guesses and node.depth + 1 < request.max_depth:
                    matches = self._step(node.matches, child)
                    node = _Node(row, ~(len(token) - 1), node.depth + 1, matches, -cost, chance)
                    offer(node, self._guess(matches, root, request.branching))
        confidence = max((prob for guess in guesses.values() for _, prob in guess.tokens[:1]), default=0.0)
        signals = {"match_length": float(length), "match_confidence": confidence, "draft_score": sum(chances)}
        return Expansion(anchor, token, np.log(probs), signals=signals)

    @property
    def _indices(self) -> tuple[SuffixIndex, ...]:
        return (self._text, self._earlier.index) if self.global_tokens else (self._text,)

    def _take_in(self, tokens: list[int]) -> None:
        self._text.extend(tokens)
        if self.global_tokens:
            for token in tokens:
                self._earlier_match = self._earlier.index.step(self._earlier_match, token)

    def _step(self, matches: tuple[Match, ...], token: int) -> tuple[Match, ...]:
        return tuple([index.step(match, token) for index, match in zip(self._indices, matches, strict=True)])

    def _requested(self, request: DraftRequest) -> tuple[list[_Node], dict[tuple[int, int], int]]:
        """The requested nodes, and the rows of their paths below the root by parent and token."""
        tree, end = request.tree, (self._text.end, self._earlier_match)
        token, parent, depth = tree.token.tolist(), tree.parent.tolist(), tree.depth.tolist()
        matches = {0: self._step(end[: len(self._indices)], token[0])}
        nodes = []
        for row in request.positions.tolist():
            path, at = [], row
            while at not in matches:
                path.append(at)
                at = parent[at]
            for at in reversed(path):
                matches[at] = self._step(matches[parent[at]], token[at])
            if depth[row] < request.max_depth:
                nodes.append(_Node(row, row, depth[row], matches[row], float(tree.path_score[row])))
        return nodes, {(parent[row], token[row]): row for row in matches if row}

    def _guess(self, matches: tuple[Match, ...], root: int, limit: int) -> _Guess:
        """The `limit` most probable tokens; of equally probable ones the smallest."""
        contexts = self._text.contexts(matches[0], beyond=root)
        longest = next(contexts, None)
        if self.global_tokens:
            others = self._earlier.index.contexts(matches[1])
            other = next(others, None)
            if other and (not longest or other[0] > longest[0]):
                longest, contexts = other, others
        if not longest:
            return _Guess(0, [])
        length, counts = longest
        if self.interpolate:
            probs = _interpolated([counts, *(shorter for _, shorter in itertools.islice(contexts, _NUM_CONTEXTS - 1))])
        else:
            total = sum(counts.values())
            probs = {token: count / total for token, count in counts.items()}
        return _Guess(length, sorted(probs.items(), key=_by_probability)[:limit])


def _interpolated(contexts: list[dict[int, int]]) -> dict[int, float]:
    """Witten-Bell probabilities by token, from counts by token in ever shorter contexts."""
    probs: dict[int, float] = {}
    left = 1.0
    for counts in contexts:
        share = left / (sum(counts.values()) + len(counts))
        for token, count in counts.items():
            probs[token] = probs.get(token, 0.0) + share * count
        left = share * len(counts)
    return probs


def _by_probability(item: tuple[int, float]) -> tuple[float, int]:
    token, prob = item
    return -prob, token
