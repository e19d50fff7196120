"""Clones share weights and nothing else: threads on clones write what one pipeline writes, one prompt after another."""

import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hf.families import FAMILIES, middle_of
from transformers.utils import logging

import treegraft
from treegraft.errors import ComposeError, PipelineBusyError
from treegraft.registry import packaged_registry
from treegraft_plugins.drafters.ngram import NGramDrafter
from treegraft_plugins.hf import drafter as drafter_module
from treegraft_plugins.hf import target as target_module

ALWAYS = ("costs={use: fixed}", "budget={use: fixed, verify_nodes: 16}")
PROMPTS = [[7, 41, 3, 18, 7, 41, 3], [5], [9, 9, 30, 2], [60, 1, 44, 12, 60, 1]]
NUM_TOKENS = 10


@pytest.fixture(scope="module")
def models():
    target = FAMILIES["llama"]()
    return {"target": target, "middle": middle_of(target)}


@pytest.fixture(scope="module")
def pipeline(models):
    return load("treegraft_fixed", models)


def load(name, models, *overrides):
    return treegraft.load(name, *ALWAYS, *overrides, models=models, registry=packaged_registry())


def outcome(result):
    return result.token_ids, result.accepted_histogram, result.source_calls, result.faults


def test_four_threads_on_four_clones_write_what_one_pipeline_writes(pipeline):
    def request(one, index):
        options = {"temperature": 0.9, "seed": index} if index % 2 else {}
        return outcome(one.generate(PROMPTS[index], NUM_TOKENS, **options))

    expected = [request(pipeline, index) for index in range(4)]
    assert sum(accepted * count for _, histogram, _, _ in expected for accepted, count in histogram.items()) > 0
    clones = [pipeline.clone() for _ in range(4)]
    start = threading.Barrier(4)

    def work(index):
        start.wait()
        return request(clones[index], index)

    filters, verbosity = list(warnings.filters), logging.get_verbosity()
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == expected
    assert (warnings.filters, logging.get_verbosity()) == (filters, verbosity), "left behind by one thread in another"
    assert request(pipeline, 0) == expected[0]


def test_two_threads_on_one_pipeline_are_told_apart_by_an_error(pipeline):
    rounds = pipeline.rounds(PROMPTS[0], NUM_TOKENS)
    next(rounds)
    with ThreadPoolExecutor(1) as pool:
        refused = pool.submit(pipeline.generate, PROMPTS[1], 2)
        with pytest.raises(PipelineBusyError, match="one request at a time"):
            refused.result()
        clone = pipeline.clone()  # of a pipeline in the middle of a request
        assert pool.submit(clone.generate, PROMPTS[1], 4).result().token_ids
    rounds.close()
    assert pipeline.generate(PROMPTS[1], 4).token_ids == clone.generate(PROMPTS[1], 4).token_ids


def test_a_clone_shares_weights_and_no_state_and_loads_and_checks_nothing(pipeline, models, monkeypatch):
    def never(*args, **options):
        raise AssertionError("done again for a clone")

    for module in (target_module, drafter_module):
        monkeypatch.setattr(module, "check_trees", never)
    monkeypatch.setattr(torch.nn.Module, "__deepcopy__", never, raising=False)
    clone = pipeline.clone()
    assert clone.target.model is models["target"] is pipeline.target.model
    assert clone.target is not pipeline.target and clone.costs is not pipeline.costs
    for one, other in zip(clone.sources, pipeline.sources, strict=True):
        assert one.drafter is not other.drafter and type(one.drafter) is type(other.drafter)
    assert clone.clone().target.model is models["target"]


def test_measured_costs_go_along_as_a_copy_and_are_not_measured_again(models, monkeypatch):
    pipeline = load("all_small", models, "costs={use: measured, cache: false}")
    monkeypatch.setattr("treegraft_plugins.costs._measure_target", None)
    clone = pipeline.clone()
    assert clone.costs.table() == pipeline.costs.table()
    before = pipeline.costs.table()
    clone.costs.record_target(1, 8, 1e6)
    assert clone.costs.table() != before == pipeline.costs.table()


def test_objects_of_the_callers_are_cloned_where_they_can_be_and_refused_by_name_where_not(models):
    mine = {**models, "target": target_module.HFCausalLMTarget(models["target"])}
    assert load("treegraft_fixed", mine).clone().target.model is models["target"]
    with pytest.raises(ComposeError, match=r"sources\.middle\.draft.*NGramDrafter object, which cannot be cloned"):
        load("all_middle", {**models, "middle": NGramDrafter()}).clone()
