"""Toy one-pass drafters: the marginals of a table's next places, without a network; read off, and drawn from."""

import itertools
from typing import ClassVar

import attrs
import numpy as np
import torch

from treegraft.interfaces import Drafter
from treegraft.testing.models import table_row
from treegraft.tree import Expansion
from treegraft_plugins.blocktree import asks_for_root, drafted, drawn_chain


@attrs.define(eq=False)
class TableBlockDrafter(Drafter):
    """Says what stands at each of the next places whatever stands between, as a block drafter does.

    Args:
        table: logits [V] * order + [V], as `MarkovTarget` reads them.
        num_places: L.
    """

    takes_edge_scorer: ClassVar[bool] = True

    table: np.ndarray
    num_places: int = 3

    def draft(self, request):
        self.num_rows = 0
        if not asks_for_root(request):
            return Expansion.empty()
        self.num_rows = self.num_places + 1
        with np.errstate(divide="ignore"):
            log_probs = np.log(self.marginals(request.committed.tolist()))

        def top(num_places, num_candidates):
            tokens = np.argsort(-log_probs[:num_places], axis=1, kind="stable")[:, :num_candidates]
            return tokens, np.minimum(np.take_along_axis(log_probs[:num_places], tokens, axis=1), 0.0)

        return drafted(request, self.num_places, top, shape="best_first", top_k=None, signals={})

    def marginals(self, context):
        """float64 [L, V], by enumerating what may follow."""
        vocab_size = len(self.table)
        found = np.zeros((self.num_places, vocab_size))
        for path in itertools.product(range(vocab_size), repeat=self.num_places):
            prob = 1.0
            for place, token in enumerate(path):
                row = table_row(self.table, [*context, *path[:place]])
                weights = np.exp(row - row.max())
                prob *= weights[token] / weights.sum()
            found[range(self.num_places), path] += prob
        return found


@attrs.define(eq=False)
class DrawnTableBlockDrafter(TableBlockDrafter):
    """A chain drawn from those marginals."""

    proposals: ClassVar[str] = "sampled"
    takes_edge_scorer: ClassVar[bool] = False

    def draft(self, request):
        self.num_rows = 0
        if not asks_for_root(request):
            return Expansion.empty()
        self.num_rows = self.num_places + 1
        log_probs = torch.from_numpy(self.marginals(request.committed.tolist())).log()
        return drawn_chain(request, log_probs, signals={})
