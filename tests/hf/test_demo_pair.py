"""The embedded pair in float32, on text it was not trained on: every pipeline says what plain decoding says.

A sample; `benchmarks/equality.py` runs all prompts through all pipelines.
"""

import json
from functools import cache
from pathlib import Path

import pytest
import torch

import treegraft
from treegraft.registry import packaged_registry

HELD_OUT = Path(__file__).parents[2] / "benchmarks" / "data" / "demo_heldout.jsonl"
PROMPTS = [json.loads(line)["turns"][0] for line in HELD_OUT.read_text().splitlines()]
SAMPLE = PROMPTS[3::7]
MODELS = {"target": "demo:target", "middle": "demo:middle"}
OVERRIDES = ("costs={use: fixed}", "budget={use: fixed, verify_nodes: 63}")
SAMPLING = {"greedy": {}, "sampled": {"temperature": 0.8, "seed": 1}}
NUM_TOKENS = 48


@cache
def load(name):
    return treegraft.load(name, *OVERRIDES, models=MODELS, registry=packaged_registry())


@cache
def output(name, sampling):
    return [load(name).generate(prompt, NUM_TOKENS, **SAMPLING[sampling]) for prompt in SAMPLE]


def test_the_sample_is_several_prompts_of_several_lengths():
    lengths = {len(load("plain").tokenizer(prompt)["input_ids"]) for prompt in SAMPLE}
    assert len(PROMPTS) == 40
    assert len(lengths) == len(SAMPLE) == 6
    assert load("plain").target.model.dtype == torch.float32


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("name", ["treegraft", "treegraft_fixed", "overwrite"])
def test_output_equals_plain_decoding(name, sampling):
    results, plain = output(name, sampling), output("plain", sampling)
    assert [result.token_ids for result in results] == [result.token_ids for result in plain]
    assert [result.text for result in results] == [result.text for result in plain]
    assert sum(result.target_calls for result in results) < sum(result.target_calls for result in plain)
    assert not any(result.faults for result in results)


def test_plain_decoding_equals_generate():
    pipeline = load("plain")
    for prompt, result in zip(SAMPLE, output("plain", "greedy"), strict=True):
        inputs = pipeline.tokenizer(prompt, return_tensors="pt")
        expected = pipeline.target.model.generate(**inputs, do_sample=False, max_new_tokens=NUM_TOKENS)
        assert result.token_ids == expected[0, inputs["input_ids"].shape[1] :].tolist()
