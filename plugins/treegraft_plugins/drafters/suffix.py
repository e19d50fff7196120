"""Drafting from counts: how often each token followed the longest suffix of the text that occurred before."""

import itertools
import math
from heapq import heappop, heappush
from typing import NamedTuple

import attrs
import numpy as np

from treegraft.interfaces import Drafter, DraftRequest, Observation
from treegraft.tree import Expansion
from treegraft_plugins.drafters.ngram import best_paths
from treegraft_plugins.drafters.suffix_index import Match, OutputIndex, SuffixIndex
from treegraft_plugins.options import number, switch, whole

# What shares in a prediction: more contexts cost time, as do wide ones, and bring nothing that could be measured.
_NUM_CONTEXTS = 3
_WIDEST = 16


class _Node(NamedTuple):
    """A node to draft below, of the tree or proposed.

    Attributes:
        row: its row in the tree, or -1 where the tree lacks it.
        anchor: what its children attach to: its row, or ~i of the proposal.
        depth: in the tree.
        matches: its path's, in the request's text and in earlier outputs.
        chance: the product of the probabilities from where the draft began.
    """

    row: int
    anchor: int
    depth: int
    matches: tuple[Match, Match]
    chance: float = 1.0


@attrs.define(eq=False, kw_only=True)
class SuffixDrafter(Drafter):
    """Counts what followed before where the text, and a node's path, ended in the same tokens.

    A node's match is the longest suffix of the text and its path that was followed by anything. A token is as probable
    as its share in what followed the match and the two next shorter contexts, interpolated after Witten and Bell: n
    tokens of d kinds leave d / (n + d) to the next context, and the last to tokens never seen there. A context that
    more than 16 kinds followed is read only if it is the longest.

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
    factor: float = attrs.field(default=1.0, validator=number(0))
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
        nodes, below = self._requested(request)
        requested = {node.row for node in nodes}
        root, limit = int(request.tree.token[0]), request.branching
        anchor: list[int] = []
        token: list[int] = []
        prob: list[float] = []
        begin, longest, offers = None, 0, range(0)
        for node in nodes:
            length, guesses = self._guess(node.matches, root, limit)
            if guesses and (begin is None or (length, node.depth) > (longest, begin.depth)):
                begin, longest, offers = node, length, range(len(token), len(token) + len(guesses))
            for child, share in guesses:
                anchor.append(node.row)
                token.append(child)
                prob.append(share)
        if begin is None:
            return Expansion.empty({"match_length": 0.0, "match_confidence": 0.0, "draft_score": 0.0})
        confidence = max(prob)

        # The draft, greedily. Its first nodes are proposed already, under the numbers that they are queued with.
        queue = [(-prob[i], i, begin, token[i], prob[i]) for i in offers if prob[i] >= self.min_prob]
        num_proposed, order = len(token), itertools.count(len(token))
        room, score = math.floor(self.factor * longest + self.offset), 0.0
        while queue and room > 0:
            minus_chance, index, node, child, share = heappop(queue)
            if index >= num_proposed:
                index = len(token)
                anchor.append(node.anchor)
                token.append(child)
                prob.append(share)
            room -= 1
            score -= minus_chance
            row, depth = below.get((node.row, child), -1), node.depth + 1
            if row in requested or depth >= request.max_depth:
                continue
            node = _Node(row, ~index, depth, self._step(node.matches, child), -minus_chance)
            for child, share in self._guess(node.matches, root, limit)[1]:
                if node.chance * share < self.min_prob:
                    break
                heappush(queue, (-node.chance * share, next(order), node, child, share))
        signals = {"match_length": float(longest), "match_confidence": confidence, "draft_score": score}
        expansion = Expansion(anchor, token, np.log(prob), signals=signals)
        return expansion if len(token) <= request.max_nodes else best_paths(expansion, request)

    def _take_in(self, tokens: list[int]) -> None:
        self._text.extend(tokens)
        if self.global_tokens:
            for token in tokens:
                self._earlier_match = self._earlier.index.step(self._earlier_match, token)

    def _step(self, matches: tuple[Match, Match], token: int) -> tuple[Match, Match]:
        own, earlier = matches
        if self.global_tokens:
            earlier = self._earlier.index.step(earlier, token)
        return self._text.step(own, token), earlier

    def _requested(self, request: DraftRequest) -> tuple[list[_Node], dict[tuple[int, int], int]]:
        """The requested nodes, and the rows of their paths below the root by parent and token."""
        tree = request.tree
        token, parent, depth = tree.token.tolist(), tree.parent.tolist(), tree.depth.tolist()
        matches = {0: self._step((self._text.end, self._earlier_match), token[0])}
        nodes = []
        for row in request.positions.tolist():
            path, at = [], row
            while at not in matches:
                path.append(at)
                at = parent[at]
            for at in reversed(path):
                matches[at] = self._step(matches[parent[at]], token[at])
            if depth[row] < request.max_depth:
                nodes.append(_Node(row, row, depth[row], matches[row]))
        return nodes, {(parent[row], token[row]): row for row in matches if row}

    def _guess(self, matches: tuple[Match, Match], root: int, limit: int) -> tuple[int, list[tuple[int, float]]]:
        """The length of the match, and the `limit` most probable tokens; of equally probable ones the smallest."""
        own, earlier = matches
        num_contexts = _NUM_CONTEXTS if self.interpolate else 1
        contexts = self._text.contexts(own, num_contexts, _WIDEST, beyond=root)
        if self.global_tokens:
            others = self._earlier.index.contexts(earlier, num_contexts, _WIDEST)
            if others and (not contexts or others[0][0] > contexts[0][0]):
                contexts = others
        if not contexts:
            return 0, []
        probs: dict[int, float] = {}
        left = 1.0
        for _, total, counts in contexts:
            kinds = len(counts) if self.interpolate else 0
            share = left / (total + kinds)
            for token, count in counts.items():
                probs[token] = probs.get(token, 0.0) + share * count
            left = share * kinds
        best = sorted([(-prob, token) for token, prob in probs.items()])[:limit]
        return contexts[0][0], [(token, -minus) for minus, token in best]
