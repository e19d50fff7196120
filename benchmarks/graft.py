"""CPU time of GRAFT's two parts in one round (ms): the edge scores of a block, and the choice of a budget.

    python benchmarks/graft.py [--repeats 500]

Weights are random; what they say costs the same. 32 candidates a place, towers of rank 64, trees of a scored block.
"""

import argparse
import time
from collections.abc import Callable

import attrs
import numpy as np
from blocktree import NUM_CANDIDATES, marginals

from treegraft.interfaces import Limits, RoundState, Statistics, StepRecord
from treegraft.statistics import AcceptanceStats
from treegraft.tree import DraftTree, Expansion
from treegraft_plugins.blocktree import best_first, scored_edges
from treegraft_plugins.blocktree.edges import BigramTable, CompatibilityScorer, Towers
from treegraft_plugins.costs import FixedCosts
from treegraft_plugins.saba.budget import SABABudget
from treegraft_plugins.saba.model import GainModel
from treegraft_plugins.saba.signals import DRAFTED, SIGNALS

VOCAB_SIZE, RANK, HIDDEN, NUM_PAIRS = 4096, 64, 32, 100_000
DEPTHS = (7, 15)  # places of blocks of 8 and 16
SIZES = (63, 512)


def milliseconds(repeats: int, call: Callable[[], object]) -> tuple[float, float]:
    """Median and 95th percentile (ms)."""
    taken = []
    for _ in range(repeats):
        begin = time.thread_time()
        call()
        taken.append((time.thread_time() - begin) * 1e3)
    return float(np.median(taken)), float(np.quantile(taken, 0.95))


def scorers(rng: np.random.Generator) -> dict[str, CompatibilityScorer]:
    """Each fitted scorer with random tables."""
    up, down = (rng.normal(size=(VOCAB_SIZE, RANK)).astype(np.float32) for _ in range(2))
    pairs = np.unique(rng.integers(0, VOCAB_SIZE**2, NUM_PAIRS))
    return {
        "tdes": CompatibilityScorer(Towers(up, down, np.ones((max(DEPTHS), 1, RANK), np.float32)), 0.2),
        "bigram": CompatibilityScorer(BigramTable(pairs, np.ones(len(pairs), np.float32), VOCAB_SIZE), 0.2),
    }


def grown(num_nodes: int) -> RoundState:
    """A round after a block of 16 was drafted as a tree of `num_nodes`."""
    log_prob = marginals(max(DEPTHS), NUM_CANDIDATES)
    tokens = np.arange(log_prob.size).reshape(log_prob.shape)
    expansion = best_first(log_prob, num_nodes).expansion(tokens, signals=dict.fromkeys(DRAFTED, 0.5))
    tree = DraftTree.rooted(0).append(expansion, 0, (True,))
    nothing = np.zeros(0, np.int64)
    step = StepRecord("dflash", tree, tree, np.array([0]), expansion, nothing, num_rows=16, latency_ms=0.0)
    idle = attrs.evolve(step, positions=nothing, expansion=Expansion.empty())
    costs = FixedCosts(target={1: 5.0, 8: 6.0, 64: 13.0}, sources={"dflash": {1: 1.0, 16: 2.0}})
    return RoundState(
        num_prompt_tokens=99, position=200, limits=Limits(5, num_nodes, 99), sources={}, steps=(step, idle), tree=tree,
        statistics=Statistics(costs, AcceptanceStats(1)),
    )  # fmt: skip


def budget(num_nodes: int, rng: np.random.Generator) -> SABABudget:
    """One with a random gain model."""
    shapes = {"mean": len(SIGNALS), "w1": (len(SIGNALS), HIDDEN), "b1": HIDDEN, "w2": (HIDDEN, 3), "b2": 3}
    arrays = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    policy = SABABudget(num_nodes)
    policy._model = GainModel(SIGNALS, arrays | {"std": np.ones(len(SIGNALS))})
    return policy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=500)
    repeats, rng = parser.parse_args().repeats, np.random.default_rng(0)
    print("| part | size | median ms | 95 % |\n| --- | --- | --- | --- |")
    for name, scorer in scorers(rng).items():
        for depth in DEPTHS:
            log_prob = marginals(depth, NUM_CANDIDATES)
            tokens = np.array([rng.permutation(VOCAB_SIZE)[:NUM_CANDIDATES] for _ in range(depth)])
            taken = milliseconds(repeats, lambda s=scorer, t=tokens, p=log_prob: scored_edges(s, 1, t, p))
            print(f"| {name} | {depth} places | {taken[0]:.3f} | {taken[1]:.3f} |")
    for num_nodes in SIZES:
        policy, state = budget(num_nodes, rng), grown(num_nodes)
        taken = milliseconds(repeats, lambda p=policy, s=state: p.choose(s, s.tree))
        print(f"| saba | {num_nodes} nodes | {taken[0]:.3f} | {taken[1]:.3f} |")


if __name__ == "__main__":
    main()
