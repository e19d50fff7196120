"""Training of drafters: the text, what the loss is, exact resume, and that a drafter learns what there is to learn."""

import copy
import json
import re
import shutil

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


@pytest.mark.parametrize(
    "line, found",
    [
        ("{", "not JSON"),
        ("[1]", "no 'turns'"),
        ('{"turn": []}', "no 'turns'"),
        ('{"turns": "a word"}', "turns 'a word'"),
        ('{"turns": [1]}', r"turns \[1\]"),
    ],
)
def test_a_line_that_is_no_prompt_is_refused_with_file_and_line(line, found, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"turns": ["first"]}) + "\n\n" + line + "\n")
    with pytest.raises(RequestError, match=rf"prompts\.jsonl:3: {found}"):
        read_texts([tmp_path])


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


@pytest.mark.parametrize("change", ["text", "target", "dtype", "layers", "cut"])
def test_states_of_anything_else_are_never_taken_for_these(change, tmp_path):
    target = build("Llama", {}).float()
    text = np.random.default_rng(0).integers(3, 60, (5, 32))
    lessons_of(target, text, [1, 2], tmp_path)
    (file,) = tmp_path.glob("hidden-*")
    layers = [0, 2] if change == "layers" else [1, 2]
    if change == "text":
        text = text[::-1].copy()
    elif change == "target":
        target.model.layers[0].mlp.up_proj.weight.data.mul_(1.5)
    elif change == "dtype":
        target.bfloat16()
    elif change == "cut":
        file.write_bytes(file.read_bytes()[:-100])
    found = lessons_of(target, text, layers, tmp_path)[np.arange(5)]
    torch.testing.assert_close(found.hidden, lesson(target, text, layers, 1.0).hidden)
    assert len(list(tmp_path.glob("hidden-*"))) == 1  # what nothing reads any more does not stay


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
    assert [line["step"] for line in curve] == [3, 6]
    assert "min left" in said[1] and said[-1] == f"trained for 6 steps: {parts}"
    fit_it(fit(folder, parts, report=said.append), shape)
    assert said[-2:] == ["resumed at step 6", f"trained for 6 steps: {parts}"]


def test_until_half_of_the_steps_are_done_there_may_be_fewer_or_more(folder, tmp_path):
    def stopping(line):
        if line.startswith("step 3/"):
            raise Stop

    def schedule(steps):
        return Schedule(steps=steps, measure_every=3, save_every=2, warm_up=2)

    fit_dflash(fit(folder, tmp_path / "whole"), SHAPE)
    with pytest.raises(Stop):
        fit_dflash(fit(folder, tmp_path / "parts", schedule=schedule(8), report=stopping), SHAPE)
    with pytest.raises(RequestError, match=r"other settings \(schedule.steps 8, asked for 3\)"):
        fit_dflash(fit(folder, tmp_path / "parts", schedule=schedule(3)), SHAPE)
    fit_dflash(fit(folder, tmp_path / "parts"), SHAPE)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "parts")]
    assert weights[0] == weights[1]


def test_other_settings_are_refused_instead_of_mixed(folder, tmp_path):
    fit_dflash(fit(folder, tmp_path), SHAPE)
    with pytest.raises(RequestError, match=r"course\.num_windows 2, asked for 3\)"):
        fit_dflash(fit(folder, tmp_path, course=Course(num_windows=3, num_anchors=8)), SHAPE)
    with pytest.raises(RequestError, match=r"shape\.block_size 4, asked for 3\)"):
        fit_dflash(fit(folder, tmp_path), attrs.evolve(SHAPE, block_size=3))
    with pytest.raises(RequestError, match=r"text\.length 32, asked for 64"):
        fit_dflash(fit(folder, tmp_path, plan=TextPlan(length=64)), SHAPE)
    (tmp_path / "training.pt").unlink()
    with pytest.raises(RequestError, match=r"length 32, asked for 64"):
        fit_dflash(fit(folder, tmp_path, plan=TextPlan(length=64)), SHAPE)


def test_text_is_known_by_what_stands_in_it_and_the_target_by_its_weights(folder, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(folder, moved)
    said = []
    fit_dflash(fit(folder, tmp_path / "out"), SHAPE)
    fit_dflash(fit(moved, tmp_path / "out", report=said.append), SHAPE)
    assert said[0] == "resumed at step 6"
    (moved / "train" / "0.txt").write_text(" ".join(WORDS))
    with pytest.raises(RequestError, match="text sha256"):
        fit_dflash(fit(moved, tmp_path / "out"), SHAPE)
    target, tokenizer = load_causal_lm(ModelSpec(str(folder / "target")))
    other = copy.deepcopy(target)
    other.model.layers[1].self_attn.q_proj.weight.data.mul_(1.5)
    with pytest.raises(RequestError, match="target sha256"):
        fit_dflash(fit(folder, tmp_path / "out", target=(other, tokenizer)), SHAPE)


@pytest.mark.parametrize(
    "name, content",
    [(name, content) for name in ("training.pt", "text.npz") for content in (b"", b"no such thing\n", None)]
    + [("curve.jsonl", b"no such thing\n"), ("curve.jsonl", None)],
)
def test_a_damaged_file_is_named_and_may_be_deleted(name, content, folder, tmp_path):
    fit_dflash(fit(folder, tmp_path), SHAPE)
    file = tmp_path / name
    file.write_bytes(file.read_bytes()[:-20] if content is None else content)
    with pytest.raises(RequestError, match=rf"{name}: damaged .*\n.*Delete it"):
        fit_dflash(fit(folder, tmp_path), SHAPE)
    file.unlink()
    fit_dflash(fit(folder, tmp_path), SHAPE)


@pytest.mark.parametrize("fit_it, shape", [(fit_dflash, SHAPE), (fit_heads, HeadsShape(num_heads=3))])
def test_a_model_that_lies_there_already_is_not_written_over(fit_it, shape, folder, tmp_path):
    shutil.copytree(folder / "target", tmp_path / "target")
    fit_it(fit(folder, tmp_path / "first"), shape)
    (tmp_path / "published").mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tmp_path / "first" / name, tmp_path / "published" / name)
    start = ModelSpec(str(tmp_path / "published"), dtype="float32")
    for out, changes in ((tmp_path / "target", {}), (tmp_path / "published", {"start": start})):
        before = (out / "model.safetensors").read_bytes()
        with pytest.raises(RequestError, match="a model that no training here wrote"):
            fit_it(fit(folder, out, **changes), shape)
        assert (out / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("held_out", ["train", "train/0.txt", "."])
def test_text_that_is_trained_on_is_not_held_out(held_out, folder, tmp_path):
    with pytest.raises(RequestError, match="to train on"):
        fit_dflash(fit(folder, tmp_path, held_out=[folder / held_out]), SHAPE)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("fit_it, shape", [(fit_dflash, SHAPE), (fit_heads, HeadsShape(num_heads=3))])
def test_a_target_in_half_precision_teaches_too(fit_it, shape, dtype, folder, tmp_path):
    """What every accelerator loads by default; the drafter trains in float32."""
    target = ModelSpec(str(folder / "target"), dtype=dtype)
    for out, of in (("half", target), ("whole", ModelSpec(str(folder / "target")))):
        fit_it(fit(folder, tmp_path / out, target=of), shape)
    losses = [
        json.loads((tmp_path / out / "curve.jsonl").read_text().splitlines()[-1])["loss"] for out in ("half", "whole")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


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
    with pytest.raises(RequestError, match=r"other settings \(start .*, asked for None\)"):
        fit_it(attrs.evolve(begun, start=None), shape)


def test_a_start_brings_its_own_shape_and_settings(folder, tmp_path):
    """As a published checkpoint does, with the rotation and the end token of the model it was made from."""
    first = tmp_path / "first"
    fit_dflash(fit(folder, first), attrs.evolve(SHAPE, target_layer_ids=(0, 2)))
    settings = json.loads((first / "config.json").read_text())
    changes = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "eos_token_id": 1, "rms_norm_eps": 1e-5}
    (first / "config.json").write_text(json.dumps(settings | changes))
    begun = fit(folder, tmp_path / "begun", start=ModelSpec(str(first), dtype="float32"))
    fit_dflash(begun, DFlashShape())
    made = json.loads((tmp_path / "begun" / "config.json").read_text())
    for name in ("block_size", "num_hidden_layers", "head_dim", "dflash_config", *changes):
        assert made[name] == (settings | changes)[name]
    with pytest.raises(RequestError, match=r"target_layer_ids \[0, 2\], asked for \[1, 2\]"):
        fit_dflash(attrs.evolve(begun, out=tmp_path / "other"), DFlashShape(target_layer_ids=(1, 2)))


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


@pytest.mark.parametrize(
    "words, named",
    [
        ("--block-size 17 --length 32", "length: windows of 32 tokens"),
        ("--length 4096", "length: windows of 4096 tokens"),
        ("--target-layer 4", r"target_layer: \[4\].*0 to 2"),
        ("--target-layer 1 --target-layer 1", "target_layer: "),
        ("--mask-token 999999", "mask_token: 999999"),
        ("--heads 4 --key-value-heads 3", "key_value_heads: 3 for 4 heads"),
        ("--head-dim 7", "head_dim: 7"),
        ("--num-windows 0 --num-continued 0", "nothing to train on"),
        ("--anchors 12", "multiple of 8"),
        ("--learning-rate 0", "--learning-rate"),
        ("--gamma 0", "--gamma"),
        ("--label-temperature 0", "--label-temperature"),
        ("--temperature nan", "--temperature"),
        ("--temperature inf", "--temperature"),
        ("--temperature -1", "--temperature"),
        ("--length 32768", "length: windows of 32768"),
        ("--dtype float3", "dtype 'float3'"),
        ("--out {folder}/train/0.txt", "--out"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_any_work(words, named, folder, tmp_path):
    options = ["--target", folder / "target", "--text", folder / "train", "--held-out", folder / "held_out",
               "--out", tmp_path / "out", "--length", 32, *words.format(folder=folder).split()]  # fmt: skip
    result = CliRunner().invoke(main, ["fit", "dflash", *map(str, options)])
    assert result.exit_code == (1 if "dtype" in words else 2), result.output
    assert re.search(named, result.stderr, re.S) and "Not foreseen" not in result.stderr
    assert "continued by the target" not in result.stderr


@pytest.mark.parametrize("name", ["text", "held out"])
def test_too_little_text_is_refused_with_which(name, folder, tmp_path):
    (tmp_path / "short.txt").write_text("w5 w6")
    changes = {"texts" if name == "text" else "held_out": [tmp_path / "short.txt"]}
    with pytest.raises(RequestError, match=f"^{name}: 2 tokens in all"):
        fit_dflash(fit(folder, tmp_path / "out", **changes), SHAPE)


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
