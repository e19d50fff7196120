"""transformers' own arms: the text that transformers gives, what they tell of it, and that nothing is left behind."""

import pytest
import torch

import treegraft
from treegraft.bench.arms import Request
from treegraft.bench.lineup import RIVALS
from treegraft.interfaces import ModelSpec
from treegraft_plugins.hf.loading import load_causal_lm
from treegraft_plugins.hf.rivals import AssistedGenerate, rival, torch_seed

TEXT = "for name in sorted(names):\n    print(name)\nfor key in sorted(keys):\n"
GREEDY, SAMPLED = Request(20, 0.0, 1, "p"), Request(20, 0.8, 1, "p")


@pytest.fixture(scope="module")
def pipeline():
    return treegraft.load("plain", "target.self_check=false")


@pytest.fixture(scope="module")
def arms(pipeline):
    models = {"middle": ModelSpec("demo:middle"), "dflash": ModelSpec("demo:dflash")}
    return {name: rival(name, pipeline.target, models) for name in RIVALS}


@pytest.fixture(scope="module")
def prompt(pipeline):
    return tuple(pipeline.tokenizer(TEXT)["input_ids"])


@pytest.mark.parametrize("name", RIVALS)
def test_greedy_text_is_that_of_plain_decoding(arms, pipeline, prompt, name):
    answer = arms[name].run(prompt, GREEDY)
    assert answer.token_ids == pipeline.generate(list(prompt), 20).token_ids
    told = answer.tell()
    assert told.settings["max_new_tokens"] == 20 and told.settings["temperature"] == 0.0
    assert told.prefill_ms > 0 and told.num_prefill_tokens == told.rounds[0].emitted


@pytest.mark.parametrize("name", RIVALS)
def test_rounds_are_counted_from_outside(arms, prompt, name):
    arm = arms[name]
    forwards = []
    hook = arm.model.register_forward_pre_hook(
        lambda model, args, kwargs: forwards.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        answer = arm.run(prompt, GREEDY)
    finally:
        hook.remove()
    told = answer.tell()
    assert len(told.rounds) == len(forwards)
    assert sum(each.emitted for each in told.rounds) == 20
    assert sum(forwards) == len(prompt) + sum(each.verified for each in told.rounds) + len(told.rounds) - 1
    assert all(each.accepted == each.emitted - 1 <= each.verified for each in told.rounds)
    assert told.num_copied == (20 - len(told.rounds) if name == "hf_prompt_lookup" else 0)
    if arm.drafts:
        assert sum(each.accepted for each in told.rounds) > 0, "else this shows little"
        assert told.by_depth[0][0] == sum(each.verified > 0 for each in told.rounds)
        assert sum(accepted for _, accepted in told.by_depth) == sum(each.accepted for each in told.rounds)
    else:
        assert told.by_depth == []


def test_the_assistant_is_asked_for_so_many_tokens_and_left_as_it_was(arms, prompt):
    arm = arms["hf_assisted"]
    config = arm.assistant.generation_config
    arm.choose({"0.0": {"chosen": 4}})
    told = arm.run(prompt, GREEDY).tell()
    assert told.settings["num_assistant_tokens"] == 4
    assert told.settings["num_assistant_tokens_schedule"] == "constant"
    assert max(each.verified for each in told.rounds) <= 4
    assert sum(each.source_calls["assistant"] for each in told.rounds) >= sum(each.verified for each in told.rounds)
    assert (config.num_assistant_tokens, config.num_assistant_tokens_schedule) == (None, None)
    assert arm.assistant is load_causal_lm(ModelSpec("demo:middle"))[0], "our arms draft with the same object"


def test_prompt_lookup_copies_no_more_than_it_was_told(arms, prompt):
    arm = arms["hf_prompt_lookup"]
    arm.choose({"0.0": {"chosen": 2}})
    told = arm.run(prompt, GREEDY).tell()
    assert told.settings["prompt_lookup_num_tokens"] == 2
    assert max(each.verified for each in told.rounds) == 2


@pytest.mark.parametrize("name", RIVALS)
def test_sampling_repeats_and_leaves_torch_s_own_state_alone(arms, prompt, name):
    before = torch.random.get_rng_state()
    first = arms[name].run(prompt, SAMPLED)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert arms[name].run(prompt, SAMPLED).token_ids == first.token_ids
    assert arms[name].run(prompt, Request(20, 0.8, 2, "p")).token_ids != first.token_ids
    assert first.tell().settings["temperature"] == pytest.approx(0.8)


def test_every_prompt_and_every_repeat_has_a_torch_seed_of_its_own():
    seeds = {torch_seed(Request(20, 0.8, seed, prompt)) for seed in (1, 2) for prompt in ("a", "b")}
    assert len(seeds) == 4 and all(0 <= seed < 2**63 for seed in seeds)
    assert torch_seed(Request(9, 0.1, 1, "a")) in seeds, "of seed and prompt alone"


def test_text_ends_with_eos(arms, pipeline, prompt, monkeypatch):
    tokens = pipeline.generate(list(prompt), 20).token_ids
    eos = tokens[4]
    monkeypatch.setattr(pipeline.target.model.generation_config, "eos_token_id", eos)
    for arm in arms.values():
        answer = arm.run(prompt, GREEDY)
        assert answer.token_ids == tokens[: tokens.index(eos) + 1]
        assert sum(each.emitted for each in answer.tell().rounds) == len(answer.token_ids)


def test_the_draft_length_is_searched_for_each_temperature(pipeline, prompt):
    arm = AssistedGenerate(pipeline.target.model, load_causal_lm(ModelSpec("demo:middle"))[0])
    calls = []

    def timed(ids, request):
        calls.append((ids, request.temperature, arm.length(request)))
        best = 5 if request.temperature else 3
        return 100.0 - abs(arm.length(request) - best)

    found = arm.tune([prompt, prompt[1:]], [GREEDY, SAMPLED], timed)
    assert {temperature: each["chosen"] for temperature, each in found.items()} == {"0.0": 3, "0.8": 5}
    assert found["0.0"]["tokens_per_second"] == {"2": 99.0, "3": 100.0, "5": 98.0, "8": 95.0}
    assert len(calls) == 2 * (1 + 2 * 4), "one to warm up, then every length on every prompt"
    arm.choose(found)
    assert (arm.length(GREEDY), arm.length(SAMPLED)) == (3, 5)


@pytest.mark.parametrize(("best", "tried"), [(16, [2, 3, 5, 8, 16, 32]), (999, [2, 3, 5, 8, 16, 32, 64])])
def test_the_search_goes_on_while_the_longest_is_the_best(pipeline, prompt, best, tried):
    arm = AssistedGenerate(pipeline.target.model, load_causal_lm(ModelSpec("demo:middle"))[0])
    found = arm.tune([prompt], [GREEDY], lambda ids, request: 1000.0 - abs(arm.length(request) - best))
    assert found["0.0"]["chosen"] == min(best, 64)
    assert list(map(int, found["0.0"]["tokens_per_second"])) == tried
