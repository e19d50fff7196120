"""The exact output distribution of every pipeline is the target's: enumerated over toy models, without statistics.

Costs are fixed and accepted > 0 is asserted: with measured costs so small a target would be decoded plainly, and the
tests would prove nothing.
"""

import attrs
import numpy as np
import pytest
import torch
from exactness.toy_block import DrawnTableBlockDrafter, TableBlockDrafter
from hf.named_pipelines import for_any_models
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import NoRepeatNGramLogitsProcessor, RepetitionPenaltyLogitsProcessor

import treegraft
from treegraft.sampling import SamplingOptions
from treegraft.testing import (
    SAMPLED,
    MarkovTarget,
    TableDrafter,
    exact_generations,
    markov_table,
    max_difference,
    target_distribution,
)
from treegraft.testing.strategies import markov_tables, pipelines

NUM_TOKENS = 3
PROMPT = [0, 1, 2, 0, 1]
NAMES = for_any_models()
DRAWN = "dflash_sampled"
FIXED = ("costs={use: fixed}", "budget={use: fixed, verify_nodes: 63}")
# 1 lets most of the target's tokens miss the tree, 10 is the registry's own.
SIZES = st.sampled_from([1, 2, 10])
OPTIONS = st.sampled_from(
    [
        SAMPLED,
        SamplingOptions(temperature=0.6),
        SamplingOptions(temperature=1.7, top_p=0.8),
        SamplingOptions(temperature=1.0, top_k=2),
        SamplingOptions(),
    ]
)


def toys(name: str, target: MarkovTarget, *tables: np.ndarray) -> dict[str, object]:
    block = DrawnTableBlockDrafter if name == DRAWN else TableBlockDrafter
    return {
        "target": target,
        "middle": TableDrafter(tables[0]),
        "small": TableDrafter(tables[-1]),
        "dflash": block(tables[0]),
        "heads": TableBlockDrafter(tables[0]),
    }


def accepted_by_exact(
    pipeline: treegraft.Pipeline, options: SamplingOptions = SAMPLED, prompt: list[int] = PROMPT
) -> float:
    """Assert that the output distribution is the target's; the expected number of accepted draft tokens."""
    found: dict[tuple[int, ...], float] = {}
    accepted = 0.0
    for weight, generation in exact_generations(pipeline, prompt, NUM_TOKENS, options):
        assert not generation.faults
        output = tuple(generation.token_ids)
        found[output] = found.get(output, 0.0) + weight
        accepted += weight * sum(kept * count for kept, count in generation.accepted_histogram.items())
    assert max_difference(found, target_distribution(pipeline.target, prompt, NUM_TOKENS, options)) < 1e-9
    return accepted


@pytest.mark.parametrize("name", NAMES)
def test_every_pipeline_of_the_registry(name):
    """Any target, any drafter, narrow trees and wide ones, with and without temperature and top-p."""
    total = 0.0

    @settings(max_examples=20)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        nonlocal total
        target = MarkovTarget(data.draw(markov_tables()))
        table = data.draw(st.just(target.table) | markov_tables())
        sizes = [f"sources.{s}.{size}={data.draw(SIZES)}" for s in sources for size in ("width", "branching")]
        pipeline = treegraft.load(name, *FIXED, *sizes, models=toys(name, target, table))
        options = data.draw(OPTIONS)
        prompt = data.draw(st.sampled_from([PROMPT, [2]]))
        total += accepted_by_exact(pipeline, options, prompt)

    plain = treegraft.load(name, *FIXED, models=toys(name, MarkovTarget(np.zeros((3, 3))), np.zeros((3, 3))))
    sources = [source.name for source in plain.sources]
    check()
    assert total > 0 or name == "plain", "nothing was ever accepted: the test is empty"


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"plain"}))
def test_pipelines_as_the_registry_writes_them(name):
    """With the registry's own budget and sizes; fixed costs make verification free, so it is not declined."""
    table = markov_table(3, 2, seed=3)
    pipeline = treegraft.load(name, "costs={use: fixed}", models=toys(name, MarkovTarget(table), table))
    assert accepted_by_exact(pipeline) > 0


@settings(max_examples=40)
@given(pipelines(), OPTIONS)
def test_any_schedule_policy_selector_and_size(pipeline, options):
    accepted_by_exact(pipeline, options)


@settings(max_examples=20)
@given(pipelines(target=MarkovTarget(markov_table(3, 2, seed=5))))
def test_any_such_pipeline_accepts_something(pipeline):
    """The strategy is not empty: where every token is possible, each of its pipelines accepts now and then."""
    assert accepted_by_exact(pipeline) > 0


@settings(max_examples=20)
@given(pipelines("treegraft"))
def test_any_schedule_with_the_ngram_drafter(pipeline):
    accepted_by_exact(pipeline)


@settings(max_examples=20)
@given(pipelines(), st.sets(st.integers(0, 2), min_size=1, max_size=2))
def test_with_eos(pipeline, eos_ids):
    """Outputs that end early have their probability too."""
    pipeline.target.eos_ids = frozenset(eos_ids)
    accepted_by_exact(pipeline)


@attrs.define(eq=False)
class HistoryTarget(MarkovTarget):
    """Processors that read the history, and a criterion that ends a request."""

    def sampling_rules(self, prompt, options, max_new_tokens):
        def twice(ids: torch.Tensor, scores: object) -> bool:
            return bool(ids[0, -1] == ids[0, -2])

        rules = super().sampling_rules(prompt, options, max_new_tokens)
        processors = (RepetitionPenaltyLogitsProcessor(1.8), NoRepeatNGramLogitsProcessor(2), *rules.processors)
        return attrs.evolve(rules, processors=processors, criteria=(twice,))


@settings(max_examples=20)
@given(st.data())
def test_with_processors_that_read_the_history(data):
    """They see the true prefix of every token, inside a block and across blocks."""
    target = HistoryTarget(data.draw(markov_tables()).clip(-9.0))
    accepted_by_exact(data.draw(pipelines(target=target)), data.draw(OPTIONS), [0, 1])


@settings(max_examples=30)
@given(st.data())
def test_drawn_chains(data):
    """Any length, block by block and, where processors read the history, token by token; with and without EOS."""
    kind = data.draw(st.sampled_from([MarkovTarget, HistoryTarget]))
    target = kind(data.draw(markov_tables()).clip(-9.0), eos_ids=data.draw(st.sets(st.integers(0, 2), max_size=1)))
    drafter = DrawnTableBlockDrafter(data.draw(st.just(target.table) | markov_tables()), data.draw(st.integers(1, 3)))
    budget = f"budget={{use: fixed, verify_nodes: {data.draw(st.integers(1, 3))}}}"
    pipeline = treegraft.load(DRAWN, "costs={use: fixed}", budget, models={"target": target, "dflash": drafter})
    accepted_by_exact(pipeline, data.draw(OPTIONS), [0, 1])


@settings(max_examples=25)
@given(pipelines(), st.integers(0, 2**32), st.sampled_from([0.0, 0.5, 1.0, 2.0]))
def test_sampled_output_is_that_of_plain_decoding_with_the_same_seed(pipeline, seed, temperature):
    """Token for token, whatever the drafters, the tree and the schedule."""
    options = {"max_new_tokens": 12, "temperature": temperature, "seed": seed}
    plain = treegraft.load("plain", models={"target": pipeline.target})
    expected = plain.generate(PROMPT, **options)
    found = pipeline.generate(PROMPT, **options)
    assert found.token_ids == expected.token_ids and len(found.token_ids) == 12
    assert found.seed == expected.seed == seed
    again = pipeline.generate(PROMPT, **options)
    assert again.token_ids == found.token_ids, "and a second request is not touched by the first"
