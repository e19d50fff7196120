"""Every pipeline of the registry, on every family: the output is what the target alone gives, token for token.

Greedy against transformers' own `generate`, sampled against plain decoding with the same seed.
"""

from collections import Counter
from functools import cache, cached_property

import numpy as np
import pytest
import torch
import transformers
from hf.families import FAMILIES, VOCAB_SIZE, WINDOW, dflash_of, heads_of, middle_of
from hf.named_pipelines import for_any_models, repeating_plain
from hf.reference import generated

import treegraft
from treegraft.registry import packaged_registry
from treegraft.sampling import SeededDraws
from treegraft_plugins.hf.target import HFCausalLMTarget

PIPELINES = for_any_models()
# Measured costs or a shrinking budget would rationally decode models this small plainly, and prove nothing.
DRAFT_ALWAYS = ("costs={use: fixed}", "budget={use: fixed, verify_nodes: 63}")
MAX_NEW_TOKENS = 24
SAMPLING = {"temperature": 0.8, "top_p": 0.9, "seed": 11}

_rng = np.random.default_rng(0)
PROMPTS = [_rng.integers(0, VOCAB_SIZE, num_tokens).tolist() for num_tokens in (1, 5, 40)]
SAMPLED_PROMPT = PROMPTS[1]
SCALE_THEIR_LOGITS = ("Gemma2ForCausalLM", "CohereForCausalLM")


class Pair:
    """A family's target, a middle that mostly agrees with it, and what the target alone says."""

    def __init__(self, name):
        self.model = FAMILIES[name]()
        middle = middle_of(self.model)
        # One TargetModel for all pipelines: the self-check of the target runs once.
        self.models = {
            "target": HFCausalLMTarget(self.model), "middle": middle, "small": middle,
            "dflash": dflash_of(self.model), "heads": heads_of(self.model),
        }  # fmt: skip
        self.load = cache(self._load)

    def _load(self, pipeline):
        """The pipeline, or a skipped test where it needs a head that this family does not lend."""
        try:
            return self._loaded(pipeline)
        except treegraft.ModelError as error:
            if "lends no head" not in str(error):
                raise
            assert type(self.model).__name__ in SCALE_THEIR_LOGITS
            pytest.skip(str(error))

    def _loaded(self, pipeline):
        return treegraft.load(pipeline, *DRAFT_ALWAYS, models=self.models, registry=packaged_registry())

    @cached_property
    def greedy(self):
        return [generated(self.model, prompt, MAX_NEW_TOKENS) for prompt in PROMPTS]

    @cached_property
    def sampled(self):
        return self.load("plain").generate(SAMPLED_PROMPT, MAX_NEW_TOKENS, **SAMPLING).token_ids


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request):
    return Pair(request.param)


@pytest.mark.parametrize("name", PIPELINES)
def test_greedy_output_equals_generate(pair, name):
    pipeline = pair.load(name)
    results = [pipeline.generate(prompt, MAX_NEW_TOKENS, keep_rounds=True) for prompt in PROMPTS]
    assert [result.token_ids for result in results] == pair.greedy
    assert {result.finish_reason for result in results} == {"length"}
    assert not any(result.faults for result in results)
    accepted = Counter(
        record.pruned.source[row] for result in results for record in result.rounds for row in record.verdict.path
    )
    if name not in ("dflash_chain", "dflash_sampled"):  # random: a single chain of it is wrong from its first token on
        assert bool(accepted) == bool(pipeline.sources)
    assert max(len(record.pruned) for result in results for record in result.rounds) > WINDOW * bool(pipeline.sources)
    if name == "treegraft_fixed":  # both grow the tree: tokens are accepted that either of them alone found first
        assert len(accepted) == len(pipeline.sources) == 2


@pytest.mark.parametrize("name", [name for name in repeating_plain() if name != "plain"])
def test_sampled_output_equals_plain_with_that_seed(pair, name):
    assert pair.load(name).generate(SAMPLED_PROMPT, MAX_NEW_TOKENS, **SAMPLING).token_ids == pair.sampled


def test_plain_samples_from_the_warped_distribution(pair):
    """What sampled output is compared with: a loop of forwards without a cache, transformers' warpers and the draws."""
    warpers = transformers.TemperatureLogitsWarper(0.8), transformers.TopPLogitsWarper(0.9)
    draws = SeededDraws(SAMPLING["seed"])
    ids = torch.tensor([SAMPLED_PROMPT])
    for _ in range(MAX_NEW_TOKENS):
        with torch.no_grad():
            scores = pair.model(ids, use_cache=False).logits[:, -1].float()
        for warper in warpers:
            scores = warper(ids, scores)
        token = draws.choose(scores.double().softmax(-1), np.array([ids.shape[1]]))[0]
        ids = torch.cat([ids, torch.tensor([[token]])], dim=1)
    assert ids[0, len(SAMPLED_PROMPT) :].tolist() == pair.sampled


def test_prompts_and_outputs_exceed_every_window_and_differ():
    pair = Pair("gemma3")
    assert max(map(len, PROMPTS)) > 2 * WINDOW
    assert MAX_NEW_TOKENS > 2 * WINDOW
    outputs = [*pair.greedy, pair.sampled]
    assert len({tuple(tokens) for tokens in outputs}) == len(outputs)


def test_every_pipeline_but_plain_drafts():
    assert {"plain", "all_small", "all_middle", "treegraft", "treegraft_fixed"} <= set(PIPELINES)
    pair = Pair("llama")
    assert [name for name in PIPELINES if not pair.load(name).sources] == ["plain"]


def test_every_family_that_is_promised_is_here():
    assert set(FAMILIES) >= {
        "llama", "qwen2", "qwen2_window", "qwen3", "mistral_window", "gemma2", "gemma3", "gpt2", "gpt_neox", "olmo2",
        "starcoder2", "stablelm", "cohere", "phi3", "opt", "falcon", "mixtral", "gpt_oss",
    }  # fmt: skip


@pytest.mark.parametrize("role", ["target", "middle"])
def test_a_model_that_cannot_be_served_is_refused_by_name_when_the_pipeline_is_loaded(role):
    """One family a reason: see the target's own tests."""
    config = transformers.MambaConfig(vocab_size=VOCAB_SIZE, hidden_size=32, num_hidden_layers=2, state_size=8)
    recurrent = transformers.MambaForCausalLM(config).eval()
    model = FAMILIES["llama"]()
    models = {"target": model, "middle": model} | {role: recurrent}
    with pytest.raises(treegraft.ModelError, match=r"(?s)MambaForCausalLM.*recurrent state.*cannot branch"):
        treegraft.load("all_middle", *DRAFT_ALWAYS, models=models)
