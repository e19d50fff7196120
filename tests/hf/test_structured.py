"""Structured output under a draft tree: a constraint holds token by token, and the text is plain decoding's own."""

import json
import re

import pytest
import torch
from hf.families import FAMILIES, VOCAB_SIZE, middle_of
from transformers import LogitsProcessor, LogitsProcessorList

import treegraft

FIXED = ("costs={use: fixed}", "budget={use: fixed, verify_nodes: 63}", "target.self_check=false")
PIPELINES = ("all_small", "all_middle", "treegraft", "treegraft_fixed")

# Lists of numbers, a character a token: [12,3,450], of numbers up to three digits.
EOS, OPEN, CLOSE, COMMA, FIRST_DIGIT = 2, 20, 21, 22, 30
DIGITS = range(FIRST_DIGIT, FIRST_DIGIT + 10)
TEXTS = {OPEN: "[", CLOSE: "]", COMMA: ",", **{FIRST_DIGIT + digit: str(digit) for digit in range(10)}}
LANGUAGE = re.compile(r"\[\d{1,3}(,\d{1,3})*\]")
PREFIX = re.compile(r"\[(\d{1,3},)*\d{0,3}")

PROMPT = [5, 20, 31, 22, 32, 21, 9, 20, 33, 34, 22, 31, 21, 7]


class Lists(LogitsProcessor):
    """Allows what continues a list. It keeps the automaton's state, and so must see every prefix, once, in order."""

    def __init__(self):
        self.seen = []
        self.allowed = (OPEN,)
        self.num_digits = 0

    def __call__(self, input_ids, scores):
        if self.seen:
            assert input_ids[0, :-1].tolist() == self.seen[-1], "a prefix was left out, repeated, or never emitted"
            self.step(int(input_ids[0, -1]))
        self.seen.append(input_ids[0].tolist())
        outside = torch.ones(scores.shape[-1], dtype=torch.bool)
        outside[list(self.allowed)] = False
        return scores.masked_fill(outside, -float("inf"))

    def step(self, token):
        assert token in self.allowed
        self.num_digits = self.num_digits + 1 if token in DIGITS else 0
        if token == CLOSE:
            self.allowed = (EOS,)
        elif token in DIGITS:
            self.allowed = (*(DIGITS if self.num_digits < 3 else ()), COMMA, CLOSE)
        else:
            self.allowed = tuple(DIGITS)


def text_of(tokens):
    return "".join(TEXTS[token] for token in tokens if token != EOS)


def assert_in_the_language(tokens):
    if tokens[-1] == EOS:
        assert LANGUAGE.fullmatch(text_of(tokens))
    else:
        assert PREFIX.fullmatch(text_of(tokens)) or LANGUAGE.fullmatch(text_of(tokens))


@pytest.fixture(scope="module")
def models():
    model = FAMILIES["llama"]()
    model.generation_config.eos_token_id = EOS
    return {"target": model, "middle": middle_of(model)}


@pytest.fixture(scope="module", params=PIPELINES)
def pipeline(request, models):
    return treegraft.load(request.param, *FIXED, models=models)


def generate(pipeline, model, processor, **options):
    ids = torch.tensor([PROMPT])
    output = treegraft.generate(
        model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, pipeline, max_new_tokens=40,
        logits_processor=LogitsProcessorList([processor]), return_dict_in_generate=True, **options,
    )  # fmt: skip
    return output.sequences[0, len(PROMPT) :].tolist(), output.treegraft


def plain(model, processor, **options):
    ids = torch.tensor([PROMPT])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=40,
        logits_processor=LogitsProcessorList([processor]), **options,
    )  # fmt: skip
    return output[0, len(PROMPT) :].tolist()


def test_a_greedy_list_is_plain_decodings_list(pipeline, models):
    ours, theirs = Lists(), Lists()
    tokens, generation = generate(pipeline, models["target"], ours, do_sample=False)
    assert tokens == plain(models["target"], theirs, do_sample=False)
    assert ours.seen == theirs.seen, "the processor saw other prefixes than in plain decoding"
    assert_in_the_language(tokens)
    assert generation.accepted_per_round > 0, "nothing was accepted: the tree took no part"


def test_a_sampled_list_is_in_the_language_and_plain_samplings(pipeline, models):
    alone = treegraft.load("plain", *FIXED[2:], models=models)
    ended = 0
    for seed in range(6):
        options = {"do_sample": True, "temperature": 1.5, "top_k": 0, "seed": seed}
        tokens, _ = generate(pipeline, models["target"], Lists(), **options)
        assert_in_the_language(tokens)
        assert tokens == generate(alone, models["target"], Lists(), **options)[0]
        ended += tokens[-1] == EOS
    assert ended, "no list was ever finished"


def test_the_language_rejects_what_it_should():
    digit = FIRST_DIGIT
    assert_in_the_language([OPEN, digit, COMMA, digit, CLOSE, EOS])
    for wrong in ([OPEN, digit, EOS], [OPEN, COMMA], [OPEN, digit, digit, digit, digit], [digit]):
        with pytest.raises(AssertionError):
            assert_in_the_language(wrong)
    assert max(TEXTS) < VOCAB_SIZE


# -- a public library -------------------------------------------------------------------------------------------------

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["read", "write"]}, "size": {"type": "integer"}},
    "required": ["name", "size"],
}


@pytest.mark.filterwarnings("default")
def test_a_json_schema_of_xgrammar_holds():
    xgrammar = pytest.importorskip("xgrammar", reason="optional: pip install xgrammar")
    from xgrammar.contrib.hf import LogitsProcessor as Grammar

    pipeline = treegraft.load("treegraft_fixed", *FIXED)  # the demo pair: real text needs a real tokenizer
    model, tokenizer = pipeline.target.model, pipeline.tokenizer
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=model.config.vocab_size)
    compiled = xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(SCHEMA), any_whitespace=False)
    inputs = tokenizer('x = {"name": "write", "size": 1}\ny = ', return_tensors="pt")

    # Digits may go on for ever, and so need a limit of their own.
    def run(call, **options):
        return call(**options, do_sample=False, max_new_tokens=24, exponential_decay_length_penalty=(12, 4.0))

    expected = run(model.generate, **inputs, logits_processor=[Grammar(compiled)])
    output = run(
        lambda **options: treegraft.generate(model, inputs, pipeline, **options),
        logits_processor=[Grammar(compiled)], return_dict_in_generate=True,
    )  # fmt: skip
    assert output.sequences.tolist() == expected.tolist()
    assert output.treegraft.finish_reason == "eos"
    value = json.loads(output.treegraft.text)
    assert value["name"] in ("read", "write") and isinstance(value["size"], int)
    assert output.treegraft.accepted_per_round > 0
