"""An output gone over once more: what the target itself says about every token of it.

The text is given, and the target reads it in plain forwards, without drafters, trees or a rolled-back cache. In exact
arithmetic every token would be the one that the target chooses there. In floating point it need not be where two tokens
are closer than the rounding of the forward that chose: there the gap is small, and at a fault it is not.
"""

from collections.abc import Iterator, Sequence

import attrs
import numpy as np
import torch

from treegraft.errors import RequestError
from treegraft.interfaces import TargetModel
from treegraft.sampling import SamplingRules, Seed, SeededDraws
from treegraft.tree import Ints


@attrs.frozen
class Difference:
    """A token that the target would not have chosen.

    Attributes:
        index: its place among the new tokens, from 0.
        token: the token.
        expected: the target's own choice: the arg-max, or what the seed draws.
        gap: how far it was from being chosen (nats); infinite where it was ruled out. Greedy: log probability of
            `expected` less that of `token`. Sampled: the same with the noise of the draw, see `SeededDraws.gap`.
    """

    index: int
    token: int
    expected: int
    gap: float


def audit(
    target: TargetModel, prompt: Ints, token_ids: Sequence[int], rules: SamplingRules, seed: Seed | None = None
) -> list[Difference]:
    """Every token of an output that is not the target's own choice after the tokens before it.

    Args:
        target: in a precision that can settle the matter, float32 or better.
        prompt: int64 [T], at least one token.
        token_ids: the output, without the prompt.
        rules: the request's; processors are called token by token, with the true prefix, as in decoding.
        seed: the request's; not read where it was greedy.

    Raises:
        RequestError: ids that the target does not have, or more of them than its context holds.
    """
    _check(target, prompt, token_ids)
    tokens = np.concatenate([prompt, np.asarray(token_ids, dtype=np.int64)])
    draws = None if rules.greedy else SeededDraws(seed)
    differences = []
    for index, logits in enumerate(_rows(target, tokens, len(prompt))):
        position = len(prompt) + index
        token = int(tokens[position])
        ids = torch.from_numpy(tokens[:position])[None].to(logits.device)
        scores = rules.process(ids, logits[None])[0]
        expected, gap = _greedy(scores, token) if draws is None else _drawn(scores, token, draws, position)
        if token != expected:
            differences.append(Difference(index, token, expected, gap))
    return differences


def _rows(target: TargetModel, tokens: Ints, start: int) -> Iterator[torch.Tensor]:
    """float32 [V], the logits before each token from `start` on."""
    for scores in target.teacher_force(tokens, start):
        for row in range(len(scores.tensor)):
            yield scores.logits(row)


def _greedy(scores: torch.Tensor, token: int) -> tuple[int, float]:
    best = int(scores.argmax())
    return best, float(scores[best] - scores[token])


def _drawn(scores: torch.Tensor, token: int, draws: SeededDraws, position: int) -> tuple[int, float]:
    probs = scores.double().softmax(-1)
    return draws.choose(probs[None], np.array([position]))[0], draws.gap(probs, position, token)


def _check(target: TargetModel, prompt: Ints, token_ids: Sequence[int]) -> None:
    for token in (*prompt.tolist(), *token_ids):
        if not 0 <= token < target.vocab_size:
            raise RequestError("audit", f"the token {token}", f"The target's are [0, {target.vocab_size}).")
    size = len(prompt) + len(token_ids)
    if not len(prompt):
        raise RequestError("prompt", "no tokens", "Allowed: at least one.")
    if target.max_length is not None and size > target.max_length:
        raise RequestError(
            "audit", f"{size} tokens with the prompt", f"The target's context holds {target.max_length}.",
            "Name the pipeline and prompt that the output came from.",
        )  # fmt: skip
