"""A toy target with embeddings of its own, text in which a parent decides its child, and weights for edge scorers."""

from pathlib import Path

import attrs
import numpy as np
import torch
from exactness.toy_block import TableBlockDrafter

from treegraft.interfaces import Setting, SourceSetting
from treegraft.testing import MarkovTarget
from treegraft_plugins import fitted


class EmbeddedTarget(MarkovTarget):
    """A table's target that lends an embedding: each token's own direction."""

    def embed(self, ids):
        return torch.eye(self.vocab_size)[ids]


class ChainDrafter(TableBlockDrafter):
    """The same marginals of a table of order 1, without enumerating what may follow."""

    def marginals(self, context):
        prob = np.exp(self.table - self.table.max(-1, keepdims=True))
        prob /= prob.sum(-1, keepdims=True)
        rows = [prob[context[-1]]]
        for _ in range(self.num_places - 1):
            rows.append(rows[-1] @ prob)
        return np.array(rows)


FORKS = np.zeros((7, 7))
"""Logits [V, V]: 0 goes to 1 or 2, 1 to 3, 2 to 4, and both begin again; 5 and 6 are noise."""
for _parent, _child in ((0, 1), (0, 2), (1, 3), (2, 4), (3, 0), (4, 0), (5, 0), (6, 0)):
    FORKS[_parent, _child] = 5.0


def setting(edges: str = "tdes", **changes) -> Setting:
    """A pipeline of one source, `block`."""
    sources = {"block": SourceSetting("drafter", width=1, branching=32, rank=0, edges=edges)}
    return attrs.evolve(Setting("target", 7, sources, steps=5, verify_nodes=63), **changes)


def header(kind: str, **changes) -> dict:
    said = {"kind": kind, "format": 1, "target": "target", "drafter": "drafter", "vocabulary": 7, "beta": 0.2}
    return said | changes


def save_towers(path: Path, rank: int = 3, width: int = 7, depths: int = 2, seed: int = 0, **changes) -> dict:
    """Random projections; returns the arrays."""
    rng = np.random.default_rng(seed)
    arrays = {
        "parent": rng.normal(size=(rank, width)).astype(np.float32),
        "child": rng.normal(size=(rank, width)).astype(np.float32),
        "depth": rng.normal(size=(depths, 1, rank)).astype(np.float32),
    }
    fitted.save(path, arrays, header("tdes", **changes))
    return arrays


def save_pairs(path: Path, pairs: dict[tuple[int, int], float], vocab_size: int = 7, **changes) -> None:
    """A bigram table that knows these pairs."""
    codes = np.array([parent * vocab_size + child for parent, child in pairs], np.int64)
    order = np.argsort(codes)
    gain = np.array(list(pairs.values()), np.float32)
    fitted.save(path, {"pairs": codes[order], "gain": gain[order]}, header("bigram", vocabulary=vocab_size, **changes))
