"""What the framework itself costs: `name value limit ok|miss` lines; exits 1 on a miss.

    python benchmarks/overhead.py [--rounds 60]

`treegraft_fixed` with a fixed budget of 63 nodes on the demo pair at 512 tokens of context, and on random models of the
same shape with long positions at 512 and 16,384. Medians; run it on a quiet machine.
"""

import argparse
import itertools
import statistics
import sys
import sysconfig
import time
import tracemalloc
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import treegraft
from treegraft.interfaces import DraftRequest, Observation, RoundRecord
from treegraft.pipeline import Pipeline
from treegraft.tree import DraftTree
from treegraft_plugins.drafters.ngram import NGramDrafter
from treegraft_plugins.hf.loading import load_causal_lm

SHORT, LONG = 512, 16_384
TURN = 7  # rounds
FIXED = ("budget={use: fixed, verify_nodes: 63}", "costs={use: fixed}")
failed = False


def report(name: str, value: float, limit: float | None = None) -> None:
    """Print one line; without a limit it informs only."""
    global failed
    miss = limit is not None and value > limit
    failed = failed or miss
    print(f"{name} {value:.4f} {'-' if limit is None else f'{limit:g}'} {'miss' if miss else 'ok'}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--threads", type=int, default=1, help="of torch; more than one is slower for so small models")
    options = parser.parse_args()
    num_rounds = options.rounds
    torch.set_num_threads(options.threads)
    target, tokenizer = load_causal_lm(treegraft.ModelSpec("demo:target"))
    middle, _ = load_causal_lm(treegraft.ModelSpec("demo:middle"))
    text = library_tokens(tokenizer, LONG)

    demo = {"target": target, "middle": middle}
    report_rounds("demo_512", rounds_of([(load("treegraft_fixed", demo), text[:SHORT])], num_rounds)[0], limit_ms=2.0)
    plain_round("demo_512", target, text[:SHORT], num_rounds)
    decisions(load("treegraft", demo, "budget={use: gain_over_cost, verify_nodes: 63}"), text[:SHORT], num_rounds)

    long = {"target": long_model(target), "middle": long_model(middle)}
    pipeline = load("treegraft_fixed", long)
    short_rounds, long_rounds = rounds_of([(pipeline, text[:SHORT]), (pipeline.clone(), text)], num_rounds)
    short_ms = report_rounds("random_512", short_rounds, limit_ms=2.0)
    long_ms = report_rounds("random_16384", long_rounds, limit_ms=2.0)
    report("framework_growth_512_to_16384", long_ms / short_ms, 1.10)

    for size in (SHORT, LONG):
        report(f"ngram_call_ms_{size}", ngram_call_ms(text[:size]), 0.3)
    report("ngram_index_bytes_per_position", ngram_bytes(text), 600)
    return 1 if failed else 0


def load(name: str, models: dict[str, object], *extra: str) -> Pipeline:
    return treegraft.load(name, *FIXED, *extra, models=models)


def long_model(like: LlamaForCausalLM) -> LlamaForCausalLM:
    """A random model of the same shape that has positions for a long context."""
    torch.manual_seed(0)
    settings = like.config.to_dict() | {"max_position_embeddings": 2 * LONG}
    return LlamaForCausalLM(LlamaConfig(**settings)).to(torch.float32).eval()


def library_tokens(tokenizer: object, size: int) -> list[int]:
    """Tokens of the Python standard library: text as repetitive as code is."""
    root, ids = Path(sysconfig.get_paths()["stdlib"]), []
    for path in sorted(root.glob("*.py")):
        ids += tokenizer(path.read_text("utf-8", "replace"))["input_ids"]
        if len(ids) >= size:
            return ids[:size]
    raise SystemExit("overhead.py: the standard library's sources are too few here")


def rounds_of(runs: list[tuple[Pipeline, list[int]]], num_rounds: int) -> list[list[RoundRecord]]:
    """Rounds of each run, in turns of a few, so that a machine that slows down does so for all.

    The first of each turn is dropped: it begins with the processor's caches full of another run's work.
    """
    streams = [pipeline.rounds(prompt, 20 * num_rounds) for pipeline, prompt in runs]
    records: list[list[RoundRecord]] = [[] for _ in runs]
    while len(records[-1]) < num_rounds:
        for stream, own in zip(streams, records, strict=True):
            own += list(itertools.islice(stream, TURN))[1:]
    for stream in streams:
        stream.close()
    return records


def report_rounds(name: str, records: list[RoundRecord], limit_ms: float) -> float:
    """Report where a round's time goes; returns the framework's share (ms)."""
    median = lambda values: statistics.median(values)  # noqa: E731
    report(f"{name}_target_ms", median([record.latency_ms["target"] for record in records]))
    report(f"{name}_drafters_ms", median([sum(record.source_ms.values()) for record in records]))
    report(f"{name}_commit_ms", median([record.latency_ms["commit"] for record in records]))
    report(f"{name}_drafted_nodes", median([len(record.state.tree) - 1 for record in records]))
    for part in ("schedule", "build", "verify", "learn"):
        report(f"{name}_{part}_ms", median([record.latency_ms[part] for record in records]))
    framework_ms: float = median([record.framework_ms for record in records])
    report(f"{name}_framework_ms", framework_ms, limit_ms)
    return framework_ms


def plain_round(name: str, model: LlamaForCausalLM, prompt: list[int], num_rounds: int) -> None:
    """A round that drafts nothing against a bare forward of one token, interleaved, on the same context."""
    from transformers import DynamicCache

    stream = load("plain", {"target": model}).rounds(prompt, 4 * num_rounds)
    cache = DynamicCache()
    extra = []
    with torch.inference_mode():
        model(torch.tensor([prompt[:-1]]), cache=cache)
    for _ in range(2 * num_rounds):
        begin = time.perf_counter()
        next(stream)
        round_ms = (time.perf_counter() - begin) * 1e3
        token = torch.tensor([[prompt[-1]]])
        begin = time.perf_counter()
        with torch.inference_mode():
            model(token, cache=cache)
        extra.append(round_ms - (time.perf_counter() - begin) * 1e3)
    stream.close()
    report(f"{name}_plain_round_above_forward_ms", statistics.median(extra), 0.3)


def decisions(pipeline: Pipeline, prompt: list[int], num_rounds: int) -> None:
    """A scheduling decision of `gain_over_cost`, its signals included."""
    stream = pipeline.rounds(prompt, 10 * num_rounds)
    times = []
    for _, record in zip(range(num_rounds), stream, strict=False):
        times.append(record.latency_ms["schedule"] / (len(record.state.steps) + 1))
    stream.close()
    report("decision_ms", statistics.median(times), 0.15)


def ngram_call_ms(tokens: list[int]) -> float:
    """One n-gram call over ten positions of a drafted tree."""
    drafter = NGramDrafter()
    drafter.start(observation(tokens[:-1], drafter.wants.num_top))
    root = tokens[-1]
    children = treegraft.Expansion.from_rows({0: [(token, -1.0) for token in sorted(set(tokens[:200]))[:10]]})
    tree = DraftTree.rooted(root).append(children, 0, [False])
    request = DraftRequest(
        tree, np.arange(1, 11), 10, 163, 30, 4096, np.array(tokens),
    )  # fmt: skip
    times = []
    for _ in range(200):
        begin = time.perf_counter()
        drafter.draft(request)
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times)


def ngram_bytes(tokens: list[int]) -> float:
    """Bytes that the n-gram index holds for each position."""
    drafter = NGramDrafter()
    seen = observation(tokens, drafter.wants.num_top)
    tracemalloc.start()
    drafter.start(seen)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return held / len(tokens)


def observation(tokens: list[int], num_top: int) -> Observation:
    """Tokens with made-up target distributions whose best token is the true next one."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 4096, (len(tokens), num_top))
    ids[:-1, 0] = tokens[1:]
    log_probs = np.sort(np.log(rng.dirichlet(np.ones(num_top), len(tokens))), axis=1)[:, ::-1]
    return Observation(np.array(tokens), ids, log_probs)


if __name__ == "__main__":
    sys.exit(main())
