"""Processors, criteria and EOS are the ones that transformers' own generate would use, built by it."""

import logging as standard_logging

import numpy as np
import pytest
import torch
from hf.families import FAMILIES
from transformers import GenerationConfig
from transformers.utils import logging

from treegraft.errors import RequestError
from treegraft.interfaces import ModelSpec, Wants
from treegraft.sampling import SamplingOptions, SeededDraws, TokenSampler
from treegraft.tree import DraftTree
from treegraft_plugins.hf.rules import warpers
from treegraft_plugins.hf.target import HFCausalLMTarget

PROMPT = np.array([5, 9, 11, 9, 11])
GREEDY = SamplingOptions()
SAMPLED = SamplingOptions(temperature=0.7, top_p=0.9, top_k=12)


@pytest.fixture(scope="module")
def demo():
    return HFCausalLMTarget(ModelSpec("demo:target"))


def target_with(**settings):
    model = FAMILIES["llama"]()
    model.generation_config = GenerationConfig(pad_token_id=0, **settings)
    return HFCausalLMTarget(model, self_check=False)


def names(rules):
    return [type(processor).__name__ for processor in rules.processors]


def decode(target, options, max_new_tokens, prompt=PROMPT):
    """Plain decoding by one-row rounds; the tokens and why it ended."""
    rules = target.sampling_rules(prompt, options, max_new_tokens)
    sampler = TokenSampler(prompt, rules, SeededDraws(0), max_new_tokens)
    target.prefill([prompt], Wants())
    while sampler.stop_reason is None:
        tree = DraftTree.rooted(int(sampler.tokens[-1]))
        sampler.begin(tree, target.score([tree])[0])
        sampler.next(0)
        target.commit([np.zeros(0, np.int32)])
    return sampler.emitted, sampler.stop_reason


SETTINGS = {
    "nothing": {},
    "repetition penalty": {"repetition_penalty": 0.2},  # below one it invites repeats
    "no repeated n-gram": {"repetition_penalty": 0.2, "no_repeat_ngram_size": 2},
    "bad words": {"bad_words_ids": [[30], [50, 28]]},
    "suppressed": {"suppress_tokens": [27, 30, 31], "begin_suppress_tokens": [1, 2, 3]},
    "forced first": {"forced_bos_token_id": 7},
    "end token": {"eos_token_id": list(range(20, 40))},
    "end token, not too soon": {"eos_token_id": list(range(20, 40)), "min_new_tokens": 6},
    "end token, not below a length": {"eos_token_id": 50, "min_length": len(PROMPT) + 5},
    "forced last": {"eos_token_id": 63, "forced_eos_token_id": 63},
    "longer is worse": {"eos_token_id": 5, "exponential_decay_length_penalty": (3, 1.5)},
    "biased": {"sequence_bias": [[[51], -50.0], [[3, 4], 20.0]]},
    "guided": {"guidance_scale": 1.8},
    "watermarked": {"watermarking_config": {"bias": 3.0, "seeding_scheme": "selfhash"}},
    "renormalised": {"renormalize_logits": True, "remove_invalid_values": True},
    "sampling settings, which the caller replaces": {
        "do_sample": True, "temperature": 0.3, "top_k": 3, "top_p": 0.5, "min_p": 0.3, "typical_p": 0.4,
        "epsilon_cutoff": 0.1, "eta_cutoff": 0.1,
    },
    "inconsistent sampling settings": {"temperature": 0.3, "top_k": 3},
    "a default length": {"max_length": 7, "max_new_tokens": 3},
    "another cache": {"cache_implementation": "static"},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
}  # fmt: skip


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_greedy_text_is_what_generate_gives_under_the_models_settings(settings):
    prompt = prompt_for(settings)
    with _quiet():
        target = target_with(**settings)
        expected = target.model.generate(torch.tensor(prompt)[None], do_sample=False, max_new_tokens=12)
    emitted, reason = decode(target, GREEDY, 12, prompt)
    assert emitted == expected[0, len(prompt) :].tolist()
    assert reason == ("eos" if len(emitted) < 12 or "forced_eos_token_id" in settings else "length")


def prompt_for(settings):
    return PROMPT[:1] if "forced_bos_token_id" in settings else PROMPT  # forced after one token


def test_the_settings_above_change_the_text():
    """So that the test above proves something: each has a text of its own, but those that change nothing."""
    inert = {"renormalised", "another cache", "prompt lookup", "a default length"}
    inert |= {name for name in SETTINGS if "sampling" in name}
    with _quiet():
        texts = {name: decode(target_with(**it), GREEDY, 12, prompt_for(it))[0] for name, it in SETTINGS.items()}
        texts["nothing after one token"] = decode(target_with(), GREEDY, 12, PROMPT[:1])[0]
    assert all(texts.pop(name) == texts["nothing"] for name in inert)
    assert len({tuple(text) for text in texts.values()}) == len(texts)


class _quiet:
    """transformers remarks on odd settings at other times too, which is its own affair."""

    def __enter__(self):
        self._verbosity = logging.get_verbosity()
        logging.set_verbosity(standard_logging.CRITICAL)

    def __exit__(self, *_):
        logging.set_verbosity(self._verbosity)


def test_the_callers_options_come_after_the_models_processors():
    rules = target_with(repetition_penalty=1.2, do_sample=True, min_p=0.2, top_k=5).sampling_rules(PROMPT, SAMPLED, 8)
    assert names(rules) == [
        "RepetitionPenaltyLogitsProcessor", "TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper",
    ]  # fmt: skip
    assert not rules.greedy
    assert not rules.stateless


def test_temperature_one_and_nothing_else_processes_nothing():
    """generate's own default of top_k=50 is a sampling setting too: the caller asked for none."""
    rules = target_with().sampling_rules(PROMPT, SamplingOptions(temperature=1.0), 8)
    assert names(rules) == []
    assert rules.stateless


def test_stateless_means_every_processor_is_a_known_warper():
    assert target_with().sampling_rules(PROMPT, SAMPLED, 8).stateless
    assert not target_with(renormalize_logits=True).sampling_rules(PROMPT, GREEDY, 8).stateless


def test_eos_and_length_are_left_to_the_sampler():
    rules = target_with(eos_token_id=[3, 4]).sampling_rules(PROMPT, GREEDY, 8)
    assert rules.eos_ids == {3, 4}
    assert rules.criteria == ()
    assert target_with().sampling_rules(PROMPT, GREEDY, 8).eos_ids == frozenset()


def test_other_criteria_end_the_request():
    emitted, reason = decode(target_with(max_time=0.0), GREEDY, 12)
    assert (len(emitted), reason) == (1, "stop")


def test_no_new_tokens_is_a_request_like_any_other():
    assert decode(target_with(), GREEDY, 0) == ([], "length")


@pytest.mark.parametrize("where", ["caller", "model"])
def test_stop_strings_end_the_text_once_they_appear(demo, where, monkeypatch):
    prompt = np.array(demo.tokenizer("import os\nimport").input_ids)
    text = demo.tokenizer.decode(decode(demo, GREEDY, 24, prompt)[0])
    stop = text[text.index("\n") + 1 :][:3]  # inside a line, across tokens
    if where == "model":
        monkeypatch.setattr(demo.model.generation_config, "stop_strings", [stop])
    emitted, reason = decode(demo, SamplingOptions(stop=(stop,) if where == "caller" else ()), 24, prompt)
    text = demo.tokenizer.decode(emitted)
    assert reason == "stop"
    assert stop in text
    assert stop not in demo.tokenizer.decode(emitted[:-1])
    expected = demo.model.generate(
        torch.tensor(prompt)[None], do_sample=False, max_new_tokens=24, stop_strings=[stop], tokenizer=demo.tokenizer
    )
    assert emitted == expected[0, len(prompt) :].tolist()


def test_stop_strings_without_a_tokenizer_are_refused():
    for rules in (target_with().sampling_rules, lambda prompt, options, _length: warpers(options)):
        with pytest.raises(RequestError, match="tokenizer"):
            rules(PROMPT, SamplingOptions(stop=("x",)), 8)


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"token_healing": True}, "token_healing"),
        ({"force_words_ids": [[3]], "num_beams": 2}, "constrained_beam_search"),
        ({"eos_token_id": 3, "suppress_tokens": [3], "forced_eos_token_id": 3}, "suppress_tokens"),
    ],
)
def test_what_cannot_be_honoured_is_refused(settings, found):
    target = target_with()
    for name, value in settings.items():
        setattr(target.model.generation_config, name, value)
    with pytest.raises(RequestError, match=found):
        target.sampling_rules(PROMPT, GREEDY, 8)


@pytest.mark.parametrize("name", ["nothing", "another cache", "watermarked", "a default length"])
@pytest.mark.parametrize("options", [GREEDY, SAMPLED])
def test_the_callers_model_is_left_as_it_was_and_nothing_is_said(name, options, capfd):
    with _quiet():
        target = target_with(**SETTINGS[name])
    model = target.model
    verbosity = logging.get_verbosity()
    before = (set(vars(model)), model.config.to_dict(), model.generation_config.to_dict())
    capfd.readouterr()
    target.sampling_rules(PROMPT, options, 8)
    assert (set(vars(model)), model.config.to_dict(), model.generation_config.to_dict()) == before
    assert logging.get_verbosity() == verbosity
    assert capfd.readouterr() == ("", "")


def test_building_the_rules_forwards_nothing():
    target = target_with(repetition_penalty=1.2)
    target.model.register_forward_pre_hook(lambda *_: pytest.fail("a forward"))
    target.sampling_rules(PROMPT, GREEDY, 8)


def test_warpers_alone_follow_generates_order():
    assert names(warpers(SAMPLED)) == ["TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper"]
    assert warpers(SAMPLED).stateless
    assert warpers(GREEDY).greedy
    assert names(warpers(GREEDY)) == names(warpers(SamplingOptions(temperature=1.0))) == []
    scores = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    theirs = target_with().sampling_rules(PROMPT, SAMPLED, 8)
    ids = torch.tensor(PROMPT)[None]
    assert torch.equal(warpers(SAMPLED).process(ids, scores), theirs.process(ids, scores))
