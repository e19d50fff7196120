"""Edge scorers: how well a child token fits the parent that a one-pass drafter knows nothing of.

A compatibility g(u, v) of a parent u and a child v enters as a factor exp(beta * g) on the drafter's probability, and
each parent's row is scaled so that its total mass stays what it was. What a parent adds to all of its children
therefore cancels, edges stay log probabilities, and the tree of a budget stays the beginning of every larger one.
"""

from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from attrs.validators import instance_of, optional
from numpy.typing import NDArray

from treegraft.errors import ModelError
from treegraft.interfaces import EdgeScorer, Setting, TargetModel
from treegraft.tree import Floats, Ints
from treegraft_plugins.fitted import AUTO, Arrays, Header, Shelf, read_arrays, read_header
from treegraft_plugins.options import number

FORMAT = 1
SHELF = Shelf("weights", Path(__file__).parent / "weights", "treegraft fit edges")


def mass_preserving(log_prob: Floats, compatibility: NDArray[Any], beta: float) -> Floats:
    """Edge scores float64 [L, P, C] (nats, <= 0): log d + beta * g - log sum d exp(beta * g) + log sum d, sums over C.

    Args:
        log_prob: float64 [L, C] (nats), log d.
        compatibility: [L, P, C], g.
        beta: >= 0; 0 leaves log d as it is under every parent.

    Source: GRAFT (TDES); the normalised form of its centred compatibility.
    """
    scores: Floats = log_prob[:, None] + beta * compatibility
    best, before = scores.max(axis=-1), log_prob.max(axis=-1)
    # The exponentials are most of the work, and four times faster in single precision; a sum of them needs no more.
    mass = np.exp((scores - best[..., None]).astype(np.float32)).sum(axis=-1)
    mass_before = np.exp((log_prob - before[:, None]).astype(np.float32)).sum(axis=-1)
    scores += ((before + np.log(mass_before))[:, None] - best - np.log(mass))[..., None]
    return np.minimum(scores, 0.0, out=scores)


def choose(kind: str, weights: str, setting: Setting, source: str) -> tuple[Path | None, str | None]:
    """The file of a scorer's weights, or None and why not.

    Args:
        kind: "tdes" or "bigram".
        weights: "auto", a name of shipped weights or a file.
        setting, source: the pipeline, and the source that is scored for.

    Raises:
        ComposeError: named weights that do not fit.
    """
    found = {"target": setting.target, "drafter": setting.sources[source].model, "vocabulary": setting.vocab_size}

    def unfit(header: Header) -> str | None:
        if (header.get("kind"), header.get("format")) != (kind, FORMAT):
            return f"of {header.get('kind')} in format {header.get('format')}, not of {kind} in format {FORMAT}"
        for name, value in found.items():
            if value is not None and value != header.get(name):
                return f"fitted for {name} {header.get(name)!r}, not {value!r}"
        return None

    return SHELF.choose(weights, unfit)


@attrs.frozen
class IdentityScorer(EdgeScorer):
    """The drafter's own probabilities under every parent: what the other scorers come to at beta = 0."""

    def score(self, parents: Ints, children: Ints, log_prob: Floats) -> Floats:
        return np.broadcast_to(log_prob[:, None], (*parents.shape, log_prob.shape[1]))


@attrs.frozen(eq=False)
class CompatibilityScorer(EdgeScorer):
    """The drafter's probabilities times exp(beta * g), by a table of g: what fitted scorers come to."""

    table: "BigramTable | Towers"
    beta: float

    def score(self, parents: Ints, children: Ints, log_prob: Floats) -> Floats:
        return mass_preserving(log_prob, self.table.compatibility(parents, children), self.beta)


@attrs.define(eq=False)
class BigramScorer(EdgeScorer):
    """Compatibility is how often the target follows one token by the other, against how often it writes the other.

    Args:
        weights: "auto" takes shipped weights that were fitted to the pipeline's target and drafter, else the drafter's
            own probabilities, and says why; a name of shipped weights, or a file made by `treegraft fit edges`, is
            refused where it does not fit.
        beta: how much compatibility counts, 0 for nothing; None takes what the fit found best.
    """

    weights: str = attrs.field(default=AUTO, validator=instance_of(str))
    beta: float | None = attrs.field(default=None, validator=optional(number(0.0)))
    _scorer: EdgeScorer = attrs.field(init=False, factory=IdentityScorer)
    _note: str = attrs.field(init=False, default="")

    def bind(self, setting: Setting, source: str) -> None:
        path, why_not = choose("bigram", self.weights, setting, source)
        if path is None:
            self._note = f"the drafter's own probabilities, because {why_not}"
            return
        header = read_header(path)
        beta = header["beta"] if self.beta is None else self.beta
        self._scorer = CompatibilityScorer(BigramTable(**read_arrays(path), vocab_size=header["vocabulary"]), beta)
        self._note = f"weights {path.stem}, beta {beta:g}"

    def note(self) -> str:
        return self._note

    def score(self, parents: Ints, children: Ints, log_prob: Floats) -> Floats:
        return self._scorer.score(parents, children, log_prob)


@attrs.frozen(eq=False)
class BigramTable:
    """Pairs of tokens that the target writes one after the other.

    Attributes:
        pairs: int64 [N], ascending: u * V + v of each pair (u, v) that was seen.
        gain: float32 [N], by how much seeing it raises log p(v | u) - log p(v) over that of a pair never seen (nats).
        vocab_size: V.
    """

    pairs: Ints
    gain: NDArray[np.float32]
    vocab_size: int

    def compatibility(self, parents: Ints, children: Ints) -> NDArray[np.float32]:
        """float32 [L, P, C] of `children` [L, C] under `parents` [L, P]; 0 for pairs never seen."""
        wanted = parents[:, :, None] * self.vocab_size + children[:, None]
        if not len(self.pairs):
            return np.zeros(wanted.shape, np.float32)
        places = np.minimum(np.searchsorted(self.pairs, wanted), len(self.pairs) - 1)
        return np.where(self.pairs[places] == wanted, self.gain[places], np.float32(0.0))


@attrs.define(eq=False)
class TDESScorer(EdgeScorer):
    """Compatibility is a product of two small projections of the target's own embeddings, one for parents and one for
    children, weighted by depth: g(u, v, d) = <Wp e(u) * gamma_d, Wc e(v)> / sqrt(r), e(.) of unit root mean square.

    Args:
        weights: "auto" takes shipped weights that were fitted to the pipeline's target and drafter, else the drafter's
            own probabilities, and says why; a name of shipped weights, or a file made by `treegraft fit edges`, is
            refused where it does not fit.
        beta: how much compatibility counts, 0 for nothing; None takes what the fit found best.

    Source: GRAFT, Target-Distilled Edge Scoring.
    """

    weights: str = attrs.field(default=AUTO, validator=instance_of(str))
    beta: float | None = attrs.field(default=None, validator=optional(number(0.0)))
    _path: Path | None = attrs.field(init=False, default=None)
    _beta: float = attrs.field(init=False, default=0.0)
    _scorer: EdgeScorer = attrs.field(init=False, factory=IdentityScorer)
    _note: str = attrs.field(init=False, default="")

    def bind(self, setting: Setting, source: str) -> None:
        self._path, why_not = choose("tdes", self.weights, setting, source)
        if self._path is None:
            self._note = f"the drafter's own probabilities, because {why_not}"
            return
        self._beta = read_header(self._path)["beta"] if self.beta is None else self.beta
        self._note = f"weights {self._path.stem}, beta {self._beta:g}"

    def note(self) -> str:
        return self._note

    def meet(self, target: TargetModel) -> None:
        if self._path is not None:
            self._scorer = CompatibilityScorer(Towers.of(read_arrays(self._path), target), self._beta)

    def score(self, parents: Ints, children: Ints, log_prob: Floats) -> Floats:
        return self._scorer.score(parents, children, log_prob)


@attrs.frozen(eq=False)
class Towers:
    """Both projections of every token, computed once.

    Attributes:
        parent: float32 [V, r].
        child: float32 [V, r], divided by sqrt(r).
        depth: float32 [D, 1, r], gamma of depths 1..D; the last serves deeper ones too.
    """

    parent: NDArray[np.float32]
    child: NDArray[np.float32]
    depth: NDArray[np.float32]

    @classmethod
    def of(cls, arrays: Arrays, target: TargetModel) -> "Towers":
        """From projections `parent`, `child` [r, h] and `depth` [D, 1, r] of the embeddings of `target`.

        Raises:
            ModelError: they are of other embeddings, or the target lends none.
        """
        parent, child, depth = (arrays[name].astype(np.float32) for name in ("parent", "child", "depth"))
        towers = []
        for first in range(0, target.vocab_size, _CHUNK):
            embedded = embeddings(target, np.arange(first, min(first + _CHUNK, target.vocab_size)))
            if parent.shape[1] != embedded.shape[1]:
                raise ModelError(
                    "weights", f"projections of embeddings of width {parent.shape[1]}, and the target's are of width "
                    f"{embedded.shape[1]}", "Allowed: the target that they were fitted to.",
                )  # fmt: skip
            towers.append((embedded @ parent.T, embedded @ child.T / np.float32(np.sqrt(len(parent)))))
        return cls(*map(np.concatenate, zip(*towers, strict=True)), depth)

    def compatibility(self, parents: Ints, children: Ints) -> NDArray[np.float32]:
        """float32 [L, P, C] of `children` [L, C] under `parents` [L, P], for depths 1..L."""
        depth = self.depth[np.minimum(np.arange(len(parents)), len(self.depth) - 1)]
        product: NDArray[np.float32] = (self.parent[parents] * depth) @ self.child[children].transpose(0, 2, 1)
        return product


@torch.inference_mode()
def embeddings(target: TargetModel, tokens: Ints) -> NDArray[np.float32]:
    """float32 [..., h]: the target's embeddings of `tokens` [...], each of unit root mean square.

    Raises:
        ModelError: the target lends none.
    """
    try:
        rows = target.embed(torch.from_numpy(tokens)).float()
    except NotImplementedError as error:
        raise ModelError("edges", str(error), "Allowed: targets that lend their embedding.") from error
    return (rows / rows.pow(2).mean(-1, keepdim=True).add(_EPSILON).sqrt()).cpu().numpy()


_EPSILON = 1e-12
_CHUNK = 8192  # tokens whose embeddings are held at a time
