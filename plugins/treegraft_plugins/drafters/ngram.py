"""Drafting from the request's own text: what followed the last few tokens before, and what the target then expected."""

import math
from typing import Literal

import attrs
import numpy as np

from treegraft.interfaces import Drafter, DraftRequest, Observation, Wants
from treegraft.tree import Expansion, Floats, Ints
from treegraft_plugins.drafters.ngram_index import NGramIndex, TopTokens
from treegraft_plugins.options import number, one_of, switch, whole

# The part of a match's weight that goes to the token which followed it; the rest goes to the target's distribution.
_COPIED = {"mix": 0.5, "copy": 1.0, "top_tokens": 0.0}
_BETWEEN_REQUESTS = -1  # no token: nothing matches across it, and nothing is copied beyond it


@attrs.frozen
class _Node:
    """A node to draft below, and where its last tokens occurred before.

    Attributes:
        row: its row in the tree.
        path: tokens from the root to the node.
        found: where its last 1, 2, ... tokens occurred last.
        weights: by position, how much the match that ends there counts.
    """

    row: int
    path: list[int]
    found: list[int]
    weights: dict[int, float]


@attrs.define(eq=False, kw_only=True)
class NGramDrafter(Drafter):
    """Looks up the last tokens of a node's path in the text so far; no training and no forward.

    Longer matches count more and shorter ones are interpolated: match j (from 0, the most recent) of length n weighs
    2^-(N - n) / (j + 1), over the best `max_matches`, normalised. Half of a match's weight goes to the token that
    followed it, half to the target's own distribution there, kept from the forward that verified it.

    In every call the longest match, of several the deepest node's, is copied further as a chain. A chain may run into
    the tokens it has just copied, so that a loop goes on. Its tokens are scored as if that match were the only one.

    Args:
        max_n: N, the longest match looked for.
        num_top: tokens of the target's distribution kept for each position.
        max_matches: most matches that share in one node's proposals.
        mode: "mix"; "copy" puts all weight on the tokens that followed, "top_tokens" on the target's distributions.
        chain_factor: a match of length l is copied for up to floor(chain_factor * l) tokens beyond the first; 0 for
            one token a step.
        chain_max: most tokens beyond the first, whatever the length.
        fallback: back off to the last token alone; without, only two or more tokens make a match.
        shared: draft from the text of earlier requests too, which is kept and grows without limit.

    Source: TreeGraft (n-gram drafter); Token Recycling (fallback); prompt lookup decoding (chains).
    """

    max_n: int = attrs.field(default=4, validator=whole(1))
    num_top: int = attrs.field(default=10, validator=whole(1))
    max_matches: int = attrs.field(default=8, validator=whole(1))
    mode: Literal["mix", "copy", "top_tokens"] = attrs.field(default="mix", validator=one_of(*_COPIED))
    chain_factor: float = attrs.field(default=4.0, validator=number(0))
    chain_max: int = attrs.field(default=16, validator=whole(0))
    fallback: bool = attrs.field(default=True, validator=switch)
    shared: bool = attrs.field(default=False, validator=switch)
    wants: Wants = attrs.field(init=False)
    _index: NGramIndex = attrs.field(init=False)
    _top: TopTokens = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        if self.max_n == 1 and not self.fallback:
            raise ValueError("max_n: got 1 with fallback off, which matches nothing; allowed: an int >= 2 with it off.")
        self.wants = Wants(num_top=self.num_top if self.mode != "copy" else 0)
        options = (self.max_n, self.num_top, self.max_matches, self.mode, self.chain_factor, self.chain_max)
        self.identity = f"ngram {options}"
        self._forget()

    def start(self, observation: Observation) -> None:
        if self.shared:
            self._index.extend([_BETWEEN_REQUESTS])
            self._top.extend(1, None, None)
        else:
            self._forget()
        self.observe(observation)

    def observe(self, observation: Observation) -> None:
        self._index.extend(observation.tokens.tolist())
        self._top.extend(len(observation.tokens), observation.top_ids, observation.top_log_probs)

    def stop(self) -> None:
        if not self.shared:
            self._forget()

    def draft(self, request: DraftRequest) -> Expansion:
        nodes = self._lookups(request)
        if not nodes:
            return Expansion.empty({"match_length": 0.0, "match_confidence": 0.0})
        rows = np.array([node.row for node in nodes])
        which, token, prob = self._followers(nodes, request.branching)
        anchor = rows[which]
        longest = max(nodes, key=lambda node: (len(node.found), len(node.path)))
        signals = {"match_length": float(len(longest.found)), "match_confidence": float(prob.max(initial=0.0))}

        copied, copied_prob = self._copied(longest, request.max_depth)
        head = np.flatnonzero((anchor == longest.row) & (token == copied[0])) if len(copied) > 1 else ()
        if len(head):
            chain = _chain(request, longest.row, int(head[0]), copied, anchor, token)
            above, places = np.array(chain, np.int64).reshape(-1, 2).T
            anchor, token = np.concatenate([anchor, ~above]), np.concatenate([token, copied[places]])
            prob = np.concatenate([prob, copied_prob[places]])
        expansion = Expansion(anchor, token, np.log(prob), signals=signals)
        return expansion if len(expansion) <= request.max_nodes else best_paths(expansion, request)

    def _lookups(self, request: DraftRequest) -> list[_Node]:
        """The requested nodes whose last tokens occurred before."""
        parent, token = request.tree.parent.tolist(), request.tree.token.tolist()
        before_root = request.committed[-self.max_n : -1].tolist()
        nodes = []
        for row in request.positions.tolist():
            path, above = [], row
            while above >= 0:
                path.append(token[above])
                above = parent[above]
            path.reverse()
            found = self._index.last_occurrences((before_root + path)[-self.max_n :])
            if len(found) >= self._shortest and len(path) <= request.max_depth:
                nodes.append(_Node(row, path, found, self._matches(found)))
        return nodes

    @property
    def _shortest(self) -> int:
        """The length of the shortest match that counts."""
        return 1 if self.fallback else 2

    def _matches(self, found: list[int]) -> dict[int, float]:
        """By position, the weights of the best matches, normalised."""
        max_n, earlier = self.max_n, self._index.earlier
        weights: dict[int, float] = {}
        total, room = 0.0, self.max_matches
        for n in range(len(found), self._shortest - 1, -1):
            position, of_length, rank = found[n - 1], 2.0 ** (n - max_n), 1
            while position >= 0 and room:
                weights[position] = weights.get(position, 0.0) + of_length / rank
                total += of_length / rank
                rank, room = rank + 1, room - 1
                position = earlier[position * max_n + n - 1]
        return {position: weight / total for position, weight in weights.items()}

    def _followers(self, nodes: list[_Node], limit: int) -> tuple[Ints, Ints, Floats]:
        """The most probable tokens after each node: its index in `nodes`, token and probability [E], best first."""
        text, share = self._index.tokens, _COPIED[self.mode]
        matches = [(index, node, position) for index, node in enumerate(nodes) for position in node.weights]
        weight = np.array([weight for node in nodes for weight in node.weights.values()])[:, None]
        ids, probs = self._top.after([position for _, _, position in matches])
        # What follows the last position that the target has seen is the root.
        after = [text[at + 1] if at + 1 < len(text) else node.path[0] for _, node, at in matches]
        copied = np.array(after, np.int64)[:, None]
        return _best_of_each(
            node=np.array([index for index, _, _ in matches]),
            token=np.concatenate([np.maximum(copied, 0), ids], axis=1),
            mass=weight * np.concatenate([share * (copied != _BETWEEN_REQUESTS), (1 - share) * probs], axis=1),
            limit=limit,
        )

    def _copied(self, node: _Node, max_depth: int) -> tuple[Ints, Floats]:
        """The tokens that followed a node's longest match, and their probabilities by that match alone [L]."""
        text, share, begin = self._index.tokens, _COPIED[self.mode], node.found[-1]
        beyond = min(math.floor(self.chain_factor * len(node.found)), self.chain_max, max_depth - len(node.path))
        after_text = list(node.path)  # the root, the path, and then the copy itself
        copied: list[int] = []
        for at in range(begin + 1, begin + 2 + beyond):
            token = text[at] if at < len(text) else after_text[at - len(text)]
            if token == _BETWEEN_REQUESTS:
                break
            after_text.append(token)
            copied.append(token)
        tokens = np.array(copied, np.int64)
        ids, probs = self._top.after(range(begin, min(begin + len(copied), len(text))))
        expected = np.where(ids == tokens[: len(ids), None], probs, 0.0).sum(axis=1)
        # Where the copy has overtaken the text, the last probability known has to do.
        prob = share + (1 - share) * expected[np.minimum(np.arange(len(tokens)), len(expected) - 1)]
        end = np.cumprod(prob > 0).sum()
        return tokens[:end], np.minimum(prob[:end], 1.0)

    def _forget(self) -> None:
        self._index = NGramIndex(self.max_n)
        self._top = TopTokens(self.num_top)


def _chain(
    request: DraftRequest, row: int, head: int, copied: Ints, anchor: Ints, token: Ints
) -> list[tuple[int, int]]:
    """The rest of a copy below the proposal `head` that begins it: (proposal above, place in `copied`) of each link.

    A link that a requested node of the tree proposes by itself is passed through, not proposed again.
    """
    at = request.tree.child(row, int(copied[0]))
    chain: list[tuple[int, int]] = []
    link = head
    for place in range(1, len(copied)):
        known = np.flatnonzero((anchor == at) & (token == copied[place])) if at is not None else ()
        if len(known):
            link = int(known[0])
        else:
            chain.append((link, place))
            link = len(token) + len(chain) - 1
        at = request.tree.child(at, int(copied[place])) if at is not None else None
    return chain


def _best_of_each(node: Ints, token: Ints, mass: Floats, limit: int) -> tuple[Ints, Ints, Floats]:
    """Add up the mass of equal tokens and keep the best tokens of each node.

    Args:
        node: [M], the node that each row belongs to, ascending.
        token: [M, C].
        mass: [M, C].
        limit: most tokens of one node.

    Returns:
        node, token and probability [E], by node, then best first; of equals the smallest token.
    """
    key = ((node << 32)[:, None] + token).ravel()
    order = key.argsort(kind="stable")
    key = key[order]
    starts = np.flatnonzero(np.diff(key, prepend=-1))
    node, token = np.divmod(key[starts], 1 << 32)
    prob = np.minimum(np.add.reduceat(mass.ravel()[order], starts), 1.0)
    best = np.argsort(2 * node - prob, kind="stable")  # one key for both: by node, then by falling probability
    place = np.arange(len(best)) - np.searchsorted(node, node)  # `node` ascends already, and `best` keeps it so
    best = best[(place < limit) & (prob[best] > 0)]
    return node[best], token[best], prob[best]


def best_paths(expansion: Expansion, request: DraftRequest) -> Expansion:
    """The part of an expansion that a request has room for: the proposals with the best path scores.

    One below another proposal counts from that one's score, also where the tree holds the same node with its own.
    """
    scores: list[float] = []
    for anchor, log_prob in zip(expansion.anchor.tolist(), expansion.log_prob.tolist(), strict=True):
        scores.append((request.tree.path_score[anchor] if anchor >= 0 else scores[~anchor]) + log_prob)
    # A stable sort: of equal paths the shorter one comes first, so that what is kept hangs together.
    kept = np.sort(np.argsort(-np.array(scores), kind="stable")[: request.max_nodes])
    index = np.zeros(len(expansion), np.int64)
    index[kept] = np.arange(len(kept))
    anchor = expansion.anchor[kept]
    anchor = np.where(anchor >= 0, anchor, ~index[np.where(anchor < 0, ~anchor, 0)])
    return Expansion(anchor, expansion.token[kept], expansion.log_prob[kept], signals=expansion.signals)
