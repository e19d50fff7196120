"""CPU time to build a best-first tree from one block's marginals (ms), by size, with and without edge scores.

    python benchmarks/blocktree.py [--repeats 200]

Marginals are those of a drafter that knows the first places well and the last ones badly.
"""

import argparse
import time

import numpy as np

from treegraft_plugins.blocktree import best_first

DEPTH = 15
BUDGETS = (16, 64, 128, 256, 512, 1024)
NUM_CANDIDATES = 32


def marginals(depth: int, width: int, seed: int = 0) -> np.ndarray:
    """log_prob [depth, width], rows descending and flatter from place to place."""
    rng = np.random.default_rng(seed)
    logits = np.sort(rng.gumbel(size=(depth, width)), axis=1)[:, ::-1] * np.linspace(3.0, 1.0, depth)[:, None]
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def milliseconds(repeats: int, *arguments: object) -> tuple[float, float]:
    """Median and 95th percentile of `best_first(*arguments)` (ms)."""
    taken = []
    for _ in range(repeats):
        begin = time.thread_time()
        best_first(*arguments)
        taken.append((time.thread_time() - begin) * 1e3)
    return float(np.median(taken)), float(np.quantile(taken, 0.95))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=200)
    options = parser.parse_args()
    narrow = marginals(DEPTH, NUM_CANDIDATES)
    edges = np.repeat(narrow[:, None], NUM_CANDIDATES, axis=1)
    print("| nodes | median ms | 95 % | with edge scores | 95 % |")
    print("| --- | --- | --- | --- | --- |")
    for budget in BUDGETS:
        plain = milliseconds(options.repeats, marginals(DEPTH, min(budget, 512)), budget)
        scored = milliseconds(options.repeats, narrow, budget, edges)
        print(f"| {budget} | {plain[0]:.2f} | {plain[1]:.2f} | {scored[0]:.2f} | {scored[1]:.2f} |")


if __name__ == "__main__":
    main()
