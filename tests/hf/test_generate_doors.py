"""The front door, a `custom_generate` folder, stop strings, streamers, passed caches, and what is refused by name."""

import asyncio
import sys
import threading
from pathlib import Path

import pytest
import torch
from hf.families import FAMILIES, build
from hf.scripted import RankedDrafter, accepted, loaded, reference
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AsyncTextIteratorStreamer,
    DynamicCache,
    GenerationConfig,
    PreTrainedTokenizerFast,
    StaticCache,
    StoppingCriteriaList,
    StopStringCriteria,
    TextIteratorStreamer,
    TextStreamer,
)

import treegraft
from treegraft.testing import ScriptedDrafter
from treegraft_plugins.hf.target import HFCausalLMTarget

FOLDER = Path(__file__).parents[2] / "docs" / "examples" / "custom_generate"
PROMPT = [7, 41, 3, 18, 7, 41, 3, 29, 50, 7]


@pytest.fixture(scope="module")
def model():
    return build("Llama", {"num_hidden_layers": 2})


@pytest.fixture(scope="module")
def target(model):
    return HFCausalLMTarget(model)


@pytest.fixture(scope="module")
def gemma():
    return FAMILIES["gemma3"]()


def inputs_of(prompt):
    ids = torch.tensor([prompt])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


# -- text: a tokenizer of 256 bytes, and a model that is told what to say ---------------------------------------------


@pytest.fixture(scope="module")
def tokenizer():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytes_only.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bytes_only, clean_up_tokenization_spaces=False)


@pytest.fixture(scope="module")
def speaker():
    return build("Llama", {"num_hidden_layers": 1, "vocab_size": 256})


@pytest.fixture(scope="module")
def speaker_target(speaker):
    return HFCausalLMTarget(speaker)


TEXT = "one 😀two\nthree, 木END four 🚀 and so on for a while"


class Dictate:
    """Says a text."""

    def __init__(self, tokens, num_prompt):
        self.tokens, self.num_prompt = tokens, num_prompt

    def __call__(self, ids, scores):
        token = self.tokens[(ids.shape[1] - self.num_prompt) % len(self.tokens)]
        return scores + 1e4 * torch.nn.functional.one_hot(torch.tensor([token]), scores.shape[-1])


@pytest.fixture
def say(speaker, speaker_target, tokenizer):
    """`say(num_right, **options)`: TEXT through the front door, by a drafter that knows `num_right` tokens a round."""
    prompt, tokens = tokenizer("Say: ")["input_ids"], tokenizer(TEXT)["input_ids"]

    def run(num_right=None, **options):
        pipeline = loaded(speaker_target, ScriptedDrafter([*prompt, *tokens], num_right=num_right))
        return treegraft.generate(
            speaker, {**inputs_of(prompt)}, pipeline, logits_processor=[Dictate(tokens, len(prompt))],
            return_dict_in_generate=True, **{"max_new_tokens": len(tokens), "do_sample": False, **options},
        )  # fmt: skip

    return run


@pytest.mark.parametrize("num_right", [0, 1, 3, None])
@pytest.mark.parametrize("stop", ["END", "two\nth", "E", "😀", "never", ["four", "木"]])
def test_stop_strings_wherever_a_block_ends(say, tokenizer, speaker, num_right, stop):
    output = say(num_right, stop_strings=stop, tokenizer=tokenizer)
    prompt, tokens = tokenizer("Say: ")["input_ids"], tokenizer(TEXT)["input_ids"]
    stops = [stop] if isinstance(stop, str) else stop
    expected = reference(
        speaker, prompt, len(tokens), processors=[Dictate(tokens, len(prompt))],
        criteria=[StopStringCriteria(tokenizer, stops)],
    ).tokens  # fmt: skip
    assert output.treegraft.token_ids == expected
    assert (output.treegraft.finish_reason == "stop") == (stop != "never") == (len(expected) < len(tokens))
    assert (accepted(output.treegraft) > 0) == (num_right != 0)


def test_stop_strings_of_a_configuration(say, tokenizer, speaker, monkeypatch):
    config = GenerationConfig(stop_strings=["two"], max_new_tokens=60)
    assert say(generation_config=config, tokenizer=tokenizer).treegraft.text is None  # the pipeline has no tokenizer
    assert tokenizer.decode(say(generation_config=config, tokenizer=tokenizer).treegraft.token_ids) == "one 😀two"
    assert config.stop_strings == ["two"]
    monkeypatch.setattr(speaker, "generation_config", GenerationConfig(stop_strings="three"))
    text = tokenizer.decode(say(tokenizer=tokenizer).treegraft.token_ids)
    assert text == "one 😀two\nthree"
    with pytest.raises(treegraft.RequestError, match=r"stop_strings.*without a tokenizer"):
        say()


@pytest.mark.parametrize("num_right", [0, 1, 2, None])
@pytest.mark.parametrize("skip_prompt", [False, True])
def test_a_streamer_gets_the_text_and_no_part_of_a_character(say, tokenizer, num_right, skip_prompt, capsys):
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=skip_prompt, timeout=30)
    output = say(num_right, streamer=streamer, stop_strings="END", tokenizer=tokenizer)
    chunks = list(streamer)
    assert "".join(chunks) == ("" if skip_prompt else "Say: ") + "one 😀two\nthree, 木END"
    assert not any("\ufffd" in chunk for chunk in chunks) and len([chunk for chunk in chunks if chunk]) > 3
    assert tokenizer.decode(output.treegraft.token_ids) == "one 😀two\nthree, 木END"
    if num_right is None:
        say(streamer=TextStreamer(tokenizer, skip_prompt=skip_prompt))
        assert capsys.readouterr().out == ("" if skip_prompt else "Say: ") + TEXT + "\n"


def test_an_asynchronous_streamer(say, tokenizer):
    async def read():
        streamer = AsyncTextIteratorStreamer(tokenizer, skip_prompt=True, timeout=30)
        thread = threading.Thread(target=say, kwargs={"streamer": streamer})
        thread.start()
        text = "".join([piece async for piece in streamer])
        thread.join()
        return text

    assert asyncio.run(read()) == TEXT


def test_a_streamer_ends_whatever_happens(say, tokenizer, speaker):
    for options, error in (
        ({"num_beams": 2}, treegraft.RequestError),
        ({"no_such_option": 1}, ValueError),
        ({"stopping_criteria": [lambda ids, scores: 1 / 0]}, ZeroDivisionError),
        ({"do_sample": True, "num_return_sequences": 2}, ValueError),
    ):
        streamer = TextIteratorStreamer(tokenizer, timeout=5)
        with pytest.raises(error):
            say(streamer=streamer, **options)
        list(streamer)  # would time out
    streamer = TextIteratorStreamer(tokenizer, timeout=5)
    with pytest.raises(treegraft.ComposeError):
        treegraft.generate(speaker, torch.tensor([[1]]), "no such pipeline", streamer=streamer)
    list(streamer)


def test_a_streamer_beside_custom_generate_is_refused_before_anything_hangs(model, target, tokenizer):
    pipeline = loaded(target, ScriptedDrafter(PROMPT))
    streamer = TextIteratorStreamer(tokenizer, timeout=5)
    with pytest.raises(treegraft.RequestError, match=r"(?s)streamer.*treegraft\.generate"):
        model.generate(**inputs_of(PROMPT), custom_generate=pipeline, streamer=streamer, max_new_tokens=3)
    list(streamer)  # its reader comes to an end


def test_the_front_door_with_a_name(speaker, tokenizer):
    prompt = tokenizer("Say: ")["input_ids"]
    expected = reference(speaker, prompt, 8).tokens
    output = treegraft.generate(
        speaker, torch.tensor([prompt]), "all_small", tokenizer=tokenizer, max_new_tokens=8, do_sample=False,
        return_dict_in_generate=True,
    )  # fmt: skip
    assert output.treegraft.token_ids == expected and output.treegraft.text == tokenizer.decode(expected)


def test_a_folder_as_transformers_loads_it(model, target, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path])  # transformers adds the folder that it copies the code to
    expected = reference(model, PROMPT, 8, seed=3).tokens
    pipeline = loaded(target, ScriptedDrafter([*PROMPT, *expected]))
    for chosen in (pipeline, "all_small"):
        output = model.generate(
            **inputs_of(PROMPT), custom_generate=str(FOLDER), trust_remote_code=True, pipeline=chosen, seed=3,
            max_new_tokens=8, do_sample=True, top_k=0,
        )  # fmt: skip
        assert output[0].tolist() == [*PROMPT, *expected]


# -- caches -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def prefilled(model, tokens, cache):
    model(input_ids=torch.tensor([tokens]), cache=cache)
    return cache


def same_cache(found, expected):
    assert len(found.layers) == len(expected.layers)
    for a, b in zip(found.layers, expected.layers, strict=True):
        assert type(a) is type(b) and int(a.get_seq_length()) == int(b.get_seq_length())
        length = int(a.get_seq_length()) if isinstance(found, StaticCache) else a.keys.shape[-2]
        for name in ("keys", "values"):
            left, right = (getattr(layer, name)[..., :length, :] for layer in (a, b))
            torch.testing.assert_close(left, right, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_cache_after_other_branches_than_the_first(model, gemma, family):
    """Accepting children 2, 0 and 1 in turn, then 20 more tokens: every layer is a fresh prefill's."""
    which = model if family == "llama" else gemma
    expected = reference(which, PROMPT, 23).tokens
    pipeline = loaded(HFCausalLMTarget(which), RankedDrafter([*PROMPT, *expected], (2, 0, 1)))
    output = which.generate(
        **inputs_of(PROMPT), custom_generate=pipeline, max_new_tokens=23, do_sample=False, return_dict_in_generate=True
    )
    assert output.treegraft.token_ids == expected
    assert output.treegraft.accepted_histogram.get(3, 0) + output.treegraft.accepted_histogram.get(5, 0) > 0
    fresh = prefilled(which, [*PROMPT, *expected[:-1]], DynamicCache(config=which.config))
    same_cache(output.cache, fresh)


CACHES = {
    "dynamic": lambda config: DynamicCache(),
    "dynamic by layer": lambda config: DynamicCache(config=config),
    "static": lambda config: StaticCache(config=config, max_cache_len=64),
}


@pytest.mark.parametrize("only_new", [False, True], ids=["whole", "new"])
@pytest.mark.parametrize("held", [0, 12])
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_passed_cache_is_continued_and_left_as_generate_leaves_it(model, gemma, target, family, kind, held, only_new):
    which = model if family == "llama" else gemma
    tokens = [*PROMPT, 5, 6, 7, 8, 9, 10, 11]
    caches = [CACHES[kind](which.config) for _ in range(2)]
    if held:
        for cache in caches:
            prefilled(which, tokens[:held], cache)
    prompt = tokens[held:] if only_new else tokens
    given = {"input_ids": torch.tensor([prompt]), "attention_mask": torch.ones((1, len(tokens)), dtype=torch.long)}
    options = {"max_new_tokens": 9, "do_sample": False, "return_dict_in_generate": True}
    theirs = which.generate(**given, cache=caches[0], **options)
    new = theirs.sequences[0, len(prompt) :].tolist()
    own = target if family == "llama" else HFCausalLMTarget(which, self_check=False)
    pipeline = loaded(own, ScriptedDrafter([*prompt, *new]), name="treegraft_fixed")
    ours = which.generate(**given, cache=caches[1], custom_generate=pipeline, **options)
    assert torch.equal(ours.sequences, theirs.sequences) and accepted(ours.treegraft) > 1
    assert ours.cache is caches[1]
    same_cache(caches[1], caches[0])
    # And a next turn on each, by transformers itself.
    follow = {"input_ids": torch.tensor([[new[-1], 3, 4]])}
    follow["attention_mask"] = torch.ones((1, len(tokens) + len(new) + 2), dtype=torch.long)
    turns = [which.generate(**follow, cache=cache, **options).sequences for cache in caches]
    assert torch.equal(*turns)


def test_a_sampled_turn_is_the_same_with_and_without_the_cache(model, target):
    pipeline = loaded(target, ScriptedDrafter(PROMPT), name="treegraft_fixed")
    options = {"max_new_tokens": 6, "do_sample": True, "top_k": 0, "custom_generate": pipeline, "seed": 9}
    whole = model.generate(**inputs_of(PROMPT), **options)[0, len(PROMPT) :].tolist()
    assert whole == reference(model, PROMPT, 6, seed=9).tokens
    cache = prefilled(model, PROMPT[:6], DynamicCache())
    new = {"input_ids": torch.tensor([PROMPT[6:]]), "attention_mask": torch.ones((1, len(PROMPT)), dtype=torch.long)}
    assert model.generate(**new, cache=cache, **options)[0, 4:].tolist() == whole
    assert cache.get_seq_length() == len(PROMPT) + 5


def test_a_cache_of_padded_rows(model, target):
    ids = torch.tensor([PROMPT, [0, 0, 0, *PROMPT[:7]]])
    mask = (torch.arange(10)[None] >= torch.tensor([[0], [3]])).long()
    options = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True, "pad_token_id": 0}
    caches = [DynamicCache(), DynamicCache()]
    theirs = model.generate(ids, attention_mask=mask, cache=caches[0], **options)
    pipeline = loaded(target, ScriptedDrafter(PROMPT), name="treegraft_fixed")
    ours = model.generate(ids, attention_mask=mask, cache=caches[1], custom_generate=pipeline, **options)
    assert torch.equal(ours.sequences, theirs.sequences)
    for a, b in zip(*(cache.layers for cache in caches), strict=True):
        torch.testing.assert_close(a.keys * mask_of(mask, a), b.keys * mask_of(mask, b), atol=1e-6, rtol=1e-6)
    longer = torch.cat([ours.sequences, torch.tensor([[3, 4], [5, 6]])], dim=1)
    wider = torch.nn.functional.pad(mask, (0, 7), value=1)
    theirs, ours = (
        model.generate(longer, attention_mask=wider, cache=cache, custom_generate=each, **options)
        for cache, each in zip(caches, (None, pipeline), strict=True)
    )
    assert torch.equal(ours.sequences, theirs.sequences)


def mask_of(mask, layer):
    return torch.nn.functional.pad(mask, (0, layer.keys.shape[-2] - mask.shape[1]), value=1)[:, None, :, None]


# -- refused ----------------------------------------------------------------------------------------------------------

REFUSED = {
    "num_beams": {"num_beams": 2},
    "penalty_alpha": {"penalty_alpha": 0.6, "top_k": 4},
    "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 3},
    "dola_layers": {"dola_layers": "low"},
    "output_attentions": {"output_attentions": True},
    "output_hidden_states": {"output_hidden_states": True},
    "token_healing": {"token_healing": True},
    "cache_implementation": {"cache_implementation": "offloaded"},
    "compile_config": {"compile_config": "default"},
    "inputs_embeds": {"inputs_embeds": torch.zeros((1, 3, 32), dtype=torch.float64)},
    "position_ids": {"position_ids": torch.arange(len(PROMPT))[None] + 3},
    "attention_mask": {"attention_mask": torch.tensor([[1] * 8 + [0] * 2])},
    "seed": {"seed": -1},
    "assistant_model": {"assistant_model": "model"},
}


@pytest.mark.filterwarnings("ignore")  # transformers' remarks
@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name_before_anything_is_computed(model, target, monkeypatch, name):
    from transformers import CompileConfig

    options = {**inputs_of(PROMPT), "max_new_tokens": 3, "do_sample": False, **REFUSED[name]}
    if name == "compile_config":
        options[name] = CompileConfig()
    if name == "assistant_model":
        options[name] = model
    pipeline = loaded(target, ScriptedDrafter(PROMPT))
    monkeypatch.setattr(target, "prefill", lambda *_: pytest.fail("computed"))
    doors = {
        "custom_generate": lambda: model.generate(**options, custom_generate=pipeline),
        "front": lambda: treegraft.generate(model, None, pipeline, **options),
    }
    for door, call in doors.items():
        if door == "custom_generate" and name in ("token_healing", "cache_implementation"):
            continue  # transformers itself fails: without the tokenizer that it dropped, or without a GPU
        with pytest.raises(treegraft.RequestError, match=name):
            call()


def test_refused_caches(model, target):
    from transformers import EncoderDecoderCache
    from transformers.cache_utils import Cache, QuantizedLayer

    class Quantized(QuantizedLayer):
        def __init__(self):
            super().__init__()

        def _quantize(self, tensor, axis): ...

        def _dequantize(self, tensor): ...

    offloaded = DynamicCache()
    offloaded.offloading = True
    full = prefilled(model, PROMPT, DynamicCache())
    two = DynamicCache()
    model(input_ids=torch.tensor([PROMPT[:3]] * 2), cache=two)
    cases = {
        "offloaded": offloaded,
        "Quantized": Cache(layers=[Quantized(), Quantized()]),
        "EncoderDecoderCache": EncoderDecoderCache(DynamicCache(), DynamicCache()),
        "all 10 tokens": full,
        "2 rows": two,
        "12 slots": StaticCache(config=model.config, max_cache_len=12),
    }
    pipeline = loaded(target, ScriptedDrafter(PROMPT))
    for message, cache in cases.items():
        with pytest.raises(treegraft.RequestError, match=message):
            model.generate(
                **inputs_of(PROMPT), cache=cache, custom_generate=pipeline, max_new_tokens=9, do_sample=False
            )


def test_another_model_is_refused(model, target, speaker, monkeypatch):
    pipeline = loaded(target, ScriptedDrafter(PROMPT))
    for call in (
        lambda: speaker.generate(**inputs_of(PROMPT), custom_generate=pipeline, max_new_tokens=3),
        lambda: treegraft.generate(speaker, inputs_of(PROMPT), pipeline, max_new_tokens=3),
    ):
        with pytest.raises(treegraft.RequestError, match=r"all_middle.*another LlamaForCausalLM"):
            call()
    for wrong, message in (
        ({"inputs": "text"}, "Tokenize"),
        ({"models": {"middle": model}}, "models"),
        ({"custom_generate": pipeline}, "custom_generate"),
    ):
        with pytest.raises(treegraft.RequestError, match=message):
            treegraft.generate(model, wrong.pop("inputs", torch.tensor([PROMPT])), pipeline, max_new_tokens=3, **wrong)
    with pytest.raises(treegraft.RequestError, match="pad_token_id"):
        model.generate(
            torch.tensor([PROMPT, PROMPT]), custom_generate=pipeline, max_new_tokens=3,
            stopping_criteria=StoppingCriteriaList([lambda ids, scores: False]),
            **{"pad_token_id": None, "do_sample": False},
        )  # fmt: skip
