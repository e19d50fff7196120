"""What edge scorers learn from traces: a table of pairs by counting, two towers by three losses."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from torch import nn
from torch.nn.functional import softplus

from treegraft.interfaces import TargetModel
from treegraft_plugins.blocktree.distil.traces import Traces
from treegraft_plugins.blocktree.edges import BigramTable, embeddings
from treegraft_plugins.fitted import Arrays, Header, save
from treegraft_plugins.options import number, whole

MAX_PAIRS = 200_000
_NEVER = -1e9  # (nats) finite, so that a lone candidate leaves no NaN behind
_CHUNK = 65_536  # parents whose candidates are counted at a time


def fit_bigram(traces: Traces, vocab_size: int, prior: float = 1.0) -> BigramTable:
    """How often the target follows one token by another, from its distributions under drafted parents.

    Args:
        traces: N parents.
        vocab_size: V.
        prior: (counts) how much is assumed of every parent beforehand: that what follows is what follows any.
    """
    codes, counts = np.zeros(0, np.int64), np.zeros(0)
    for first in range(0, len(traces), _CHUNK):
        rows = np.arange(first, min(first + _CHUNK, len(traces)))
        tokens, _ = traces.candidates(rows)
        new = (traces.parent[rows, None] * vocab_size + tokens).ravel()
        seen = (traces.weight[rows, None] * np.exp(traces.target_log_prob[rows])).ravel()
        codes, where = np.unique(np.concatenate([codes, new]), return_inverse=True)
        counts = np.bincount(where, np.concatenate([counts, seen]))
    child = np.bincount(codes % vocab_size, counts, vocab_size)
    gain = np.log1p(counts / (prior * child[codes % vocab_size] / child.sum() + 1e-12))
    kept = np.sort(np.argsort(-counts, kind="stable")[:MAX_PAIRS])
    return BigramTable(codes[kept], gain[kept].astype(np.float32), vocab_size)


class TowersNetwork(nn.Module):
    """The two towers as they are trained; `Towers` is what becomes of them.

    Args:
        width: h, of the target's embeddings.
        places: D, depths with a weight of their own.
        rank: r.
        header: of the weights.
    """

    def __init__(self, width: int, places: int, rank: int, header: Header):
        super().__init__()
        self.parent = nn.Parameter(torch.randn(rank, width) / width**0.5)
        self.child = nn.Parameter(0.1 * torch.randn(rank, width) / width**0.5)  # compatibilities begin small
        self.depth = nn.Parameter(torch.ones(places, 1, rank))
        self.header = dict(header)

    def forward(self, place: torch.Tensor, parent: torch.Tensor, children: torch.Tensor) -> torch.Tensor:
        """Compatibility [B, K] of embedded `children` [B, K, h] under embedded `parent` [B, h] at `place` [B]."""
        up = (parent @ self.parent.T) * self.depth[place, 0]
        compatibility: torch.Tensor = ((children @ self.child.T) @ up[:, :, None])[..., 0] / len(self.parent) ** 0.5
        return compatibility

    def arrays(self) -> Arrays:
        """What a file of weights holds."""
        return {name: parameter.detach().cpu().to(torch.float16).numpy() for name, parameter in self.named_parameters()}

    def save_pretrained(self, folder: Path) -> None:
        """Write the weights, under the name that the finished ones will have."""
        save(Path(folder) / TDES_FILE, self.arrays(), self.header)


TDES_FILE, BIGRAM_FILE = "tdes.safetensors", "bigram.safetensors"


@attrs.frozen(kw_only=True)
class Distillation:
    """What the towers are taught, and by how much of each.

    Args:
        rank: r.
        batch: parents a step.
        distribution: weight of the divergence from the target's distribution over the candidates.
        pairwise: weight of the target's next token against each other candidate, by the drafter's probability of that.
        edge: weight of the target's next token under each parent.

    Source: GRAFT (TDES), which names the three losses; their form is treegraft's own.
    """

    rank: int = attrs.field(default=64, validator=whole(1))
    batch: int = attrs.field(default=256, validator=whole(1))
    distribution: float = attrs.field(default=1.0, validator=number(0.0))
    pairwise: float = attrs.field(default=0.5, validator=number(0.0))
    edge: float = attrs.field(default=0.5, validator=number(0.0))

    def loss(self, compatibility: torch.Tensor, batch: "Batch") -> torch.Tensor:
        """The weighted mean of the losses (nats)."""
        losses = batch.losses(compatibility)
        weights = torch.tensor([self.distribution, self.pairwise, self.edge])
        return (losses * weights).sum()


@attrs.frozen(eq=False)
class Batch:
    """B parents as tensors.

    Attributes:
        place: int64 [B]; parent: [B, h] and children: [B, K, h], embedded.
        log_prob, target_log_prob: float32 [B, K] (nats).
        next_column: int64 [B], where the target's next token stands among the candidates, -1 if it does not.
        weight: float32 [B].
    """

    place: torch.Tensor
    parent: torch.Tensor
    children: torch.Tensor
    log_prob: torch.Tensor
    target_log_prob: torch.Tensor
    next_column: torch.Tensor
    weight: torch.Tensor

    def losses(self, compatibility: torch.Tensor) -> torch.Tensor:
        """[3]: distribution, pairwise and edge loss (nats), weighted means over the parents.

        All are of the distribution over the candidates that the edge scores give at beta = 1. What the target says
        beyond the candidates is left out: a parent counts in the first by the mass that it has on them, and in the
        others only where the target's next token is one of them.
        """
        scored = (self.log_prob + compatibility).log_softmax(-1)
        wanted = self.target_log_prob.log_softmax(-1)
        divergence = (wanted.exp() * (wanted - scored)).sum(-1)
        mass = self.weight * self.target_log_prob.exp().sum(-1)
        known = self.next_column >= 0
        column = self.next_column.clamp(min=0)[:, None]
        others = self.log_prob.scatter(1, column, _NEVER).softmax(-1)
        rival = softplus(compatibility - compatibility.gather(1, column))
        pairwise = (others * rival).sum(-1)
        edge = -scored.gather(1, column)[:, 0]
        counted = self.weight * known
        return torch.stack(
            [
                (mass * divergence).sum() / mass.sum().clamp(min=1e-6),
                (counted * pairwise).sum() / counted.sum().clamp(min=1e-6),
                (counted * edge).sum() / counted.sum().clamp(min=1e-6),
            ]
        )

    def agreement(self, compatibility: torch.Tensor) -> float:
        """Share of the parents whose best candidate is the target's next token, of those that have it."""
        known = self.next_column >= 0
        hit = (self.log_prob + compatibility).argmax(-1) == self.next_column
        return float(hit[known].float().mean()) if known.any() else 0.0


@attrs.frozen(eq=False)
class Pupil:
    """Traces beside the embeddings that the towers read.

    Attributes:
        traces: N parents.
        embedded: float32 [V, h].
    """

    traces: Traces
    embedded: torch.Tensor

    @classmethod
    def of(cls, traces: Traces, target: TargetModel) -> "Pupil":
        return cls(traces, torch.from_numpy(embeddings(target, np.arange(target.vocab_size))))

    def batch(self, rows: Any) -> Batch:
        """The parents `rows` [B]."""
        traces = self.traces
        tokens, log_prob = traces.candidates(rows)
        hit = tokens == traces.next_token[rows, None]
        next_column = np.where(hit.any(-1), hit.argmax(-1), -1)
        return Batch(
            torch.from_numpy(traces.place[rows]), self.embedded[traces.parent[rows]], self.embedded[tokens],
            torch.from_numpy(log_prob), torch.from_numpy(traces.target_log_prob[rows]), torch.from_numpy(next_column),
            torch.from_numpy(traces.weight[rows]),
        )  # fmt: skip

    def sample(self, rng: np.random.Generator, size: int) -> Batch:
        """Random parents."""
        return self.batch(rng.integers(0, len(self.traces), size))

    @torch.no_grad()
    def measured(self, network: TowersNetwork, most: int = 4096) -> Mapping[str, float]:
        """Losses and agreement over the first `most` parents, with the towers and, for comparison, without."""
        batch = self.batch(np.arange(min(most, len(self.traces))))
        compatibility = network(batch.place, batch.parent, batch.children)
        names = ("distribution", "pairwise", "edge")
        found = dict(zip(names, batch.losses(compatibility).tolist(), strict=True))
        nothing = torch.zeros_like(compatibility)
        before = {f"{name} before": value for name, value in zip(names, batch.losses(nothing).tolist(), strict=True)}
        agreement = {"agreement": batch.agreement(compatibility), "agreement before": batch.agreement(nothing)}
        return found | before | agreement
