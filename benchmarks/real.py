"""A real pair against transformers' own arms: greedy, chat prompts, float32, interleaved per prompt, resumable.

    python benchmarks/real.py --target FOLDER --middle FOLDER --prompts FILE --out FILE [--limit 10]

Every finished (prompt, arm) is a line of the output file at once; a second call with the same file goes on where the
first stopped. The table is printed at the end: the median over prompts of each arm's ratio to plain, and whether every
text is plain's.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from prompts import read_prompts

import treegraft
from treegraft_plugins.hf.loading import load_causal_lm

OURS = ("plain", "all_small", "all_middle", "treegraft")
RIVALS: dict[str, dict[str, Any]] = {
    "transformers plain": {},
    "transformers prompt lookup (10)": {"prompt_lookup_num_tokens": 10},
    "transformers assisted (middle)": {"assistant_model": "middle"},
}
Run = Callable[[list[int], int], dict[str, Any]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--middle", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=10)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--arms", default=",".join([*RIVALS, *OURS]))
    options = parser.parse_args()

    target, tokenizer = load_causal_lm(treegraft.ModelSpec(options.target, dtype="float32"))
    middle, _ = load_causal_lm(treegraft.ModelSpec(options.middle, dtype="float32"))
    arms = {name: arm(name, target, middle, tokenizer) for name in options.arms.split(",")}
    done = records(options.out)
    for number, prompt in enumerate(read_prompts(options.prompts, options.limit)):
        chat = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        order = list(arms)
        for name in order[number % len(order) :] + order[: number % len(order)]:
            if any(record["prompt"] == number and record["arm"] == name for record in done):
                continue
            record = {"prompt": number, "arm": name, **arms[name](ids, options.max_new_tokens)}
            done.append(record)
            with options.out.open("a") as file:
                file.write(json.dumps(record) + "\n")
            print(f"prompt {number}: {name} {record['seconds']:.1f} s", file=sys.stderr, flush=True)
    return report(done, list(arms))


def arm(name: str, target: Any, middle: Any, tokenizer: Any) -> Run:
    """A function from prompt ids and a length to what came of it."""
    if name in OURS:
        pipeline = treegraft.load(name, models={"target": target, "middle": middle}, tokenizer=tokenizer)

        def ours(ids: list[int], max_new_tokens: int) -> dict[str, Any]:
            generation = pipeline.generate(ids, max_new_tokens, keep_rounds=True)
            return {
                "seconds": generation.latency_ms["total"] / 1e3,
                "token_ids": generation.token_ids,
                "num_rounds": generation.num_rounds,
                "emitted_per_round": generation.emitted_per_round,
                "accepted_per_round": generation.accepted_per_round,
                "verified_per_round": statistics.mean(len(r.pruned) - 1 for r in generation.rounds or ()),
                "source_calls": generation.source_calls,
                "latency_ms": generation.latency_ms,
                "costs": generation.costs,
            }

        return ours

    settings = {key: middle if value == "middle" else value for key, value in RIVALS[name].items()}

    def theirs(ids: list[int], max_new_tokens: int) -> dict[str, Any]:
        begin = time.perf_counter()
        prompt = torch.tensor([ids])
        output = target.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=max_new_tokens, do_sample=False,
            temperature=None, top_p=None, top_k=None, **settings,
        )  # fmt: skip
        return {"seconds": time.perf_counter() - begin, "token_ids": output[0, len(ids) :].tolist()}

    return theirs


def records(path: Path) -> list[dict[str, Any]]:
    """The lines of an earlier, interrupted run."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def report(done: list[dict[str, Any]], arms: list[str]) -> int:
    """Print the table of the prompts that every arm has finished; 1 if a text of ours is not plain's."""
    by_key = {(record["arm"], record["prompt"]): record for record in done}
    prompts = [n for n in sorted({record["prompt"] for record in done}) if all((arm, n) in by_key for arm in arms)]
    print("| arm | tokens/s | ratio to plain: median (range) | emitted | accepted | verified | calls | same text |")
    print("| --- " * 8 + "|")
    differs = False
    for name in arms:
        mine = [by_key[name, prompt] for prompt in prompts]
        plain = [by_key["plain", prompt] for prompt in prompts]
        rates = [len(record["token_ids"]) / record["seconds"] for record in mine]
        ratios = [rate / (len(p["token_ids"]) / p["seconds"]) for rate, p in zip(rates, plain, strict=True)]
        same = sum(record["token_ids"] == p["token_ids"] for record, p in zip(mine, plain, strict=True))
        differs = differs or (name in OURS and same < len(prompts))
        figures = [
            f"{statistics.mean(record[key] for record in mine):.2f}" if key in mine[0] else "-"
            for key in ("emitted_per_round", "accepted_per_round", "verified_per_round")
        ]
        calls = {
            source: sum(record["source_calls"][source] for record in mine) for source in mine[0].get("source_calls", ())
        }
        print(
            f"| {name} | {sum(len(r['token_ids']) for r in mine) / sum(r['seconds'] for r in mine):.2f} "
            f"| {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f}) | {' | '.join(figures)} "
            f"| {', '.join(f'{source} {n}' for source, n in calls.items()) or '-'} | {same} of {len(prompts)} |"
        )
    return 1 if differs else 0


if __name__ == "__main__":
    sys.exit(main())
