"""Training of drafters: the text, what the loss is, exact resume, and that a drafter learns what there is to learn."""

import json

import attrs
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hf.families import FAMILIES, build
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from treegraft.cli import main
from treegraft.errors import ModelError, RequestError
from treegraft.interfaces import ModelSpec
from treegraft_plugins.hf.dflash.drafter import DFlashDrafter
from treegraft_plugins.hf.dflash.training import DFlashShape, DFlashStudent, fit_dflash
from treegraft_plugins.hf.heads.drafter import HeadsDrafter
from treegraft_plugins.hf.heads.training import HeadsShape, fit_heads
from treegraft_plugins.hf.loading import load_causal_lm
from treegraft_plugins.hf.target import HFCausalLMTarget
from treegraft_plugins.hf.training.corpus import TextPlan, continued, read_texts, token_stream
from treegraft_plugins.hf.training.course import Course, Fit
from treegraft_plugins.hf.training.loop import Schedule
from treegraft_plugins.hf.training.teacher import Lessons, accepted_along, lesson

WORDS = [f"w{number}" for number in range(60)]
SHAPE = DFlashShape(block_size=4, num_layers=1, num_heads=2, num_key_value_heads=1, head_dim=16, intermediate_size=32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target with its tokenizer, and text of its words."""
    folder = tmp_path_factory.mktemp("training")
    build("Llama", {}).float().save_pretrained(folder / "target")
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w3").save_pretrained(folder / "target")
    rng = np.random.default_rng(0)
    for name in ("train", "held_out"):
        (folder / name).mkdir()
        for number in range(3):
            (folder / name / f"{number}.txt").write_text(" ".join(rng.choice(WORDS, 200)))
    return folder


def fit(folder, out, **changes):
    options = {
        "target": ModelSpec(str(folder / "target")), "texts": [folder / "train"], "held_out": [folder / "held_out"],
        "out": out, "plan": TextPlan(length=32, num_windows=8, num_continued=8, num_held_out=4, temperatures=(0.0,)),
        "course": Course(num_windows=2, num_anchors=8), "report": lambda line: None,
        "schedule": Schedule(steps=6, measure_every=3, save_every=2, warm_up=2),
    }  # fmt: skip
    return Fit(**{**options, **changes})


# -- text -------------------------------------------------------------------------------------------------------------


def test_texts_come_from_files_folders_and_prompts(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.py").write_text("a = 1\n")
    (tmp_path / "b.bin").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "c.jsonl").write_text(json.dumps({"turns": ["first", "second"]}) + "\n")
    assert read_texts([tmp_path]) == ["first", "second", "a = 1\n"]
    assert read_texts([tmp_path / "deep" / "a.py"]) == ["a = 1\n"]
    with pytest.raises(RequestError, match="no text"):
        read_texts([tmp_path / "b.bin"])


def test_a_continuation_is_what_the_target_says(folder):
    target = HFCausalLMTarget(ModelSpec(str(folder / "target")), self_check=False)
    prompts = np.array([[5, 6, 7], [8, 9, 10]])
    tokens = continued(target.model, prompts, 9, 0.0, torch.Generator())
    for row, prompt in zip(tokens, prompts, strict=True):
        expected = target.model.generate(torch.from_numpy(prompt[None]), do_sample=False, max_new_tokens=6)
        assert row.tolist() == expected[0].tolist()
    sampled = continued(target.model, prompts, 9, 1.0, torch.Generator().manual_seed(1))
    again = continued(target.model, prompts, 9, 1.0, torch.Generator().manual_seed(1))
    assert np.array_equal(sampled, again) and not np.array_equal(sampled, tokens)


def test_accepted_tokens_are_counted_as_match_verification_would():
    text = np.array([7, 1, 2, 3, 4, 5, 6, 8])
    drafts = np.zeros((8, 2), np.int64)
    drafts[1], drafts[4], drafts[5] = (2, 3), (9, 9), (6, 9)  # all right: next anchor 4; all wrong: 5; one right: 7
    assert accepted_along(drafts, text, 1) == (3, 3)


# -- the loss ---------------------------------------------------------------------------------------------------------


def test_blocks_in_training_say_what_the_drafter_says_at_the_same_place(folder, tmp_path):
    """One forward of many anchors, against the drafter drafting behind each prefix by itself."""
    task = fit(folder, tmp_path)
    fit_dflash(task, SHAPE)
    spec = ModelSpec(str(tmp_path))
    drafter, target = DFlashDrafter(spec), HFCausalLMTarget(task.target, self_check=False)
    drafter.bind(target)
    tokens = np.arange(3, 23)
    taught = lesson(target.model, tokens[None], [layer + 1 for layer in drafter.network.target_layer_ids], 1.0)
    anchors = torch.tensor([[1, 4, 12]])
    hidden = DFlashStudent(drafter.network).places(target.model, taught, anchors)[0]
    for number, anchor in enumerate(anchors[0].tolist()):
        (seen,) = target.prefill([tokens[: anchor + 1]], drafter.wants)
        drafter.start(seen)
        expected = drafter._pass(int(tokens[anchor])).log_probs
        torch.testing.assert_close(target.head(hidden[number]).log_softmax(-1), expected, atol=1e-4, rtol=1e-4)


def lessons_of(target, text, layers, folder, temperature=1.0):
    return Lessons.of(target, text, layers, temperature, folder, lambda line: None, batch_size=2)


def test_lessons_are_what_the_target_says_computed_once(tmp_path):
    target = build("Llama", {}).float()
    text = np.random.default_rng(0).integers(3, 60, (5, 32))
    made = lessons_of(target, text, [1, 2], tmp_path, 0.5)
    forwards = []
    target.register_forward_hook(lambda *_: forwards.append(1))
    kept = lessons_of(target, text, [1, 2], tmp_path, 0.5)
    rows = np.array([3, 0, 3])
    found = [each[rows] for each in (made, kept)]
    assert not forwards and len(kept) == 5
    expected = lesson(target, text[rows], [1, 2], 0.5)
    for each in found:
        assert torch.equal(each.tokens, expected.tokens)
        torch.testing.assert_close(each.hidden, expected.hidden)
        torch.testing.assert_close(each.probs, expected.probs)


def test_place_k_is_taught_the_targets_distribution_of_that_place(tmp_path):
    """The loss of a student that says exactly this is the distributions' own entropy, the least there is."""
    target = build("Llama", {}).float()
    text = np.random.default_rng(0).integers(3, 60, (4, 32))

    class Knowing:
        hidden_layers, num_places = [3], 3  # the target's last hidden states

        def places(self, target, taught, anchors):
            rows = torch.arange(len(anchors))[:, None, None]
            return taught.hidden[rows, anchors[:, :, None] + torch.arange(3), 0]

    class Late(Knowing):
        def places(self, target, taught, anchors):
            return super().places(target, taught, anchors - 1)

    course = Course(num_windows=4, num_anchors=8, gamma=2.0)
    lessons = lessons_of(target, text, [3], tmp_path)
    loss = course.loss(Knowing(), lessons, np.random.default_rng(1))
    probs = lesson(target, text, [3], 1.0).probs
    entropy = -(probs * probs.log()).sum(-1)
    assert entropy.min() <= loss <= entropy.max()
    assert course.loss(Late(), lessons, np.random.default_rng(1)) > loss + 0.1


# -- the loop ---------------------------------------------------------------------------------------------------------


class Stop(Exception):
    pass


@pytest.mark.parametrize("fit_it, shape", [(fit_dflash, SHAPE), (fit_heads, HeadsShape(num_heads=3))])
def test_a_resumed_training_ends_where_an_uninterrupted_one_does(fit_it, shape, folder, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    fit_it(fit(folder, whole), shape)

    def stop_at_half(line):
        if line.startswith("step 3/"):
            raise Stop

    with pytest.raises(Stop):
        fit_it(fit(folder, parts, report=stop_at_half), shape)
    said = []
    fit_it(fit(folder, parts, report=said.append), shape)
    assert said[0] == "resumed at step 2"
    for name in ("model.safetensors", "curve.jsonl", "config.json"):
        assert (whole / name).read_bytes() == (parts / name).read_bytes()
    curve = [json.loads(line) for line in (whole / "curve.jsonl").read_text().splitlines()]
    assert [line["step"] for line in curve] == [3, 6] and all(line["accepted at 0"] >= 0 for line in curve)
    assert "min left" in said[1]


def test_until_half_of_the_steps_are_done_there_may_be_fewer_or_more(folder, tmp_path):
    def stopping(line):
        if line.startswith("step 3/"):
            raise Stop

    def schedule(steps):
        return Schedule(steps=steps, measure_every=3, save_every=2, warm_up=2)

    fit_dflash(fit(folder, tmp_path / "whole"), SHAPE)
    with pytest.raises(Stop):
        fit_dflash(fit(folder, tmp_path / "parts", schedule=schedule(8), report=stopping), SHAPE)
    with pytest.raises(RequestError, match=r"other settings \(steps\)"):
        fit_dflash(fit(folder, tmp_path / "parts", schedule=schedule(3)), SHAPE)
    fit_dflash(fit(folder, tmp_path / "parts"), SHAPE)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "parts")]
    assert weights[0] == weights[1]


def test_other_settings_are_refused_instead_of_mixed(folder, tmp_path):
    fit_dflash(fit(folder, tmp_path), SHAPE)
    with pytest.raises(RequestError, match="other settings"):
        fit_dflash(fit(folder, tmp_path, course=Course(num_windows=3, num_anchors=8)), SHAPE)
    with pytest.raises(RequestError, match="another plan"):
        fit_dflash(fit(folder, tmp_path, plan=TextPlan(length=64)), SHAPE)


@pytest.mark.parametrize("fit_it, shape", [(fit_dflash, SHAPE), (fit_heads, HeadsShape(num_heads=3))])
def test_a_training_may_begin_with_another_ones_weights(fit_it, shape, folder, tmp_path):
    first = tmp_path / "first"
    fit_it(fit(folder, first), shape)
    still = Schedule(steps=1, learning_rate=1e-6, measure_every=1, save_every=1)
    begun = fit(folder, tmp_path / "begun", schedule=still, start=ModelSpec(str(first), dtype="float32"))
    fit_it(begun, shape)
    weights = [load_file(out / "model.safetensors") for out in (first, tmp_path / "begun")]
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, rtol=1e-2, atol=1e-3)
    with pytest.raises(RequestError, match=r"other settings \(start\)"):
        fit_it(attrs.evolve(begun, start=None), shape)


@pytest.mark.parametrize(
    "fit_it, shape, other, named",
    [
        (fit_dflash, SHAPE, attrs.evolve(SHAPE, block_size=8), "block_size 4, asked for 8"),
        (fit_heads, HeadsShape(num_heads=3), HeadsShape(num_heads=2), "num_heads 3, asked for 2"),
    ],
)
def test_a_start_of_another_shape_is_refused_with_what_differs(fit_it, shape, other, named, folder, tmp_path):
    fit_it(fit(folder, tmp_path / "first"), shape)
    begun = fit(folder, tmp_path / "begun", start=ModelSpec(str(tmp_path / "first"), dtype="float32"))
    with pytest.raises(RequestError, match=named):
        fit_it(begun, other)


@pytest.mark.parametrize("fit_it, shape", [(fit_dflash, SHAPE), (fit_heads, HeadsShape(num_heads=3))])
def test_it_learns(fit_it, shape, folder, tmp_path):
    task = fit(
        folder, tmp_path, course=Course(num_windows=4, num_anchors=16),
        schedule=Schedule(steps=60, measure_every=20, save_every=60, warm_up=5),
    )  # fmt: skip
    fit_it(task, shape)
    losses = [json.loads(line)["loss"] for line in (tmp_path / "curve.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0] - 0.1


# -- the commands -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, drafter", [("dflash", DFlashDrafter), ("heads", HeadsDrafter)])
def test_the_command_writes_a_drafter_that_loads(name, drafter, folder, tmp_path):
    words = ["fit", name, "--target", folder / "target", "--text", folder / "train", "--held-out", folder / "held_out",
             "--out", tmp_path / "out", "--steps", 2, "--length", 32, "--num-windows", 4, "--num-continued", 4,
             "--num-held-out", 2, "--batch", 1, "--anchors", 8, "--measure-every", 1]  # fmt: skip
    result = CliRunner().invoke(main, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    assert "step 2/2" in result.stderr
    made = drafter(ModelSpec(str(tmp_path / "out")))
    made.bind(HFCausalLMTarget(ModelSpec(str(folder / "target")), self_check=False))
    assert made.network.dtype == torch.float32


def test_a_target_without_a_tokenizer_is_refused(folder, tmp_path):
    build("Llama", {}).float().save_pretrained(tmp_path / "target")
    with pytest.raises(RequestError, match="without a tokenizer"):
        fit_dflash(fit(folder, tmp_path / "out", target=ModelSpec(str(tmp_path / "target"))), SHAPE)


def test_a_target_that_lends_no_head_is_refused(folder, tmp_path):
    target = FAMILIES["gemma2"](), load_causal_lm(ModelSpec(str(folder / "target")))[1]
    with pytest.raises(ModelError, match="scales or caps"):
        fit_dflash(fit(folder, tmp_path / "out", target=target), SHAPE)


def test_anchors_come_in_whole_groups():
    with pytest.raises(ValueError, match="num_anchors"):
        Course(num_anchors=12)


def test_a_stream_ends_each_text_with_the_end_token():
    class Words:
        eos_token_id = 9

        def encode(self, text):
            return [len(word) for word in text.split()]

    assert token_stream(["a bb", "ccc"], Words()).tolist() == [1, 2, 9, 3, 9]
