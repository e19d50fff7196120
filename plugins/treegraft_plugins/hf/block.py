"""What the drafters share that read the target's hidden states and say in one pass what stands at the next places."""

from collections.abc import Mapping, Sequence

import attrs
import torch
from torch.nn.functional import normalize

from treegraft.errors import ModelError
from treegraft.interfaces import Observation, TargetModel
from treegraft.tree import Floats, Ints

_LEAST_LOG_PROB = -1e4  # (nats) stands for impossible, so that scores stay finite

SIGNALS = ("mean_top1", "chain_prob", "entropy", "adjacent_cosine", "repeated_argmax", "effective_rank")
"""What an expansion of such a drafter says about itself; see `Marginals.of`."""


@attrs.frozen(eq=False)
class Marginals:
    """What one pass says: the distribution at each of the next places, whatever stands between.

    Attributes:
        log_probs: float32 [L, V] (nats), on the network's device.
        signals: how sure the pass is of itself, by name.
    """

    log_probs: torch.Tensor
    signals: Mapping[str, float]

    @classmethod
    def of(cls, logits: torch.Tensor, hidden: torch.Tensor, where: str) -> "Marginals":
        """From `logits` [L, V] and the hidden states [L, h] that they were made of.

        Signals: `mean_top1` and `chain_prob`, the mean and the product of the best tokens' probabilities; `entropy`,
        the mean over the places (nats); `adjacent_cosine`, the mean cosine of neighbouring hidden states;
        `repeated_argmax`, the share of places whose best token is the one before; `effective_rank`, the exponential
        of the entropy of the normalised hidden states' squared singular values, from 1 to L.

        Raises:
            ModelError: a logit is not a number.

        Source: GRAFT (SABA), "draft confidence" and "representation degeneration".
        """
        log_probs = logits.float().log_softmax(-1)
        best, tokens = log_probs.max(-1)
        if bool(best.isnan().any()):
            raise ModelError(where, "NaN among its logits", "Allowed: finite logits.", "Try dtype=float32.")
        entropy = -(log_probs.exp() * log_probs.clamp(min=_LEAST_LOG_PROB)).sum(-1).mean()
        directions = normalize(hidden.float(), dim=-1)
        cosines = (directions @ directions.T).double()
        shares = (torch.linalg.eigvalsh(cosines.cpu()) / len(cosines)).clamp(min=1e-12)
        pairs = max(len(tokens) - 1, 1)
        values = torch.stack([
            best.exp().mean(), best.sum().exp(), entropy, cosines.diagonal(1).sum() / pairs,
            (tokens[1:] == tokens[:-1]).sum() / pairs,
        ]).tolist()  # fmt: skip
        rank = float((-(shares * shares.log()).sum()).exp())
        return cls(log_probs, dict(zip(SIGNALS, (*values, rank), strict=True)))

    def top(self, num_places: int, num_candidates: int) -> tuple[Ints, Floats]:
        """The best K tokens of the first L places: int64 [L, K], and float64 [L, K] (nats), rows descending."""
        best = self.log_probs[:num_places].topk(min(num_candidates, self.log_probs.shape[1]), dim=-1)
        return best.indices.cpu().numpy(), best.values.double().clamp(_LEAST_LOG_PROB, 0.0).cpu().numpy()


def hidden_of(observation: Observation, where: str) -> torch.Tensor | None:
    """The observed hidden states [T, layers, h], None of no tokens.

    Raises:
        ModelError: the target did not give them.
    """
    if not len(observation.tokens):
        return None
    if observation.hidden is None:
        raise ModelError(where, "a target that gives no hidden states", "Allowed: targets whose `score` gives them.")
    return observation.hidden


def check_target(
    target: TargetModel, where: str, *, num_layers: int, hidden_size: int, vocab_size: int, tokens: Sequence[int] = ()
) -> None:
    """Refuse a target that a drafter was not made for, and one that does not lend its embedding and head.

    Args:
        target: the target.
        where: which drafter.
        num_layers, hidden_size, vocab_size: of the target that it was made for.
        tokens: ids that it embeds beside the target's own text.

    Raises:
        ModelError: naming every mismatch.
    """
    try:
        embedded = target.embed(torch.zeros(1, dtype=torch.int64))
        target.head(embedded)
    except NotImplementedError as error:
        raise ModelError(where, str(error), "Allowed: targets that lend their embedding and head.") from error
    made_for = {"layers": num_layers, "hidden size": hidden_size, "vocabulary": vocab_size}
    found = {"layers": target.num_layers, "hidden size": embedded.shape[-1], "vocabulary": target.vocab_size}
    differing = [f"{name} {made_for[name]} for {found[name]}" for name in made_for if made_for[name] != found[name]]
    differing += [f"mask token {token} beyond the vocabulary" for token in tokens if token >= target.vocab_size]
    if differing:
        raise ModelError(
            where, f"a drafter made for another target ({', '.join(differing)})",
            "Allowed: the target that it was trained for.", "Name the drafter of this target, or its target.",
        )  # fmt: skip
