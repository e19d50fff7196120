"""Where requests begin and end: short prompts, limits, EOS, ties, the model's own generation settings, stop strings.

All against transformers' own `generate` on tiny float64 models; `load` shares one target among the tests.
"""

import copy
import random
import warnings

import numpy as np
import pytest
import torch
from hf.families import FAMILIES, VOCAB_SIZE, build, middle_of
from hf.reference import generated

import treegraft
from treegraft.registry import packaged_registry
from treegraft_plugins.hf.target import HFCausalLMTarget

DRAFT_ALWAYS = ("costs={use: fixed}", "budget={use: fixed, verify_nodes: 63}")
DRAFTING = ("all_small", "all_middle", "treegraft_fixed", "overwrite")
NUM_TOKENS = 24
PROMPT = [7, 41, 3, 18, 7, 41, 3, 29, 50, 7]
SAMPLING = {"temperature": 0.8, "top_p": 0.9, "seed": 5}


@pytest.fixture(scope="module")
def llama():
    return FAMILIES["llama"]()


@pytest.fixture(scope="module")
def models(llama):
    return {"target": HFCausalLMTarget(llama), "middle": middle_of(llama)}


@pytest.fixture(scope="module")
def pipelines(models):
    return {name: load(name, models) for name in ("plain", *DRAFTING)}


@pytest.fixture(params=DRAFTING)
def pipeline(request, pipelines):
    return pipelines[request.param]


@pytest.fixture
def settings(llama, monkeypatch):
    """The model's generation_config, the test's own to change."""
    own = copy.deepcopy(llama.generation_config)
    monkeypatch.setattr(llama, "generation_config", own)
    return own


def load(name, models, *overrides, **options):
    return treegraft.load(name, *DRAFT_ALWAYS, *overrides, models=models, registry=packaged_registry(), **options)


def accepted(result):
    return sum(num_accepted * count for num_accepted, count in result.accepted_histogram.items())


# -- short ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4])
def test_prompts_shorter_than_the_n_gram(pipeline, llama, num_tokens):
    result = pipeline.generate(PROMPT[:num_tokens], NUM_TOKENS)
    assert result.token_ids == generated(llama, PROMPT[:num_tokens], NUM_TOKENS)
    assert accepted(result) > 0


def test_one_token_prompts_begin_with_nothing_in_any_cache(pipeline, llama):
    """Every token as the whole prompt: the first round has no context but its root."""
    for token in range(0, VOCAB_SIZE, 7):
        assert pipeline.generate([token], 3).token_ids == generated(llama, [token], 3)


def test_no_new_tokens_need_no_forward(pipeline):
    result = pipeline.generate(PROMPT, 0)
    assert (result.token_ids, result.finish_reason, result.target_calls) == ([], "length", 0)


@pytest.mark.parametrize("max_new_tokens", range(1, 9))
def test_the_token_limit_cuts_blocks_anywhere(pipeline, llama, max_new_tokens):
    result = pipeline.generate(PROMPT, max_new_tokens)
    assert result.token_ids == generated(llama, PROMPT, max_new_tokens)
    assert result.finish_reason == "length"
    assert (result.target_calls == 1) or max_new_tokens > 1


# -- EOS --------------------------------------------------------------------------------------------------------------


def test_eos_ends_the_text_wherever_in_a_block_it_falls(pipeline, llama, settings):
    """Each token that plain decoding emits becomes the EOS in turn; the prompt holds most of them already."""
    prompt = [5, *generated(llama, [5], 12)]
    places, num_rejected = set(), 0
    for eos in dict.fromkeys(generated(llama, prompt, NUM_TOKENS)):
        settings.eos_token_id = eos
        result = pipeline.generate(prompt, NUM_TOKENS, keep_rounds=True)
        assert result.token_ids == generated(llama, prompt, NUM_TOKENS)
        assert result.token_ids.index(eos) == len(result.token_ids) - 1
        assert result.finish_reason == "eos"
        *rounds, last = result.rounds
        places.add((len(last.tokens) - 1, "accepted" if last.verdict.bonus_token is None else "bonus"))
        # Before the last round no EOS can have been accepted.
        num_rejected += sum(int((record.pruned.token[1:] == eos).sum()) for record in rounds)
    assert {(0, "accepted"), (1, "accepted")} <= places
    assert max(places) > (2, "")
    assert "bonus" in {place for _, place in places}
    assert num_rejected > 0


@pytest.mark.parametrize("num_ids", [2, 3])
def test_the_first_of_several_eos_ids_ends_the_text(pipeline, llama, settings, num_ids):
    emitted = list(dict.fromkeys(generated(llama, PROMPT, NUM_TOKENS)))
    settings.eos_token_id = emitted[-num_ids:]
    result = pipeline.generate(PROMPT, NUM_TOKENS)
    assert result.token_ids == generated(llama, PROMPT, NUM_TOKENS)
    assert (result.token_ids[-1], result.finish_reason) == (emitted[-num_ids], "eos")


def test_without_eos_text_runs_to_its_length(pipeline, llama, settings):
    assert settings.eos_token_id is None
    result = pipeline.generate(PROMPT, 3 * NUM_TOKENS)
    assert result.token_ids == generated(llama, PROMPT, 3 * NUM_TOKENS)
    assert result.finish_reason == "length"


def test_eos_as_the_very_last_token_allowed_is_reported_as_eos(pipeline, llama, settings):
    emitted = generated(llama, PROMPT, NUM_TOKENS)
    place = next(i for i, token in enumerate(emitted) if i and token not in emitted[:i])
    settings.eos_token_id = emitted[place]
    assert pipeline.generate(PROMPT, place + 1).finish_reason == "eos"
    assert pipeline.generate(PROMPT, place).finish_reason == "length"


def test_eos_in_the_prompt_ends_nothing(pipeline, llama, settings):
    settings.eos_token_id = next(token for token in PROMPT if token not in generated(llama, PROMPT, 5))
    result = pipeline.generate(PROMPT, 5)
    assert result.token_ids == generated(llama, PROMPT, 5)
    assert result.finish_reason == "length"


# -- context limits ---------------------------------------------------------------------------------------------------

SHORT = 32


@pytest.fixture(scope="module", params=["Llama", "GPT2"])
def short(request):
    """A target whose context ends at SHORT tokens; without learnt positions, with them."""
    absent = {"num_key_value_heads": None, "intermediate_size": None} if request.param == "GPT2" else {}
    return build(request.param, {"max_position_embeddings": SHORT, **absent})


@pytest.fixture(scope="module")
def short_models(short):
    return {"target": HFCausalLMTarget(short), "middle": middle_of(short)}


@pytest.mark.parametrize("name", ("plain", *DRAFTING))
@pytest.mark.parametrize("num_prompt", [1, 10, SHORT - 2, SHORT - 1])
def test_text_ends_at_the_targets_context_limit(short, short_models, name, num_prompt):
    prompt = np.resize(PROMPT, num_prompt).tolist()
    result = load(name, short_models).generate(prompt, 1000)
    assert result.token_ids == generated(short, prompt, SHORT - num_prompt)
    assert len(result.token_ids) == SHORT - num_prompt
    assert result.finish_reason == "context_limit"


def test_a_prompt_that_fills_the_context_gets_no_token_and_a_longer_one_is_refused(short_models):
    pipeline = load("treegraft_fixed", short_models)
    result = pipeline.generate([5] * SHORT, 10)
    assert (result.token_ids, result.finish_reason) == ([], "context_limit")
    with pytest.raises(treegraft.RequestError, match=f"{SHORT + 1} tokens.*\n.*holds {SHORT}"):
        pipeline.generate([5] * (SHORT + 1), 10)


def test_a_length_within_the_context_is_no_context_limit(short, short_models):
    pipeline = load("treegraft_fixed", short_models)
    assert pipeline.generate(PROMPT, SHORT - len(PROMPT)).finish_reason == "length"
    assert pipeline.generate(PROMPT, SHORT - len(PROMPT) + 1).finish_reason == "context_limit"


def test_generate_of_transformers_ends_there_by_itself_only_without_a_length(short):
    """Asked for more, it goes on: learnt positions raise, rotary ones run on past what the model was made for."""
    ids = torch.tensor([PROMPT])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a default length is deprecated
        ends = short.generate(torch.tensor([PROMPT * 2]), do_sample=False).shape[1]
    assert ends == SHORT < 2 * len(PROMPT) + 20
    if short.config.model_type == "gpt2":
        with pytest.raises(IndexError):
            short.generate(ids, do_sample=False, max_new_tokens=SHORT)
    else:
        assert short.generate(ids, do_sample=False, max_new_tokens=SHORT).shape[1] == len(PROMPT) + SHORT > SHORT


def calls_middle(record):
    return any(step.source == "middle" and len(step.positions) for step in record.state.steps)


@pytest.mark.parametrize("name", ["all_middle", "treegraft_fixed", "overwrite"])
def test_a_drafter_at_its_context_limit_falls_silent_and_the_text_goes_on(name):
    """Learnt positions: one past the drafter's limit would raise."""
    target = FAMILIES["gpt2"]()
    middle = middle_of(target)
    weights = middle.state_dict()
    weights["transformer.wpe.weight"] = weights["transformer.wpe.weight"][:SHORT]
    middle = build("GPT2", {"max_position_embeddings": SHORT, "num_key_value_heads": None, "intermediate_size": None})
    middle.load_state_dict(weights)
    result = load(name, {"target": target, "middle": middle}).generate(PROMPT, 2 * SHORT, keep_rounds=True)
    assert result.token_ids == generated(target, PROMPT, 2 * SHORT)
    assert (result.finish_reason, result.faults) == ("length", [])
    within = {record.state.position for record in result.rounds if record.state.position < SHORT}
    called = {record.state.position for record in result.rounds if calls_middle(record)}
    assert called <= within
    if name != "overwrite":  # whose scheduler may do without
        assert called == within
    assert result.rounds[-1].state.position > SHORT
    assert any(len(record.verdict.path) for record in result.rounds if record.state.position < SHORT)


# -- ties -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("penalty", [None, 1.0001], ids=["bare arg-max", "with a processor"])
@pytest.mark.parametrize("name", ("plain", *DRAFTING))
def test_tied_logits_give_the_same_token_on_every_path(name, penalty):
    """Each row of the head stands there twice: every token ties with its twin, half a vocabulary away."""
    model = FAMILIES["llama"]()
    half = VOCAB_SIZE // 2
    with torch.no_grad():
        model.lm_head.weight[half:] = model.lm_head.weight[:half]
        logits = model(torch.tensor([PROMPT])).logits[0]
    assert torch.equal(logits[:, half:].float(), logits[:, :half].float())  # as both decoders compare them
    model.generation_config.repetition_penalty = penalty
    models = {"target": HFCausalLMTarget(model), "middle": middle_of(model)}
    pipeline = load(name, models)
    greedy = pipeline.generate(PROMPT, NUM_TOKENS)
    assert greedy.token_ids == generated(model, PROMPT, NUM_TOKENS)
    assert (accepted(greedy) > 0) == (name != "plain")
    if penalty is None:
        assert max(greedy.token_ids) < half  # the first of two
    sampled = load("plain", models).generate(PROMPT, NUM_TOKENS, **SAMPLING).token_ids
    assert pipeline.generate(PROMPT, NUM_TOKENS, **SAMPLING).token_ids == sampled
    assert max(sampled) >= half > min(sampled)


# -- the caller's model -----------------------------------------------------------------------------------------------


def state(model):
    """All that a caller could see change."""
    return (
        model.config.to_dict(),
        model.generation_config.to_dict(),
        model.training,
        {name: (p.requires_grad, p.grad, p.data_ptr()) for name, p in model.named_parameters()},
        {name: (m.training, len(m._forward_hooks), len(m._forward_pre_hooks)) for name, m in model.named_modules()},
    )


@pytest.mark.parametrize("name", DRAFTING)
def test_loading_and_generating_leaves_models_and_global_state_as_they_were(name):
    target = FAMILIES["gemma3"]()
    middle = middle_of(target)
    for parameter in list(target.parameters())[::2]:
        parameter.requires_grad_(False)
    target.generation_config.update(do_sample=True, temperature=1.3, top_k=7, repetition_penalty=1.2)
    weights = {name: value.clone() for name, value in target.state_dict().items()}
    before = copy.deepcopy((state(target), state(middle)))
    randomness = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()

    pipeline = load(name, {"target": target, "middle": middle})
    for options in ({}, SAMPLING):
        assert accepted(pipeline.generate(PROMPT, NUM_TOKENS, **options)) > 0

    assert (state(target), state(middle)) == before
    assert all(torch.equal(value, weights[name]) for name, value in target.state_dict().items())
    assert torch.equal(torch.get_rng_state(), randomness[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == randomness[1:]
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()


# -- the model's generation_config ------------------------------------------------------------------------------------

HONOURED = {
    "repetition_penalty": {"repetition_penalty": 1.5},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "min_new_tokens": {"eos_token_id": "emitted", "min_new_tokens": 9},
    "min_length": {"eos_token_id": "emitted", "min_length": len(PROMPT) + 9},
    "suppress_tokens": {"suppress_tokens": "emitted"},
    "begin_suppress_tokens": {"begin_suppress_tokens": "emitted"},
    "bad_words_ids": {"bad_words_ids": "pairs"},
    "sequence_bias": {"sequence_bias": "bias"},
    "forced_eos_token_id": {"forced_eos_token_id": "first"},
    "exponential_decay_length_penalty": {"eos_token_id": 2, "exponential_decay_length_penalty": [3, 1.9]},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 2.0},
    "eos list": {"eos_token_id": "last two"},
    "watermark": {"watermarking_config": {"bias": 4.0, "greenlist_ratio": 0.5}},
    "all at once": {"eos_token_id": "last two", "min_new_tokens": 5, "no_repeat_ngram_size": 3,
                    "repetition_penalty": 1.2},
}  # fmt: skip


def setting(value, emitted):
    """The values that depend on what the model says."""
    named = {
        "first": emitted[0],
        "emitted": [emitted[2], emitted[0]],
        "last two": list(dict.fromkeys(emitted))[-2:],
        "pairs": [emitted[3:5], [emitted[0]]],
        "bias": [[emitted[1:3], -50.0], [[emitted[6]], 5.0]],
    }
    return named[value] if isinstance(value, str) else value


@pytest.mark.parametrize("case", HONOURED)
def test_the_models_generation_config_is_honoured_as_generate_honours_it(pipeline, llama, settings, case):
    bare = generated(llama, PROMPT, NUM_TOKENS)
    settings.update(**{key: setting(value, bare) for key, value in HONOURED[case].items()})
    expected = generated(llama, PROMPT, NUM_TOKENS)
    assert expected != bare
    result = pipeline.generate(PROMPT, NUM_TOKENS)
    assert result.token_ids == expected
    if pipeline.name != "all_small":  # there may be nothing to copy
        assert accepted(result) > 0
    assert result.faults == []


def test_sampling_settings_of_the_model_are_ignored(pipeline, pipelines, llama, settings):
    greedy = generated(llama, PROMPT, NUM_TOKENS)
    sampled = pipelines["plain"].generate(PROMPT, NUM_TOKENS, **SAMPLING).token_ids
    settings.update(do_sample=True, temperature=0.2, top_p=0.3, top_k=2, min_p=0.4, typical_p=0.5)
    assert pipeline.generate(PROMPT, NUM_TOKENS).token_ids == greedy
    assert pipeline.generate(PROMPT, NUM_TOKENS, **SAMPLING).token_ids == sampled


def test_a_length_in_the_generation_config_gives_way_to_the_requests(pipeline, llama, settings):
    settings.max_length = len(PROMPT) + 3
    assert pipeline.generate(PROMPT, NUM_TOKENS).token_ids == generated(llama, PROMPT, NUM_TOKENS)


# -- one request after another ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DRAFTING)
def test_a_second_request_equals_a_fresh_pipelines(models, llama, name):
    other = [1, *PROMPT[::-1], 30]
    used, fresh = load(name, models), load(name, models)
    used.generate(other, NUM_TOKENS)
    unfinished = used.rounds(other, NUM_TOKENS)
    next(unfinished)
    unfinished.close()
    results = [each.generate(PROMPT, NUM_TOKENS, keep_rounds=True) for each in (used, fresh)]
    assert results[0].token_ids == results[1].token_ids == generated(llama, PROMPT, NUM_TOKENS)
    # Not only the text: every tree, so that nothing of the first requests is left anywhere.
    trees = [[(r.state.tree.token.tolist(), r.state.tree.path_score.tolist()) for r in each.rounds] for each in results]
    assert trees[0] == trees[1]


# -- stop strings -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo():
    pipeline = load("treegraft_fixed", {"target": "demo:target", "middle": "demo:middle"})
    text = "class Point:\n    def __init__(self, x, y):\n        self.x = x\n        self.y"
    return pipeline, text, pipeline.generate(text, 40)


def test_stop_strings_end_the_text_where_generate_ends_it(demo):
    """Strings of several lengths that begin anywhere in the text, inside tokens and inside accepted blocks too."""
    pipeline, prompt, free = demo
    ids = pipeline.tokenizer(prompt)["input_ids"]
    assert len(free.text) > 60
    inside_blocks = 0
    for begin in range(1, 46, 4):
        stop = free.text[begin : begin + 1 + begin % 5]
        result = pipeline.generate(prompt, 40, stop=stop, keep_rounds=True)
        assert result.token_ids == stopped(pipeline, ids, [stop])
        assert result.finish_reason == "stop"
        assert stop in prompt[1 - len(stop) :] + result.text  # as there, one may begin in the prompt
        inside_blocks += result.rounds[-1].verdict.bonus_token is None
    assert inside_blocks > 0


def stopped(pipeline, ids, stop):
    """New tokens of transformers' own generation with stop strings."""
    return generated(pipeline.target.model, ids, 40, stop_strings=stop, tokenizer=pipeline.tokenizer)


def test_several_stop_strings_and_those_of_the_generation_config(demo, monkeypatch):
    pipeline, prompt, free = demo
    model, ids = pipeline.target.model, pipeline.tokenizer(prompt)["input_ids"]
    early, late = "self.x", "= y\n        self.y"
    only_late, both = stopped(pipeline, ids, [late]), stopped(pipeline, ids, [late, early])
    assert len(both) < len(only_late) < len(free.token_ids)
    assert pipeline.generate(prompt, 40, stop=[late, early]).token_ids == both
    monkeypatch.setattr(model, "generation_config", copy.deepcopy(model.generation_config))
    model.generation_config.stop_strings = [late]
    assert pipeline.generate(prompt, 40).token_ids == only_late
    assert pipeline.generate(prompt, 40, stop=early).token_ids == both


def test_a_stop_string_that_never_comes_changes_nothing(demo):
    pipeline, prompt, free = demo
    result = pipeline.generate(prompt, 40, stop="\u2603")
    assert (result.token_ids, result.finish_reason) == (free.token_ids, free.finish_reason)


def test_stop_strings_without_a_tokenizer_are_refused(pipeline):
    with pytest.raises(treegraft.RequestError, match=r"(?s)stop.*without a tokenizer.*tokenizer="):
        pipeline.generate(PROMPT, 5, stop="x")
