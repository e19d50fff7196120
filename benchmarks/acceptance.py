"""Accepted tokens a round of live decoding, with intervals over prompts, also of pipelines that no replay can follow.

    python benchmarks/acceptance.py PIPELINE,... [--prompts FILE] [--limit N] [--max-new-tokens 64] [--temperature 0.8]
                                    [--seed 1] [--repeats 1] [KEY=VALUE ...]

Costs are fixed and the budget is full unless overridden. Prints a table: accepted a round of each pipeline, by category
and in all, and its ratio to that of the first pipeline with a 95 % interval. Repeat r samples with seed S + r.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from prompts import HELD_OUT

import treegraft
from treegraft.bench.intervals import Work, ratio
from treegraft.pipeline import Pipeline

OVERRIDES = ("costs={use: fixed}", "budget={use: fixed, verify_nodes: 63}")


def main() -> None:
    options = arguments()
    lines = options.prompts.read_text().splitlines()[: options.limit]
    prompts = [json.loads(line) for line in lines]
    categories = np.array([prompt["category"] for prompt in prompts])
    texts = [prompt["turns"][0] for prompt in prompts]
    found = {}
    for name in options.pipelines.split(","):
        pipeline = treegraft.load(name, *OVERRIDES, *options.overrides)
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
            print(f"| {category} ({own.sum()}) | `{name}` | {accepted:.3f} | {gain.value:.3f}{interval} |")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pipelines")
    parser.add_argument("--prompts", type=Path, default=HELD_OUT)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE for every pipeline")
    return parser.parse_args()


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
    main()
