"""Verification: which drafted tokens the target accepts."""

from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np

from treegraft.errors import InvariantError
from treegraft.interfaces import Verdict, Verifier
from treegraft.sampling import Scores, TokenSampler
from treegraft.tree import DraftTree, Floats


class MatchVerifier(Verifier):
    """Draw the target's own token after each visited node and follow the child that carries it.

    Lossless for any tree that was built without sight of the draw, whatever drafters, merging and pruning made it, and
    it needs no draft probabilities. Also optimal: the expected number of accepted tokens is the sum over nodes of the
    target's probability of their path. The last token drawn, which no child carries, is emitted as the bonus.
    """

    lossless: ClassVar[bool] = True
    accepts: ClassVar[frozenset[str]] = frozenset({"deterministic"})
    repeats_plain: ClassVar[bool] = True

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


class BlockVerifier(Verifier):
    """Judge a chain that was drawn at random as a whole: accept its longest part that the target could have drawn.

    Each token of the chain comes with the distribution it was drawn from, so that a token which the target likes less
    than the drafter does is accepted in proportion, and one that it likes more for certain. Of all rules for a drawn
    chain the one that accepts most; at high temperature that is more than `match` accepts of the most probable chain.
    Where a logits processor reads the text, which can then not be judged ahead, each token is judged by itself.

    Lossless where nothing that was drawn decides what is verified. Sampled text is not plain decoding's with the same
    seed: the verifier draws for itself.

    Source: Sun et al., "Block Verification Accelerates Speculative Decoding" (2024), algorithm 2; token by token
    Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023), algorithm 1.
    """

    lossless: ClassVar[bool] = True
    accepts: ClassVar[frozenset[str]] = frozenset({"sampled"})

    def verify(self, tree: DraftTree, scores: Scores, sampler: TokenSampler) -> Verdict:
        tokens, draft_probs = _drawn_chain(tree)
        judge = _as_a_block if sampler.rules.stateless else _token_by_token
        judged = judge(tokens, draft_probs, sampler)
        rows, row = np.arange(1, len(tree), dtype=np.int32), 0
        while (residual := next(judged)) is None:
            sampler.emit(row, tokens[row])
            row += 1
            if sampler.stop_reason is not None:
                return Verdict(rows[:row], bonus_token=None, stop_reason=sampler.stop_reason)
        bonus_token = sampler.stream.draw(residual)
        sampler.emit(row, bonus_token)
        return Verdict(rows[:row], bonus_token, sampler.stop_reason)


def _drawn_chain(tree: DraftTree) -> tuple[list[int], Floats]:
    """The tokens [L] of a chain, and the distributions [L, V] that they were drawn from."""
    size = len(tree) - 1
    if not np.array_equal(tree.parent[1:], np.arange(size)) or (tree.draft_row[1:] < 0).any():
        raise InvariantError(
            "BlockVerifier", f"a tree of {size} nodes that is not a chain of drawn tokens",
            "Allowed: a chain, each token with the distribution it was drawn from.",
            "Take a drafter of sampled chains, or the verifier match.",
        )  # fmt: skip
    return tree.token[1:].tolist(), np.zeros((0, 0)) if size == 0 else tree.draft_probs[tree.draft_row[1:]]


Judged = Iterator[Floats | None]
"""For each place of a chain None where its token is accepted; in the end what the bonus token is drawn from, [V]."""


def _as_a_block(tokens: Sequence[int], draft_probs: Floats, sampler: TokenSampler) -> Judged:
    size = len(tokens)
    target_probs = sampler.probs(range(size + 1))
    share = [1.0]  # by tokens accepted, the part of the drafter's probability of the chain that the target backs
    for target, draft, token in zip(target_probs, draft_probs, tokens, strict=False):
        share.append(min(1.0, share[-1] * float(target[token] / draft[token])))

    def excess(place: int) -> Floats:
        return _excess(share[place], target_probs[place], draft_probs[place])

    num_accepted = size
    while num_accepted > 0:
        prob = share[num_accepted]
        if num_accepted < size and 0.0 < prob < 1.0:
            mass = float(excess(num_accepted).sum())
            prob = mass / (mass + 1.0 - prob)
        if sampler.stream.happens(prob):
            break
        num_accepted -= 1
    yield from [None] * num_accepted
    target = target_probs[num_accepted]
    yield target if num_accepted == size else _bonus_probs(excess(num_accepted), target)


def _token_by_token(tokens: Sequence[int], draft_probs: Floats, sampler: TokenSampler) -> Judged:
    for row, (token, draft) in enumerate(zip(tokens, draft_probs, strict=True)):
        (target,) = sampler.probs([row])
        if not sampler.stream.happens(min(1.0, float(target[token] / draft[token]))):
            yield _bonus_probs(_excess(1.0, target, draft), target)
        yield None
    yield sampler.probs([len(tokens)])[0]


def _excess(share: float, target: Floats, draft: Floats) -> Floats:
    """What `share` of the target's distribution [V] holds beyond the drafter's [V]."""
    excess: Floats = np.maximum(share * target - draft, 0.0)
    return excess


def _bonus_probs(excess: Floats, target: Floats) -> Floats:
    """The excess, or the target's own distribution where the two are equal and rounding alone refused the token."""
    return excess if excess.any() else target
