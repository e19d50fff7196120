"""Verification: which drafted tokens the target accepts."""

from typing import ClassVar

import numpy as np

from treegraft.interfaces import Verdict, Verifier
from treegraft.sampling import Scores, TokenSampler
from treegraft.tree import DraftTree


class MatchVerifier(Verifier):
    """Draw the target's own token after each visited node and follow the child that carries it.

    Lossless for any tree that was built without sight of the draw, whatever drafters, merging and pruning made it, and
    it needs no draft probabilities. Also optimal: the expected number of accepted tokens is the sum over nodes of the
    target's probability of their path. The last token drawn, which no child carries, is emitted as the bonus.
    """

    lossless: ClassVar[bool] = True
    accepts: ClassVar[frozenset[str]] = frozenset({"deterministic"})

    def verify(self, tree: DraftTree, scores: Scores, sampler: TokenSampler) -> Verdict:
        path: list[int] = []
        row = 0
        while True:
            token = sampler.next(row)
            child = tree.child(row, token)
            if child is None:
                return Verdict(np.array(path, np.int32), bonus_token=token, stop_reason=sampler.stop_reason)
            path.append(child)
            if sampler.stop_reason is not None:
                return Verdict(np.array(path, np.int32), bonus_token=None, stop_reason=sampler.stop_reason)
            row = child
