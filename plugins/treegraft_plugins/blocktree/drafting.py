"""What a one-pass drafter answers: its whole tree, below the root."""

from collections.abc import Callable, Mapping

import numpy as np
import torch

from treegraft.interfaces import DraftRequest
from treegraft.tree import Expansion, Floats, Ints
from treegraft_plugins.blocktree.best_first import best_first, scored_edges

SHAPES = ("best_first", "chain")
"""What a one-pass drafter's `tree` may be."""

_NUM_SCORED_CANDIDATES = 32  # a place's candidates under an edge scorer, which scores each under each

Top = Callable[[int, int], tuple[Ints, Floats]]
"""(L, K) -> tokens int64 [L, K] and log probabilities float64 [L, K] (nats) of the next L places, rows descending."""


def asks_for_root(request: DraftRequest) -> bool:
    """Whether a one-pass drafter has anything to answer: it drafts below the root alone, and everything at once."""
    return bool((request.positions == 0).any()) and request.max_depth > 0 and request.max_nodes > 0


def drafted(
    request: DraftRequest, num_places: int, top: Top, *, shape: str, top_k: int | None, signals: Mapping[str, float]
) -> Expansion:
    """The best tree that the marginals of the next places give, as large as the request allows.

    Args:
        request: it asks for the root; its edge scorer, if any, takes the place of the marginals.
        num_places: L, places that the drafter's pass covers.
        top: its best tokens.
        shape: `best_first`, or `chain`: one child a node, the best.
        top_k: K, candidates a place; None for as many as the tree could use (32 with an edge scorer).
        signals: what the drafter says about itself.
    """
    branching = 1 if shape == "chain" else request.branching
    if request.edge_scorer is None:
        num_candidates = min(branching, request.max_nodes, top_k or request.max_nodes)
    else:
        num_candidates = top_k or _NUM_SCORED_CANDIDATES
    tokens, log_prob = top(min(num_places, request.max_depth), num_candidates)
    edges = None
    if request.edge_scorer is not None:
        edges = scored_edges(request.edge_scorer, int(request.tree.token[0]), tokens, log_prob)
    return best_first(log_prob, request.max_nodes, edges, branching).expansion(tokens, signals=signals)


def drawn_chain(request: DraftRequest, log_probs: torch.Tensor, *, signals: Mapping[str, float]) -> Expansion:
    """A chain drawn from the marginals of the next places, as long as the request allows.

    Args:
        request: it asks a drafter of sampled proposals for the root.
        log_probs: [L, V] (nats), of the places that the drafter's pass covers; what it thinks of its tokens, too.
        signals: what the drafter says about itself.
    """
    length = min(len(log_probs), request.max_depth, request.max_nodes)
    tokens, _ = request.sample(log_probs[:length])
    own = log_probs[:length].gather(1, torch.from_numpy(tokens)[:, None].to(log_probs.device))[:, 0]
    return Expansion(-np.arange(length), tokens, own.double().clamp(max=0.0).cpu().numpy(), signals=signals)
