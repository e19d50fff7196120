"""Auditing an output: plain forwards over the given text, and what is and is not the target's own choice there."""

import math

import numpy as np
import pytest
import torch
from hf.families import FAMILIES, VOCAB_SIZE
from hf.reference import generated, last_logits

from treegraft.audit import Difference, audit
from treegraft.errors import RequestError
from treegraft.interfaces import TargetModel
from treegraft.sampling import SamplingOptions, SamplingRules, SeededDraws
from treegraft_plugins.hf import audit as hf_audit
from treegraft_plugins.hf.target import HFCausalLMTarget

PROMPT = np.array([5, 9, 3, 7, 11, 4, 8], dtype=np.int64)
GREEDY = SamplingRules()


@pytest.fixture
def model():
    return FAMILIES["llama"]()


@pytest.fixture
def target(model):
    return HFCausalLMTarget(model, self_check=False)


@pytest.fixture
def output(model):
    return generated(model, PROMPT.tolist(), 12)


# -- the forwards -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [1, 7])
@pytest.mark.parametrize("family", ["llama", "mistral_window", "gemma3", "gpt2"])
def test_rows_are_those_of_plain_forwards_whatever_the_chunks(family, start, monkeypatch):
    monkeypatch.setattr(hf_audit, "_PROMPT_CHUNK", 4)
    monkeypatch.setattr(hf_audit, "_CHUNK", 5)
    model = FAMILIES[family]()
    tokens = np.random.default_rng(3).integers(3, VOCAB_SIZE, 20)
    chunks = [scores.tensor for scores in HFCausalLMTarget(model, self_check=False).teacher_force(tokens, start)]
    assert len(chunks) > 2, "one chunk would prove nothing about chunks"
    expected = torch.stack([last_logits(model, tokens[:size]) for size in range(start, 20)])
    torch.testing.assert_close(torch.cat(chunks), expected, rtol=0, atol=1e-9)


def test_a_target_without_a_way_of_its_own_goes_token_by_token(target):
    tokens = np.random.default_rng(4).integers(3, VOCAB_SIZE, 14)
    own = torch.cat([scores.tensor for scores in target.teacher_force(tokens, 6)])
    default = torch.cat([scores.tensor for scores in TargetModel.teacher_force(target, tokens, 6)])
    assert len(default) == 8
    torch.testing.assert_close(default, own, rtol=0, atol=1e-9)


# -- greedy -----------------------------------------------------------------------------------------------------------


def test_the_targets_own_text_has_no_differences(target, output):
    assert audit(target, PROMPT, output, GREEDY) == []
    assert audit(target, PROMPT, [], GREEDY) == []


def test_a_planted_token_is_found_with_its_gap(target, model, output):
    planted = (output[4] + 1) % VOCAB_SIZE
    (found,) = audit(target, PROMPT, [*output[:4], planted], GREEDY)
    log_probs = last_logits(model, np.array([*PROMPT, *output[:4]])).log_softmax(-1)
    assert (found.index, found.token, found.expected) == (4, planted, output[4])
    assert found.gap == pytest.approx(float(log_probs[output[4]] - log_probs[planted]), abs=1e-5)
    assert found.gap > 1e-2, "no near-tie"


def test_a_near_tie_is_found_with_a_gap_that_says_rounding(model, output):
    twin = next(token for token in range(3, VOCAB_SIZE) if token not in output and token not in PROMPT)
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        head[twin] = head[output[0]] * (1 - 1e-5)
    (found,) = audit(HFCausalLMTarget(model, self_check=False), PROMPT, [twin], GREEDY)
    assert (found.index, found.token, found.expected) == (0, twin, output[0])
    assert 0 < found.gap < 1e-3


def test_the_choice_is_made_under_the_requests_processors(model, output):
    model.generation_config.repetition_penalty = 1.8
    target = HFCausalLMTarget(model, self_check=False)
    penalised = generated(model, PROMPT.tolist(), 24)
    rules = target.sampling_rules(PROMPT, SamplingOptions(), 24)
    assert audit(target, PROMPT, penalised, rules) == []
    assert audit(target, PROMPT, penalised, GREEDY), "the penalty changed nothing: the line above proves nothing"


def test_a_token_that_a_processor_rules_out_has_an_infinite_gap(model, output):
    model.generation_config.suppress_tokens = [output[0]]
    target = HFCausalLMTarget(model, self_check=False)
    (found,) = audit(target, PROMPT, output[:1], target.sampling_rules(PROMPT, SamplingOptions(), 1))
    assert found.token == output[0] != found.expected
    assert found.gap == float("inf")


# -- sampled ----------------------------------------------------------------------------------------------------------


def sampled(target, model, seed, size=12, **options):
    """Plain sampling with our draws, and its rules."""
    rules = target.sampling_rules(PROMPT, SamplingOptions(temperature=1.2, **options), size)
    tokens, draws = PROMPT, SeededDraws(seed)
    for _ in range(size):
        logits = last_logits(model, tokens).float()[None]
        probs = rules.process(torch.tensor(tokens)[None], logits).double().softmax(-1)
        tokens = np.append(tokens, draws.choose(probs, np.array([len(tokens)]))[0])
    return tokens[len(PROMPT) :].tolist(), rules


def test_sampled_text_is_what_its_seed_draws_and_no_other(target, model, output):
    text, rules = sampled(target, model, seed=3)
    assert text != output, "as good as greedy: it would prove nothing"
    assert audit(target, PROMPT, text, rules, seed=3) == []
    other = audit(target, PROMPT, text, rules, seed=4)
    assert other and max(each.gap for each in other) > 1e-2


def test_the_gap_of_a_sampled_token_is_what_its_log_probability_lacks_to_be_drawn(target, model):
    text, rules = sampled(target, model, seed=3)
    probs = rules.process(torch.tensor(PROMPT)[None], last_logits(model, PROMPT).float()[None]).double().softmax(-1)[0]
    at = np.array([len(PROMPT)])
    for token in {0, VOCAB_SIZE - 1} - {text[0]}:
        (found,) = audit(target, PROMPT, [token], rules, seed=3)
        assert found == Difference(0, token, text[0], found.gap)
        assert found.gap > 1e-2, "no near-tie"
        for factor, drawn in [(0.99, text[0]), (1.01, token)]:
            raised = probs.clone()
            raised[token] *= math.exp(factor * found.gap)
            assert SeededDraws(3).choose(raised[None], at)[0] == drawn


def test_a_near_tie_in_a_draw_is_found_with_a_gap_that_says_rounding(target, model, output, monkeypatch):
    _, rules = sampled(target, model, seed=3, size=1)
    twin = next(token for token in range(3, VOCAB_SIZE) if token not in output and token not in PROMPT)
    monkeypatch.setattr(SeededDraws, "exponentials", lambda self, position, size: np.ones(size))
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        head[twin] = head[output[0]] * (1 - 1e-5)
    (found,) = audit(target, PROMPT, [twin], rules, seed=3)
    assert (found.token, found.expected) == (twin, output[0])
    assert 0 < found.gap < 1e-3


def test_a_token_outside_the_support_has_an_infinite_gap(target, model):
    _, rules = sampled(target, model, seed=3, size=1, top_k=2)
    worst = int(last_logits(model, PROMPT).argmin())
    (found,) = audit(target, PROMPT, [worst], rules, seed=3)
    assert found.gap == float("inf")


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [([VOCAB_SIZE], "the token 64"), ([-1], "the token -1"), ([3] * 260, "267 tokens with the")],
)
def test_an_output_that_cannot_be_the_targets_is_refused(target, token_ids, message):
    with pytest.raises(RequestError, match=message):
        audit(target, PROMPT, token_ids, GREEDY)
