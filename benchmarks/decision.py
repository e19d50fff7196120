"""What a decision of the distilled scheduler costs: `name value limit ok|miss` lines; exits 1 on a miss.

    python benchmarks/decision.py [--weights FILE] [--rounds 30]

Timed on the states of real rounds of the demo pair on library text: a whole decision with its signals, the predictor
alone, and every candidate signal by itself. Without FILE the weights are those that ship. Costs are those of a cheap
middle, so that it is called. Medians; run it on a quiet machine.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs
import numpy as np
import overhead
import torch

import treegraft
from treegraft.interfaces import RoundState
from treegraft.pipeline import Pipeline
from treegraft_plugins.schedulers.distilled.scheduler import SHELF
from treegraft_plugins.schedulers.distilled.signals import CANDIDATES, tree_signals
from treegraft_plugins.schedulers.distilled.weights import read_weights

STEPS, REPEATS = 5, 20
COSTS = "costs={use: fixed, target: 10.0, sources: {small: 0.01, middle: 0.6}}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, help="made by treegraft fit scheduler for the demo pair")
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)
    path = options.weights or SHELF.folder / "demo.safetensors"
    pipeline = treegraft.load(
        "treegraft", COSTS, f"scheduler={{use: distilled, weights: '{path}'}}", "budget={use: fixed, verify_nodes: 63}"
    )
    weights = read_weights(path)
    states = states_of(pipeline, options.rounds)
    scheduler, middle = pipeline.parts.scheduler, pipeline.sources[-1]
    overhead.report("decision_ms", median_ms(scheduler.decide, states), 0.1)
    inputs = np.zeros(len(weights.predictor.normaliser.mean))
    overhead.report("predictor_ms", median_ms(weights.predictor, [inputs] * len(states)), 0.02)
    for name in CANDIDATES:
        overhead.report(f"signal_{name}_ms", median_ms(lambda state, n=name: tree_signals(state, middle, [n]), states))
    return 1 if overhead.failed else 0


def states_of(pipeline: Pipeline, num_rounds: int) -> list[RoundState]:
    """The state before every decision of some rounds."""
    prompt = overhead.library_tokens(pipeline.tokenizer, overhead.SHORT)
    stream = pipeline.rounds(prompt, 10 * num_rounds)
    states = []
    for _, record in zip(range(num_rounds), stream, strict=False):
        for number, step in enumerate(record.state.steps):
            states.append(attrs.evolve(record.state, steps=record.state.steps[:number], tree=step.tree_before))
    stream.close()
    return states


def median_ms(call: Callable[[object], object], arguments: Sequence[object]) -> float:
    """Of single calls, each on the next argument, all arguments several times."""
    times = []
    for _ in range(REPEATS):
        for argument in arguments:
            begin = time.perf_counter()
            call(argument)
            times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times)


if __name__ == "__main__":
    sys.exit(main())
