"""`model.generate(custom_generate=pipeline)` against a plain loop: processors, stopping, scores, rows, seeds."""

import copy
import random

import numpy as np
import pytest
import torch
from hf.families import VOCAB_SIZE, build
from hf.scripted import accepted, built, loaded, reference
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

import treegraft
from treegraft.testing import ScriptedDrafter
from treegraft_plugins.hf.generation_options import GENERATION_OPTIONS
from treegraft_plugins.hf.target import HFCausalLMTarget

PROMPT = [7, 41, 3, 18, 7, 41, 3, 29, 50, 7]
NUM_TOKENS = 14
SAMPLING = {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "top_k": 40}
SEED = 11


@pytest.fixture(scope="module")
def model():
    return build("Llama", {"num_hidden_layers": 2})


@pytest.fixture(scope="module")
def target(model):
    return HFCausalLMTarget(model)


def run(model, pipeline, prompt, **options):
    ids = torch.tensor([prompt])
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), custom_generate=pipeline, return_dict_in_generate=True, **options
    )


def new_tokens(output, prompt):
    return output.sequences[0, len(prompt) :].tolist()


class Frequency:
    """Each token costs what it was used, like a frequency penalty."""

    def __call__(self, ids, scores):
        return scores - 0.7 * torch.bincount(ids[0], minlength=scores.shape[-1])


CASES = {
    "none": {},
    "repetition penalty": {"repetition_penalty": 1.4},
    "no repeated bigram": {"no_repeat_ngram_size": 2},
    "bad words": {"bad_words_ids": [[30], [26, 59], [48]]},
    "forced end": {"forced_eos_token_id": 9},
    "suppressed": {"suppress_tokens": [30, 59, 3], "begin_suppress_tokens": [26]},
    "bias": {"sequence_bias": [[[5], 6.0], [[5, 6], 9.0]]},
    "min_new_tokens": {"min_new_tokens": 6, "eos_token_id": list(range(0, 64, 2))},
    "decay": {"exponential_decay_length_penalty": (3, 1.8), "eos_token_id": 2},
    "encoder": {"encoder_repetition_penalty": 1.6, "encoder_no_repeat_ngram_size": 2},
    "guidance": {"guidance_scale": 1.7},
    "watermark": {"watermarking_config": {"bias": 3.0}},
    "frequency": {"logits_processor": [Frequency()]},
    "all": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "min_new_tokens": 5, "renormalize_logits": True,
            "eos_token_id": [4, 8, 30], "logits_processor": [Frequency()]},
}  # fmt: skip
SCRIPTS = {"knows": {}, "lies": {"num_right": 0}, "two right": {"num_right": 2}, "child two": {"rank": 2}}


def of_case(model, case, sampled):
    options = {"max_new_tokens": NUM_TOKENS, **CASES[case], **(SAMPLING if sampled else {"do_sample": False})}
    if "logits_processor" in options:
        options["logits_processor"] = LogitsProcessorList(options["logits_processor"])
    eos = options.get("eos_token_id") or ()
    eos = eos if isinstance(eos, list | tuple) else [eos]
    seed = SEED if sampled else None
    return options, reference(model, PROMPT, NUM_TOKENS, processors=built(model, PROMPT, **options), eos=eos, seed=seed)


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("case", CASES)
def test_every_processor_as_plain_decoding_has_it(model, target, case, sampled):
    """Token for token, with scores and logits of every token, and draft tokens accepted on the way."""
    options, expected = of_case(model, case, sampled)
    pipeline = loaded(target, ScriptedDrafter([*PROMPT, *expected.tokens]))
    output = run(model, pipeline, PROMPT, **options, seed=SEED, output_scores=True, output_logits=True)
    assert new_tokens(output, PROMPT) == expected.tokens == output.treegraft.token_ids
    assert accepted(output.treegraft) > 1
    for found, rows in ((output.scores, expected.scores), (output.logits, expected.logits)):
        assert len(found) == len(expected.tokens)
        for a, b in zip(found, rows, strict=True):
            assert a.dtype == b.dtype and a.shape == (1, VOCAB_SIZE)  # guidance brings in the model's own dtype
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_whatever_the_drafter_does(model, target, script, sampled):
    options, expected = of_case(model, "all", sampled)
    pipeline = loaded(target, ScriptedDrafter([*PROMPT, *expected.tokens], **SCRIPTS[script]))
    output = run(model, pipeline, PROMPT, **options, seed=SEED)
    assert new_tokens(output, PROMPT) == expected.tokens
    assert (accepted(output.treegraft) == 0) == (script == "lies")


def test_generate_itself_gives_the_same_output(model, target):
    """Not only our own loop: every field of the greedy output is transformers' own."""
    options = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "output_scores": True, "output_logits": True,
               "repetition_penalty": 1.3, "bad_words_ids": [[3]]}  # fmt: skip
    theirs = run(model, None, PROMPT, **options)
    pipeline = loaded(target, ScriptedDrafter(theirs.sequences[0].tolist()))
    ours = run(model, pipeline, PROMPT, **options)
    assert set(ours.keys()) == set(theirs.keys())
    assert torch.equal(ours.sequences, theirs.sequences) and type(ours) is type(theirs)
    for name in ("scores", "logits"):
        for a, b in zip(ours[name], theirs[name], strict=True):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)
    bare = model.generate(
        torch.tensor([PROMPT]), custom_generate=pipeline, max_new_tokens=3, do_sample=False, repetition_penalty=1.3,
        bad_words_ids=[[3]],
    )  # fmt: skip
    assert torch.equal(bare, theirs.sequences[:, : len(PROMPT) + 3])


def test_a_processor_that_edits_in_place_leaves_the_logits(model, target):
    def edit(ids, scores):
        ids.fill_(0)
        scores[:, ids.shape[1] % 7 :: 2] = -50.0
        return scores

    expected = reference(model, PROMPT, NUM_TOKENS, processors=[edit])
    pipeline = loaded(target, ScriptedDrafter([*PROMPT, *expected.tokens]))
    output = run(
        model, pipeline, PROMPT, logits_processor=LogitsProcessorList([edit]), max_new_tokens=NUM_TOKENS,
        do_sample=False, output_scores=True, output_logits=True,
    )  # fmt: skip
    assert new_tokens(output, PROMPT) == expected.tokens and accepted(output.treegraft) > 1
    for found, row in zip(output.logits, expected.logits, strict=True):
        torch.testing.assert_close(found, row, atol=1e-5, rtol=1e-5)
        assert found.min() > -50.0
    assert all(row.min() == -50.0 for row in output.scores)


@pytest.mark.parametrize("script", SCRIPTS)
def test_processors_and_criteria_are_called_as_plain_decoding_calls_them(model, target, script):
    calls = {"plain": [], "ours": []}

    def recorder(name):
        def record(ids, scores):
            calls[name].append(ids[0].tolist())
            return scores

        return record

    def criterion(name):
        return lambda ids, scores: calls[name].append(("stop?", ids[0].tolist(), scores)) or False

    plain = reference(
        model, PROMPT, NUM_TOKENS, processors=[recorder("plain")], criteria=[criterion("plain")], seed=SEED
    )
    pipeline = loaded(target, ScriptedDrafter([*PROMPT, *plain.tokens], **SCRIPTS[script]))
    output = run(
        model, pipeline, PROMPT, logits_processor=LogitsProcessorList([recorder("ours")]), max_new_tokens=NUM_TOKENS,
        stopping_criteria=StoppingCriteriaList([criterion("ours")]), do_sample=True, top_k=0, seed=SEED,
    )  # fmt: skip
    assert new_tokens(output, PROMPT) == plain.tokens
    assert calls["ours"] == calls["plain"] and len(calls["ours"]) == 2 * NUM_TOKENS


def test_criteria_see_the_scores_where_they_are_asked_for(model, target):
    seen = []
    options = {"max_new_tokens": 5, "do_sample": False, "output_scores": True}
    stop = StoppingCriteriaList([lambda ids, scores: seen.append(len(scores)) or torch.tensor([len(scores) == 3])])
    pipeline = loaded(target, ScriptedDrafter([*PROMPT, *reference(model, PROMPT, 5).tokens]))
    output = run(model, pipeline, PROMPT, stopping_criteria=stop, **options)
    assert seen == [1, 2, 3] and len(output.scores) == 3 and output.treegraft.finish_reason == "stop"


@pytest.mark.parametrize("name", ["output_scores", "output_logits"])
def test_a_prompt_that_fills_the_context_has_no_scores(model, target, name):
    prompt = torch.full((1, target.max_length), 5)
    options = {"max_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True, name: True}
    output = treegraft.generate(model, prompt, loaded(target, ScriptedDrafter([1, 2])), **options)
    assert output.sequences.shape == prompt.shape and output[name.removeprefix("output_")] == ()


@pytest.mark.parametrize(
    ("inputs", "pipeline", "found"),
    [
        (torch.tensor([5, 6]), "own", "inputs: token ids of shape"),
        (torch.tensor([[5, 6]]), None, "pipeline: a NoneType"),
    ],
)
def test_what_is_no_batch_of_ids_or_no_pipeline_is_refused(model, target, inputs, pipeline, found):
    pipeline = loaded(target, ScriptedDrafter([1, 2])) if pipeline == "own" else pipeline
    with pytest.raises(treegraft.RequestError, match=found):
        treegraft.generate(model, inputs, pipeline, max_new_tokens=2, do_sample=False)


def test_a_target_that_trains_again_is_refused(model, target):
    pipeline = loaded(target, ScriptedDrafter([1, 2]))
    model.train()
    try:
        with pytest.raises(treegraft.ModelError, match="training mode"):
            pipeline.generate([5, 6], 2)
    finally:
        model.eval()


# -- ends -------------------------------------------------------------------------------------------------------------


def test_an_eos_inside_an_accepted_block_cuts_it_there(model, target):
    """Third of a block of five: five known tokens, of which the third is one of several EOS ids."""
    free = reference(model, PROMPT, 8, seed=3).tokens
    assert free[2] not in free[:2]
    pipeline = loaded(target, ScriptedDrafter([*PROMPT, *free]))
    output = run(model, pipeline, PROMPT, max_new_tokens=8, do_sample=True, top_k=0, seed=3, eos_token_id=[63, free[2]])
    generation = output.treegraft
    assert new_tokens(output, PROMPT) == free[:3] == generation.token_ids
    assert generation.finish_reason == "eos" and generation.accepted_histogram == {3: 1}
    assert (generation.emitted_per_round, generation.accepted_per_round, generation.num_rounds) == (3.0, 3.0, 1)


def test_lengths_and_time(model, target):
    tokens = reference(model, PROMPT, 6).tokens
    pipeline = loaded(target, ScriptedDrafter([*PROMPT, *tokens]))
    assert new_tokens(run(model, pipeline, PROMPT, do_sample=False, max_length=len(PROMPT) + 4), PROMPT) == tokens[:4]
    assert new_tokens(run(model, pipeline, PROMPT, do_sample=False, max_new_tokens=1), PROMPT) == tokens[:1]
    output = run(model, pipeline, PROMPT, do_sample=False, max_new_tokens=6, max_time=1e-9)
    assert new_tokens(output, PROMPT) == tokens[:1] and output.treegraft.finish_reason == "stop"


def test_the_context_limits_of_target_and_drafter():
    short = build("Llama", {"num_hidden_layers": 1, "max_position_embeddings": 16})
    expected = reference(short, PROMPT[:5], 11).tokens
    drafter = ScriptedDrafter([*PROMPT[:5], *expected], max_length=8)
    pipeline = loaded(HFCausalLMTarget(short), drafter)
    output = run(short, pipeline, PROMPT[:5], do_sample=False, max_new_tokens=30)
    assert new_tokens(output, PROMPT[:5]) == expected and output.treegraft.finish_reason == "context_limit"
    assert 0 < accepted(output.treegraft) <= 4 and output.treegraft.faults == []


# -- seeds ------------------------------------------------------------------------------------------------------------


def test_seeds_and_the_global_generators(model, target):
    pipeline = loaded(target, ScriptedDrafter(PROMPT))
    options = {"max_new_tokens": 8, "do_sample": True, "top_k": 0}
    state = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    first, again = (run(model, pipeline, PROMPT, seed=5, **options) for _ in range(2))
    run(model, pipeline, PROMPT, max_new_tokens=2, do_sample=False)
    assert torch.equal(torch.get_rng_state(), state[0]), "neither with a seed nor where nothing is sampled"
    assert torch.equal(first.sequences, again.sequences) and first.treegraft.seed == 5

    torch.manual_seed(1)
    drawn = run(model, pipeline, PROMPT, **options)
    after = torch.get_rng_state()
    torch.manual_seed(1)
    assert int(torch.randint(2**63 - 1, (1,))) == drawn.treegraft.seed
    assert torch.equal(torch.get_rng_state(), after), "one draw for the whole request"
    assert new_tokens(drawn, PROMPT) == reference(model, PROMPT, 8, seed=drawn.treegraft.seed).tokens
    assert (np.random.get_state()[1].tolist(), random.getstate()) == state[1:]
    torch.set_rng_state(state[0])


def test_a_prompt_after_another_and_alone(model, target):
    before = copy.deepcopy((model.config.to_dict(), model.generation_config.to_dict()))
    own = GenerationConfig(max_new_tokens=8, repetition_penalty=1.2)
    own_before = own.to_dict()
    expected = reference(
        model, PROMPT, 8, processors=built(model, PROMPT, max_new_tokens=8, repetition_penalty=1.2)
    ).tokens
    outputs = []
    for prompts in ([[5, 6, 7], PROMPT], [PROMPT]):
        pipeline = loaded(target, ScriptedDrafter([*PROMPT, *expected]))
        for prompt in prompts:
            ids = torch.tensor([prompt])
            output = treegraft.generate(
                model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, pipeline,
                generation_config=own, return_dict_in_generate=True,
            )  # fmt: skip
        outputs.append(output)
    assert new_tokens(outputs[0], PROMPT) == new_tokens(outputs[1], PROMPT) == expected
    counts = [(o.treegraft.accepted_histogram, o.treegraft.target_calls, o.treegraft.source_calls) for o in outputs]
    assert counts[0] == counts[1]
    assert (model.config.to_dict(), model.generation_config.to_dict()) == before and own.to_dict() == own_before


# -- rows -------------------------------------------------------------------------------------------------------------

ROWS = [PROMPT, PROMPT[:4], [9, 9, 12, 30, 9, 9]]
ROW_CASES = ["none", "repetition penalty", "no repeated bigram", "min_new_tokens", "suppressed", "encoder", "guidance",
             "decay", "frequency"]  # fmt: skip


def padded(rows, pad=0):
    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("case", "num_rows"), [*((case, 3) for case in ROW_CASES), ("none", 2), ("min_new_tokens", 2)])
def test_every_row_equals_its_single_run(model, target, case, sampled, num_rows):
    options = {"max_new_tokens": 7, **CASES[case], **(SAMPLING if sampled else {"do_sample": False})}
    options |= {"output_scores": True, "output_logits": True, "pad_token_id": 1}
    ids, mask = padded(ROWS[:num_rows])
    pipeline = loaded(target, ScriptedDrafter(PROMPT), name="treegraft_fixed")
    output = model.generate(
        ids, attention_mask=mask, custom_generate=pipeline, seed=SEED, return_dict_in_generate=True, **options
    )
    assert len(output.treegraft) == num_rows
    for index, row in enumerate(ROWS[:num_rows]):
        single = run(model, pipeline, row, seed=(SEED, index), **options)
        found, length = output.treegraft[index].token_ids, len(single.treegraft.token_ids)
        assert found == single.treegraft.token_ids == new_tokens(single, row)
        assert output.sequences[index].tolist() == [*ids[index].tolist(), *found, *[1] * (len(output.scores) - length)]
        for name in ("scores", "logits"):
            for a, b in zip(output[name], single[name], strict=False):
                torch.testing.assert_close(a[index : index + 1], b, atol=1e-5, rtol=1e-5)
            assert all(row.shape == (num_rows, VOCAB_SIZE) for row in output[name])
            assert not any(row[index].any() for row in output[name][length:])


def test_several_sequences_of_one_prompt(model, target):
    pipeline = loaded(target, ScriptedDrafter(PROMPT))
    options = {"max_new_tokens": 6, "do_sample": True, "top_k": 0, "num_return_sequences": 3}
    allowed = lambda batch_id, ids: [batch_id, *range(10, 60)]  # noqa: E731
    ids, mask = padded(ROWS[:2])
    output = model.generate(
        ids, attention_mask=mask, custom_generate=pipeline, seed=4, prefix_allowed_tokens_fn=allowed, **options
    )
    assert output.shape == (6, len(PROMPT) + 6)
    for index, row in enumerate(output.tolist()):
        prompt = ROWS[index // 3]
        only = lambda ids, scores, batch_id=index // 3: scores.masked_fill(  # noqa: E731
            ~torch.isin(torch.arange(VOCAB_SIZE), torch.tensor([batch_id, *range(10, 60)])), -torch.inf
        )
        assert row[len(PROMPT) :] == reference(model, prompt, 6, processors=[only], seed=(4, index)).tokens
    assert len({tuple(row[len(PROMPT) :]) for row in output.tolist()}) == 6


def test_a_state_of_the_callers_is_each_rows_own(model, target):
    class Counting:
        calls = 0

        def __call__(self, ids, scores):
            self.calls += 1
            return scores + torch.nn.functional.one_hot(torch.tensor([self.calls]), VOCAB_SIZE) * 99.0

    pipeline = loaded(target, ScriptedDrafter(PROMPT))
    ids, mask = padded(ROWS)
    output = model.generate(
        ids, attention_mask=mask, custom_generate=pipeline, max_new_tokens=4, do_sample=False, pad_token_id=0,
        logits_processor=LogitsProcessorList([Counting()]),
    )  # fmt: skip
    assert output[:, len(PROMPT) :].tolist() == [[1, 2, 3, 4]] * 3


# -- every option -----------------------------------------------------------------------------------------------------


def test_the_table_holds_every_option_of_the_installed_transformers():
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert set(GENERATION_OPTIONS) == fields
    assert all(option.note for option in GENERATION_OPTIONS.values())
    neutral = {**vars(GenerationConfig()), **GenerationConfig()._get_default_generation_params()}
    for name, option in GENERATION_OPTIONS.items():
        assert option.status != "refused" or neutral[name] in option.neutral, f"{name}: refused at its default"


CONFIGS = st.fixed_dictionaries(
    {"max_new_tokens": st.integers(1, 8)},
    optional={
        "do_sample": st.booleans(),
        "temperature": st.sampled_from([0.5, 1.0, 1.7]),
        "top_k": st.sampled_from([0, 3, 50]),
        "top_p": st.sampled_from([0.3, 0.9, 1.0]),
        "min_p": st.sampled_from([0.05, 0.4]),
        "typical_p": st.sampled_from([0.5, 1.0]),
        "epsilon_cutoff": st.sampled_from([0.0, 0.01]),
        "repetition_penalty": st.sampled_from([0.8, 1.0, 1.5]),
        "no_repeat_ngram_size": st.integers(0, 3),
        "min_new_tokens": st.integers(0, 5),
        "eos_token_id": st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=12, unique=True),
        "suppress_tokens": st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=9),
        "forced_eos_token_id": st.integers(0, VOCAB_SIZE - 1),
        "renormalize_logits": st.booleans(),
        "remove_invalid_values": st.booleans(),
        "use_cache": st.booleans(),
        "cache_implementation": st.sampled_from(["dynamic", "static"]),
        "num_beams": st.sampled_from([1, 1, 1, 2]),
        "penalty_alpha": st.sampled_from([0.0, 0.6]),
        "length_penalty": st.sampled_from([1.0, 2.0]),
        "prompt_lookup_num_tokens": st.sampled_from([None, None, 3]),
        "output_hidden_states": st.sampled_from([False, False, True]),
    },
)


@pytest.mark.filterwarnings("ignore")  # transformers' remarks on odd combinations
@settings(max_examples=30, derandomize=True)
@given(options=CONFIGS)
def test_any_configuration_is_the_references_or_refused_by_name(model, target, options):
    prompt = PROMPT[:6]
    try:
        GenerationConfig(**options)
    except ValueError:
        reject()  # transformers itself refuses the combination
    asked = {name for name, value in options.items() if GENERATION_OPTIONS[name].status == "refused"
             and value not in GENERATION_OPTIONS[name].neutral}  # fmt: skip
    pipeline = loaded(target, ScriptedDrafter(prompt), name="treegraft_fixed")
    if options.get("use_cache") is False and "cache_implementation" in options:
        options = {name: value for name, value in options.items() if name != "use_cache"}
    if asked:
        with pytest.raises(treegraft.RequestError, match="|".join(asked)):
            run(model, pipeline, prompt, **options)
        return
    output = run(model, pipeline, prompt, **options, seed=SEED)
    expected = reference(
        model, prompt, options["max_new_tokens"], processors=built(model, prompt, **options),
        eos=options.get("eos_token_id", ()), seed=SEED if options.get("do_sample") else None,
    )  # fmt: skip
    assert new_tokens(output, prompt) == expected.tokens
    if not options.get("do_sample"):
        assert torch.equal(output.sequences, run(model, None, prompt, **options).sequences)
