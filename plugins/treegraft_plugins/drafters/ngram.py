"""Drafting from the request's own text: what followed the last few tokens before, and what the target then expected."""

import math
from typing import Literal

import attrs
import numpy as np

from treegraft.interfaces import Drafter, DraftRequest, Observation, Wants
from treegraft.tree import Expansion
from treegraft_plugins.drafters.ngram_index import NGramIndex, TopTokens
from treegraft_plugins.options import number, one_of, switch, whole

# The part of a match's weight that goes to the token which followed it; the rest goes to the target's distribution.
_COPIED = {"mix": 0.5, "copy": 1.0, "top_tokens": 0.0}
Proposal = tuple[int, int, float]  # anchor as an `Expansion` has it, token, probability
_BETWEEN_REQUESTS = -1  # no token: nothing matches across it, and nothing is copied beyond it


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
        fallback: where matches leave room below a node, add the tokens that the target last expected after its token.
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
        self.wants = Wants(num_top=self.num_top if self.fallback or self.mode != "copy" else 0)
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
        parent, token = request.tree.parent.tolist(), request.tree.token.tolist()
        before_root = request.committed[-self.max_n : -1].tolist()
        proposals: list[Proposal] = []
        longest: _Match | None = None
        for row in request.positions.tolist():
            path = _path(row, parent, token)
            if len(path) > request.max_depth:
                continue
            found = self._index.last_occurrences((before_root + path)[-self.max_n :])
            followers = self._followers(found, path, request.branching)
            if followers and (longest is None or (len(found), len(path)) > (longest.length, len(longest.path))):
                longest = _Match(row, path, len(found), found[-1])
            proposals += [(row, follower, prob) for follower, prob in followers]
        if longest is None:
            return Expansion.empty({"match_length": 0.0, "match_confidence": 0.0})
        confidence = max(prob for _, _, prob in proposals)
        proposals += self._chain(longest, proposals, request.max_depth)
        return _expansion(proposals, request, {"match_length": longest.length, "match_confidence": confidence})

    def _chain(self, match: "_Match", proposals: list[Proposal], max_depth: int) -> list[Proposal]:
        """What followed the match, copied further below the proposal that it made."""
        further = min(math.floor(self.chain_factor * match.length), self.chain_max, max_depth - len(match.path))
        copied = self._copied(match, further + 1) if further > 0 else []
        first = copied[0][0] if copied else None
        heads = [index for index, proposal in enumerate(proposals) if proposal[:2] == (match.row, first)]
        if not heads:
            return []
        anchors = [heads[0], *range(len(proposals), len(proposals) + len(copied) - 2)]
        return [(~anchor, token, prob) for anchor, (token, prob) in zip(anchors, copied[1:], strict=True)]

    def _copied(self, match: "_Match", length: int) -> list[tuple[int, float]]:
        """At most `length` tokens that followed the match, with their probabilities by that match alone."""
        text, share, cached = self._index.tokens, _COPIED[self.mode], 0.0
        after_text = list(match.path)  # the root, the path, and then the copy itself
        copied = []
        for source in range(match.position, match.position + length):
            ahead = source + 1 - len(text)
            token = text[ahead] if ahead < 0 else after_text[ahead]
            if share < 1 and source < len(text):  # beyond, the last known probability has to do
                cached = dict(self._top.after(source)).get(token, 0.0)
            prob = share + (1 - share) * cached
            if token == _BETWEEN_REQUESTS or prob <= 0:
                break
            after_text.append(token)
            copied.append((token, min(prob, 1.0)))
        return copied

    def _followers(self, found: list[int], path: list[int], limit: int) -> list[tuple[int, float]]:
        """The most probable tokens after a node and their probabilities, best first.

        Args:
            found: where the last 1, 2, ... tokens of the path occurred last.
            path: tokens from the root to the node.
            limit: most tokens.
        """
        text, share = self._index.tokens, _COPIED[self.mode]
        mass: dict[int, float] = {}
        for position, weight in self._matches(found).items():
            # What follows the last position that the target has seen is the root.
            follower = text[position + 1] if position + 1 < len(text) else path[0]
            if share and follower != _BETWEEN_REQUESTS:
                mass[follower] = mass.get(follower, 0.0) + weight * share
            if share < 1:
                weight *= 1 - share
                for follower, prob in self._top.after(position):
                    mass[follower] = mass.get(follower, 0.0) + weight * prob
        if self.fallback and found and len(mass) < limit:
            for follower, prob in self._top.after(found[0]):
                if follower not in mass:
                    mass[follower] = prob * 2.0**-self.max_n
        best = sorted(mass, key=mass.__getitem__, reverse=True)[:limit]
        return [(follower, min(mass[follower], 1.0)) for follower in best if mass[follower] > 0]

    def _matches(self, found: list[int]) -> dict[int, float]:
        """The weight of every position at which one of the best matches ends, normalised; the best match first."""
        max_n, earlier = self.max_n, self._index.earlier
        weights: dict[int, float] = {}
        total, room = 0.0, self.max_matches
        for n in range(len(found), 0, -1):
            position, of_length, rank = found[n - 1], 2.0 ** (n - max_n), 1
            while position >= 0 and room:
                weights[position] = weights.get(position, 0.0) + of_length / rank
                total += of_length / rank
                rank, room = rank + 1, room - 1
                position = earlier[position * max_n + n - 1]
        return {position: weight / total for position, weight in weights.items()}

    def _forget(self) -> None:
        self._index = NGramIndex(self.max_n)
        self._top = TopTokens(self.num_top)


def _path(row: int, parent: list[int], token: list[int]) -> list[int]:
    """Tokens from the root down to `row`."""
    path = []
    while row >= 0:
        path.append(token[row])
        row = parent[row]
    return path[::-1]


def _expansion(proposals: list[Proposal], request: DraftRequest, signals: dict[str, float]) -> Expansion:
    """The proposals as an expansion; of more than the request allows, those on the best paths."""
    anchors, tokens, probs = zip(*proposals, strict=True)
    log_probs = [math.log(prob) for prob in probs]
    if len(proposals) > request.max_nodes:
        scores: list[float] = []
        for anchor, log_prob in zip(anchors, log_probs, strict=True):
            scores.append((request.tree.path_score[anchor] if anchor >= 0 else scores[~anchor]) + log_prob)
        # A stable sort: of equal paths the shorter one comes first, so that what is kept hangs together.
        kept = np.sort(np.argsort(-np.array(scores), kind="stable")[: request.max_nodes]).tolist()
        index = {old: new for new, old in enumerate(kept)}
        anchors = [anchors[old] if anchors[old] >= 0 else ~index[~anchors[old]] for old in kept]
        tokens, log_probs = [tokens[old] for old in kept], [log_probs[old] for old in kept]
    return Expansion(anchors, tokens, log_probs, signals=signals)


@attrs.frozen
class _Match:
    """Where a node's last tokens occurred before.

    Attributes:
        row: the node.
        path: tokens from the root to the node.
        length: how many of the last tokens match.
        position: where the match ends in the text.
    """

    row: int
    path: list[int]
    length: int
    position: int
