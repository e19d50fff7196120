"""What the suffix drafter costs: `name value limit ok|miss` lines; exits 1 on a miss.

    python benchmarks/suffix.py [--tokens 16384] [--moments 200]

Over texts of several kinds: code (the Python standard library in the demo tokenizer's tokens), a loop of one token and
of nine, and random tokens, of two kinds and of 4096. Insertion a token, in pieces of four as in rounds; calls at
the root, which grow a whole draft, and at ten positions of the tree grown so; medians over `--moments` places at the
end of the text, and the 95th percentile. Memory is that of the whole index by the number of tokens.
"""

import argparse
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from overhead import library_tokens

import treegraft
from treegraft.interfaces import DraftRequest, Observation
from treegraft.tree import DraftTree
from treegraft_plugins.drafters.suffix import SuffixDrafter
from treegraft_plugins.hf.loading import load_causal_lm

PIECE = 4
INSERTION_US, CALL_MS = 20.0, 0.5
failed = False


def report(name: str, value: float, limit: float | None = None) -> None:
    """Print one line; without a limit it informs only."""
    global failed
    miss = limit is not None and value > limit
    failed = failed or miss
    print(f"{name} {value:.4f} {'-' if limit is None else f'{limit:g}'} {'miss' if miss else 'ok'}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--moments", type=int, default=200)
    options = parser.parse_args()
    for name, text in texts(options.tokens).items():
        for depth in (SuffixDrafter().max_depth, 64):
            measure(f"{name}_depth_{depth}", text, options.moments, max_depth=depth)
    return 1 if failed else 0


def texts(size: int) -> dict[str, list[int]]:
    _, tokenizer = load_causal_lm(treegraft.ModelSpec("demo:target"))
    rng = np.random.default_rng(0)
    return {
        "code": library_tokens(tokenizer, size),
        "loop_of_1": [7] * size,
        "loop_of_9": [position % 9 for position in range(size)],
        "random_of_2": rng.integers(0, 2, size).tolist(),
        "random_of_4096": rng.integers(0, 4096, size).tolist(),
    }


def measure(name: str, text: list[int], num_moments: int, **options: Any) -> None:
    drafter = SuffixDrafter(**options)
    insertions = [us / PIECE for us in timed_us(drafter, text[: -num_moments - 1])]
    report(f"{name}_insertion_us", statistics.median(insertions), INSERTION_US)
    report(f"{name}_insertion_mean_us", statistics.mean(insertions))
    at_root, at_ten = calls_ms(drafter, text, num_moments)
    for place, times in (("root", at_root), ("10_positions", at_ten)):
        if times:
            report(f"{name}_call_at_{place}_ms", statistics.median(times), CALL_MS)
            report(f"{name}_call_at_{place}_95th_ms", float(np.percentile(times, 95)))
    tracemalloc.start()
    drafter.start(observation(text))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    report(f"{name}_bytes_per_token", held / len(text))


def timed_us(drafter: SuffixDrafter, text: Sequence[int]) -> list[float]:
    """The time of every piece (us)."""
    pieces = [observation(text[begin : begin + PIECE]) for begin in range(0, len(text), PIECE)]
    drafter.start(observation([]))
    return [1e3 * elapsed_ms(drafter.observe, piece)[0] for piece in pieces]


def calls_ms(drafter: SuffixDrafter, text: list[int], num_moments: int) -> tuple[list[float], list[float]]:
    """Calls at the root and at ten positions of what they grew (ms), along the last tokens of the text."""
    at_root, at_ten = [], []
    for end in range(len(text) - num_moments, len(text)):
        drafter.observe(observation(text[end - 1 : end]))
        tree = DraftTree.rooted(text[end])
        request = DraftRequest(tree, np.zeros(1, np.int64), 10, 163, 100, 4096, np.array(text[: end + 1]))
        drafter.draft(request)  # as in a round, where the step before has warmed the caches
        elapsed, expansion = elapsed_ms(drafter.draft, request)
        at_root.append(elapsed)
        tree = tree.append(expansion, 0, [False])
        positions = tree.ranked()[1:11]
        if len(positions) == 10:
            request = DraftRequest(tree, positions, 10, 163, 100, 4096, request.committed)
            at_ten.append(elapsed_ms(drafter.draft, request)[0])
    return at_root, at_ten


def elapsed_ms(call: Callable[[Any], Any], argument: Any) -> tuple[float, Any]:
    begin = time.perf_counter()
    result = call(argument)
    return (time.perf_counter() - begin) * 1e3, result


def observation(tokens: Sequence[int]) -> Observation:
    return Observation(np.array(tokens, np.int64))


if __name__ == "__main__":
    sys.exit(main())
