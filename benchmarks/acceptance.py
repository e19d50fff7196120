"""Accepted tokens a round of live decoding, with intervals over prompts, also of pipelines that no replay can follow.

    python benchmarks/acceptance.py PIPELINE,... [--prompts FILE] [--limit N] [--max-new-tokens 64] [--temperature 0.8]
                                    [--seed 1] [--repeats 1] [KEY=VALUE ...]

Costs are fixed and the budget is full unless overridden. Prints a table: accepted a round of each pipeline, by category
and in all, and its ratio to that of the first pipeline with a 95 % interval. Repeat r samples with seed S + r.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from prompts import HELD_OUT

import treegraft
from treegraft.bench.intervals import Work, ratio
from treegraft.bench.prompts import read_all
from treegraft.pipeline import Pipeline

OVERRIDES = ("costs={use: fixed}", "budget={use: fixed, verify_nodes: 63}")


def main() -> None:
    options = arguments()
    prompts = read_all([options.prompts], options.limit, None)
    categories = np.array([prompt.category for prompt in prompts])
    texts = [prompt.turns[0] for prompt in prompts]
    pipelines = {name: treegraft.load(name, *OVERRIDES, *options.overrides) for name in options.pipelines.split(",")}
    found = {}
    for name, pipeline in pipelines.items():
        found[name] = decoded(pipeline, texts, options)
        print(f"{name}: done", file=sys.stderr, flush=True)
    base = next(iter(found.values()))
    print(f"| prompts | pipeline | accepted | to {next(iter(found))} |\n| --- | --- | --- | --- |")
    for category in ("all", *dict.fromkeys(categories.tolist())):
        own = np.ones(len(prompts), np.bool_) if category == "all" else categories == category
        for name, work in found.items():
            part, of = (Work(each.tokens[:, own], each.ms[:, own]) for each in (work, base))
            gain = ratio(part, of)
            interval = "" if gain.interval is None else f" [{gain.interval[0]:.3f}-{gain.interval[1]:.3f}]"
            accepted = part.tokens.sum() / part.ms.sum()
            value = "-" if gain.value is None else f"{gain.value:.3f}"
            print(f"| {category} ({own.sum()}) | `{name}` | {accepted:.3f} | {value}{interval} |")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pipelines")
    parser.add_argument("--prompts", type=Path, default=HELD_OUT)
    parser.add_argument("--limit", type=positive)
    parser.add_argument("--max-new-tokens", type=positive, default=64)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--repeats", type=positive, default=1)
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE for every pipeline")
    return parser.parse_intermixed_args()


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number >= 1")
    return number


def decoded(pipeline: Pipeline, prompts: Sequence[str], options: argparse.Namespace) -> Work:
    """Accepted tokens and rounds [R, P]; the latter stand where a Work has its time."""
    accepted, rounds = np.zeros((2, options.repeats, len(prompts)))
    for repeat in range(options.repeats):
        for number, prompt in enumerate(prompts):
            result = pipeline.generate(
                prompt, options.max_new_tokens, temperature=options.temperature, seed=options.seed + repeat
            )
            accepted[repeat, number] = sum(kept * count for kept, count in result.accepted_histogram.items())
            rounds[repeat, number] = result.num_rounds
    return Work(accepted, rounds)


if __name__ == "__main__":
    try:
        main()
    except treegraft.TreeGraftError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from error
