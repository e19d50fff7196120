"""Does every pipeline say what plain decoding says? All held-out prompts, greedy and sampled with a seed.

    python benchmarks/equality.py [--pipelines NAME,...] [--prompts FILE] [--limit N] [--max-new-tokens 128]
                                  [--temperatures 0,0.8] [--top-p 1.0] [--seed 1] [KEY=VALUE ...]

Prints a line for every output that differs and `N of N equal`; exits 1 on a difference. Costs are fixed and the budget
is full unless overridden, so that trees are as large as they get and a run can be repeated.

Pipelines whose verifier draws for itself are compared at temperature 0 only: what they sample is other text of the same
distribution.

A line ends with how far the pipeline's token was from being chosen where the two part, in a forward of one row: the gap
(nats) that `treegraft audit` gives. About 1e-5 is rounding (a forward of many rows adds in another order than one of a
single row); more is an error in the decoder.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from prompts import HELD_OUT, read_prompts

import treegraft
from treegraft.pipeline import Generation, Pipeline
from treegraft.registry import Registry
from treegraft.sampling import SamplingOptions, SeededDraws
from treegraft_plugins.hf.rules import warpers

OVERRIDES = ("costs={use: fixed}", "budget={use: fixed, verify_nodes: 63}")


def main() -> int:
    options = arguments()
    prompts = read_prompts(options.prompts, options.limit)
    plain = treegraft.load("plain", *(text for text in options.overrides if text.startswith("models.")))
    num_runs = num_equal = 0
    pipelines = {name: treegraft.load(name, *OVERRIDES, *options.overrides) for name in options.pipelines.split(",")}
    for number, prompt in enumerate(prompts):
        for temperature in map(float, options.temperatures.split(",")):
            sampling = {"temperature": temperature, "top_p": options.top_p if temperature else 1.0}
            request = {"max_new_tokens": options.max_new_tokens, "seed": options.seed, **sampling}
            expected = plain.generate(prompt, **request)
            for name, pipeline in pipelines.items():
                if temperature and not pipeline.repeats_plain:
                    continue
                found = pipeline.generate(prompt, **request)
                num_runs += 1
                num_equal += found.token_ids == expected.token_ids
                if found.token_ids != expected.token_ids:
                    where = difference(plain, prompt, found, expected, SamplingOptions(**sampling))
                    print(f"prompt {number}, temperature {temperature:g}, {name}: {where}", flush=True)
        print(f"prompt {number + 1}/{len(prompts)}: {num_equal} of {num_runs} equal so far", file=sys.stderr)
    print(f"{num_equal} of {num_runs} equal")
    return 0 if num_equal == num_runs else 1


def arguments() -> argparse.Namespace:
    registry = Registry.read()
    drafting = [
        name for name in registry.concrete()
        if name != "plain" and "ablation" not in registry.pipelines[name].get("scheduler", {})  # those need weights
    ]  # fmt: skip
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pipelines", default=",".join(drafting))
    parser.add_argument("--prompts", type=Path, default=HELD_OUT)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperatures", default="0,0.8")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE for every pipeline but plain")
    return parser.parse_args()


def difference(plain: Pipeline, prompt: str, found: Generation, expected: Generation, options: SamplingOptions) -> str:
    """Where two outputs part, and how far the token found there was from being the target's choice."""
    pairs = zip(found.token_ids, expected.token_ids, strict=False)
    shared = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
    if shared is None:
        return f"{len(found.token_ids)} tokens, not {len(expected.token_ids)}"
    tokens = [*plain.tokenizer(prompt)["input_ids"], *expected.token_ids[:shared]]
    scores = warpers(options).process(torch.tensor([tokens]), next_logits(plain, tokens))[0]
    token = found.token_ids[shared]
    if options.temperature == 0:
        gap = float(scores.max() - scores[token])
    else:
        gap = SeededDraws(expected.seed).gap(scores.double().softmax(-1), len(tokens), token)
    return f"token {shared} is {token}, not {expected.token_ids[shared]} (gap {gap:.1e})"


@torch.inference_mode()
def next_logits(plain: Pipeline, tokens: Sequence[int]) -> torch.Tensor:
    """Logits [1, V] after `tokens`, the last of them forwarded alone as plain decoding does."""
    model = plain.target.model
    ids = torch.tensor([list(tokens)], device=model.device)
    cache = model(input_ids=ids[:, :-1]).cache
    return model(input_ids=ids[:, -1:], cache=cache).logits[:, -1].float()


if __name__ == "__main__":
    sys.exit(main())
