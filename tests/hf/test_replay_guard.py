"""Accepted lengths of every registry pipeline on the demo pair, exactly: what drafts worse, or better, shows here.

Replayed along three recorded texts with fixed costs, so that no clock takes part. After a change that is meant to draft
otherwise, or for a new pipeline,

    python tests/hf/test_replay_guard.py

writes the figures of today into `replay_guard.json`; what changed belongs into the same commit.
"""

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from named_pipelines import repeating_plain

import treegraft
from treegraft.registry import packaged_registry
from treegraft.replay import Recording, ReplayTarget, record, replay, wants_of
from treegraft.sampling import SamplingOptions

ROOT = Path(__file__).parents[2]
GUARD = Path(__file__).with_name("replay_guard.json")
PROMPTS = [
    json.loads(line)["turns"][0] for line in (ROOT / "benchmarks/data/demo_heldout.jsonl").read_text().splitlines()
]
TEXTS = [(0, 0.0), (21, 0.0), (30, 0.8)]  # prompt and temperature
NUM_TOKENS = 48
COSTS = f"costs={{use: file, path: {json.dumps(str(ROOT / 'benchmarks/data/demo_costs.json'))}}}"
REFRESH = "python tests/hf/test_replay_guard.py"
NAMES = [name for name in repeating_plain() if name != "plain"]


@cache
def target() -> treegraft.TargetModel:
    return treegraft.load("plain", models={"target": "demo:target"}, registry=packaged_registry()).target


@cache
def pipeline(name: str) -> treegraft.Pipeline:
    return treegraft.load(name, COSTS, models={"target": ReplayTarget(target())}, registry=packaged_registry())


@cache
def recordings() -> list[Recording]:
    wants, tokenizer = wants_of([pipeline(name) for name in NAMES]), target().tokenizer
    return [
        record(
            target(), tokenizer(PROMPTS[number])["input_ids"], NUM_TOKENS, SamplingOptions(temperature), 1, wants
        )
        for number, temperature in TEXTS
    ]  # fmt: skip


def text_digests() -> list[str]:
    return [hashlib.sha256(json.dumps(kept.tokens.tolist()).encode()).hexdigest()[:16] for kept in recordings()]


def accepted(name: str) -> list[list[int]]:
    """By text, draft tokens kept in each round."""
    found = [replay(pipeline(name), kept) for kept in recordings()]
    assert not any(generation.faults for generation in found)
    return [[len(done.verdict.path) for done in generation.rounds or ()] for generation in found]


@cache
def guard() -> Any:
    return json.loads(GUARD.read_text())


def test_texts_are_those_of_the_guard():
    assert text_digests() == guard()["texts"], f"The target decodes otherwise; {REFRESH} writes new figures."


def test_the_guard_names_pipelines_that_there_are():
    assert set(guard()["accepted"]) <= set(NAMES), f"A pipeline is gone; {REFRESH} leaves it out."


@pytest.mark.parametrize("name", NAMES)
def test_accepted_per_round_is_as_it_was(name):
    assert name in guard()["accepted"], f"A new pipeline; {REFRESH} takes it in."
    assert accepted(name) == guard()["accepted"][name], f"It drafts otherwise; if that is meant, {REFRESH}."


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    table = {"texts": text_digests(), "accepted": {name: accepted(name) for name in NAMES}}
    rows = ",\n".join(f"    {json.dumps(name)}: {json.dumps(rounds)}" for name, rounds in table["accepted"].items())
    GUARD.write_text(f'{{\n  "texts": {json.dumps(table["texts"])},\n  "accepted": {{\n{rows}\n  }}\n}}\n')
