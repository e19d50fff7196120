"""What a decision of the distilled scheduler costs: `name value limit ok|miss` lines; exits 1 on a miss.

    python benchmarks/decision.py [--weights FILE] [--rounds 30]

Timed on the states of real rounds of the demo pair on library text: a whole decision with its signals, the predictor
alone, and every candidate signal by itself. Without FILE the weights are random ones that read the six signals of the
paper's released weights: what they say does not matter here. Medians; run it on a quiet machine.
"""

import argparse
import statistics
import sys
import tempfile
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
from treegraft_plugins.schedulers.distilled.fit import Predictor
from treegraft_plugins.schedulers.distilled.networks import HIDDEN, Normaliser
from treegraft_plugins.schedulers.distilled.signals import CANDIDATES, tree_signals
from treegraft_plugins.schedulers.distilled.weights import Header, Weights, read_weights

STEPS, REPEATS = 5, 20
COSTS = "costs={use: fixed, target: {1: 5.0, 64: 13.0}, sources: {small: 0.6, middle: {1: 2.2, 32: 4.0}}}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, help="made by treegraft fit scheduler for the demo pair")
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = options.weights or random_weights(Path(folder) / "random.safetensors")
        pipeline = treegraft.load(
            "treegraft", COSTS, f"scheduler={{use: distilled, weights: '{path}'}}",
            "budget={use: fixed, verify_nodes: 63}",
        )  # fmt: skip
        weights = read_weights(path)
    states = states_of(pipeline, options.rounds)
    scheduler, middle = pipeline.parts.scheduler, pipeline.sources[-1]
    overhead.report("decision_ms", median_ms(scheduler.decide, states), 0.1)
    inputs = np.zeros(len(weights.predictor.normaliser.mean))
    overhead.report("predictor_ms", median_ms(weights.predictor, [inputs] * len(states)), 0.02)
    for name in CANDIDATES:
        overhead.report(f"signal_{name}_ms", median_ms(lambda state, n=name: tree_signals(state, middle, [n]), states))
    return 1 if overhead.failed else 0


def random_weights(path: Path) -> Path:
    """Weights for the demo pair that know nothing."""
    signals = tuple(CANDIDATES)[:6]
    num_inputs = 5 + 2 + STEPS + len(signals)
    rng = np.random.default_rng(0)
    shapes = {"w1": (num_inputs, HIDDEN), "b1": (HIDDEN,), "w2": (HIDDEN, HIDDEN), "b2": (HIDDEN,), "w3": (HIDDEN,)}
    layers = {name: rng.normal(0.0, 0.2, shape).astype(np.float32) for name, shape in shapes.items()}
    layers["b3"] = np.zeros(1, np.float32)
    normaliser = Normaliser(np.zeros(num_inputs, np.float32), np.ones(num_inputs, np.float32))
    header = Header(
        signals=signals, steps=STEPS, pairs=(("demo:target", "demo:middle"),), vocab_sizes=(4096,), ratios=(1.0, 40.0),
        width=10, max_nodes=63, ablation=None, versions={},
    )  # fmt: skip
    Weights(header, Predictor(signals, STEPS, normaliser, layers)).save(path)
    return path


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
