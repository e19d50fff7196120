"""Throughput on the demo pair: every arm on every prompt, interleaved, medians of repeats.

    python benchmarks/quick.py [--json] [--prompts FILE] [--limit 20] [--repeats 5] [--arms plain,...] [--threads 1]

Two kinds of figures. The clock's: tokens/s and the ratio to plain, with the spread of a second plain arm beside it.
And a deterministic one: tokens emitted per modelled ms, by the same pipelines under one frozen cost table
(data/demo_costs.json), which no other load on the machine can move.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from prompts import HELD_OUT, read_prompts

import treegraft
from treegraft.interfaces import RoundRecord
from treegraft.pipeline import Generation, Pipeline
from treegraft_plugins.costs import FileCosts
from treegraft_plugins.hf.loading import load_causal_lm

COSTS = Path(__file__).parent / "data" / "demo_costs.json"
ARMS = "plain,all_small,all_middle,treegraft"
AGAIN = "plain (again)"


@attrs.define
class Tally:
    """What one arm did at one temperature."""

    seconds: list[list[float]] = attrs.field(factory=list)  # one list a repeat, one entry a prompt
    generations: list[Generation] = attrs.field(factory=list)  # of the first repeat, with rounds
    modelled: float = 0.0  # tokens per modelled ms

    def tokens_per_second(self) -> list[float]:
        """One figure a repeat, over all prompts."""
        num_tokens = sum(len(generation.token_ids) for generation in self.generations)
        return [num_tokens / sum(seconds) for seconds in self.seconds]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.add_argument("--prompts", type=Path, default=HELD_OUT)
    parser.add_argument("--limit", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperatures", default="0,0.8")
    parser.add_argument("--arms", default=ARMS)
    parser.add_argument("--threads", type=int, default=1, help="of torch; more than one is slower for so small models")
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE for every pipeline")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    prompts = read_prompts(options.prompts, options.limit)
    target, tokenizer = load_causal_lm(treegraft.ModelSpec("demo:target"))
    middle, _ = load_causal_lm(treegraft.ModelSpec("demo:middle"))
    models = {"target": target, "middle": middle}
    names = options.arms.split(",")

    def load(name: str, *extra: str) -> Pipeline:
        return treegraft.load(name, *options.overrides, *extra, models=models, tokenizer=tokenizer)

    pipelines = {name: load(name) for name in names} | {AGAIN: load("plain")}
    frozen = {name: load(name, f"costs={{use: file, path: {COSTS}}}") for name in names}
    for pipeline in pipelines.values():
        pipeline.generate(prompts[0], 32)  # warm-up, discarded

    results = []
    for temperature in map(float, options.temperatures.split(",")):
        request = {"max_new_tokens": options.max_new_tokens, "temperature": temperature, "seed": 1}
        tallies = {name: Tally() for name in pipelines}
        for repeat in range(options.repeats):
            for tally in tallies.values():
                tally.seconds.append([])
            for number, prompt in enumerate(prompts):
                # Rotated, so that no arm always runs after the same other.
                order = list(pipelines)
                turn = (repeat + number) % len(order)
                for name in order[turn:] + order[:turn]:
                    generation = pipelines[name].generate(prompt, keep_rounds=repeat == 0, **request)
                    tallies[name].seconds[-1].append(generation.latency_ms["total"] / 1e3)
                    if repeat == 0:
                        tallies[name].generations.append(generation)
            print(f"temperature {temperature:g}, repeat {repeat + 1}/{options.repeats}", file=sys.stderr)
        for name in names:
            tallies[name].modelled = modelled_rate(frozen[name], prompts, request)
        results.append({"temperature": temperature, "arms": [row(name, tallies) for name in tallies]})
    print(json.dumps(results, indent=1) if options.json else "\n\n".join(map(table, results)))
    return 0 if all(arm["same_text"] for result in results for arm in result["arms"]) else 1


def modelled_rate(pipeline: Pipeline, prompts: Sequence[str], request: dict[str, Any]) -> float:
    """Tokens per modelled ms under the frozen cost table."""
    costs, num_tokens, ms = FileCosts(str(COSTS)), 0, 0.0
    for prompt in prompts:
        generation = pipeline.generate(prompt, keep_rounds=True, **request)
        num_tokens += len(generation.token_ids)
        ms += sum(round_ms(record, costs) for record in generation.rounds or ())
    return num_tokens / ms


def round_ms(record: RoundRecord, costs: FileCosts) -> float:
    """A round's modelled latency (ms)."""
    drafted = sum(
        float(costs.source_ms(step.source, step.num_rows)) for step in record.state.steps if len(step.positions)
    )
    return float(costs.target_ms(len(record.pruned), record.state.position)) + drafted


def row(name: str, tallies: dict[str, Tally]) -> dict[str, Any]:
    """One line of the table."""
    tally, plain = tallies[name], tallies["plain"]
    rates, plain_rates = tally.tokens_per_second(), plain.tokens_per_second()
    ratios = [rate / other for rate, other in zip(rates, plain_rates, strict=True)]
    rounds = [record for generation in tally.generations for record in generation.rounds or ()]
    num_tokens = sum(len(generation.token_ids) for generation in tally.generations)
    return {
        "arm": name,
        "tokens_per_second": statistics.median(rates),
        "ratio_to_plain": statistics.median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
        "emitted_per_round": num_tokens / len(rounds),
        "accepted_per_round": sum(len(record.verdict.path) for record in rounds) / len(rounds),
        "verified_per_round": sum(len(record.pruned) - 1 for record in rounds) / len(rounds),
        "source_calls": {
            source: sum(generation.source_calls[source] for generation in tally.generations)
            for source in tally.generations[0].source_calls
        },
        "copied_share": sum(map(copied, rounds)) / num_tokens,
        "tokens_per_modelled_ms": tally.modelled,
        "same_text": [g.token_ids for g in tally.generations] == [g.token_ids for g in plain.generations],
    }


def copied(record: RoundRecord) -> int:
    """Accepted tokens that a source without a network proposed first: copied from the context, or remembered of it."""
    lookups = {source.index for source in record.state.sources.values() if source.drafter.num_rows == 0}
    return sum(int(record.pruned.source[row]) in lookups for row in record.verdict.path)


def table(result: dict[str, Any]) -> str:
    """A Markdown table of one temperature."""
    columns = ("arm", "tokens/s", "ratio to plain (range)", "emitted", "accepted", "verified", "copied",
               "tokens/modelled ms", "calls", "same text")  # fmt: skip
    lines = [f"temperature {result['temperature']:g}", "", f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|"]
    for arm in result["arms"]:
        low, high = arm["ratio_range"]
        calls = ", ".join(f"{name} {calls}" for name, calls in arm["source_calls"].items()) or "-"
        modelled = f"{arm['tokens_per_modelled_ms']:.4f}" if arm["tokens_per_modelled_ms"] else "-"
        lines.append(
            f"| {arm['arm']} | {arm['tokens_per_second']:.1f} | {arm['ratio_to_plain']:.2f} ({low:.2f}-{high:.2f}) "
            f"| {arm['emitted_per_round']:.2f} | {arm['accepted_per_round']:.2f} | {arm['verified_per_round']:.1f} "
            f"| {arm['copied_share']:.0%} | {modelled} | {calls} | {'yes' if arm['same_text'] else 'NO'} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
