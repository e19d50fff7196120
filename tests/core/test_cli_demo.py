"""`treegraft demo`: what it draws is what happened, and it fails if a text differs."""

import importlib
import io
import itertools
import re
from pathlib import Path

import attrs
import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

import treegraft
from treegraft.cli import main
from treegraft.cli.comparison import Arm, compare, comparison_table
from treegraft.cli.drawing import Palette, most_telling, proposers, round_tree, stream_in_colours
from treegraft.testing import MarkovTarget, TableDrafter, markov_table

demo_module = importlib.import_module("treegraft.cli.demo")
FIXED = ("costs={use: fixed}", "budget={use: fixed, verify_nodes: 20}")
PROMPT = "abcabd"
ESCAPE = "\x1b"


class Letters:
    """A tokenizer of letters: token 0 is "a"."""

    def __call__(self, text):
        return {"input_ids": [ord(letter) - ord("a") for letter in text]}

    def decode(self, token_ids, skip_special_tokens=False):
        return "".join(chr(token + ord("a")) for token in token_ids)


def toy(name="treegraft_fixed", *overrides):
    """A packaged pipeline over toys whose middle mostly agrees with the target."""
    table = markov_table(6, order=2, seed=3)
    middle = TableDrafter(table + np.random.default_rng(1).normal(scale=0.5, size=table.shape))
    models = {"target": MarkovTarget(table), "middle": middle}
    return treegraft.load(name, *(overrides or FIXED), models=models, tokenizer=Letters())


def printed(*renderables, **options):
    out = io.StringIO()
    console = Console(file=out, width=100, highlight=False, **options)
    for renderable in renderables:
        console.print(renderable)
    return out.getvalue()


@pytest.fixture(scope="module")
def pipeline():
    return toy()


@pytest.fixture(scope="module")
def records(pipeline):
    return list(pipeline.rounds(PROMPT, 30))


def test_every_token_is_told_by_who_proposed_it(pipeline, records):
    for record in records:
        told = proposers(record)
        assert len(told) == len(record.tokens)
        for token, source, row in itertools.zip_longest(record.tokens, told, record.verdict.path.tolist()):
            if row is None:
                assert source == -1  # the target's own
            else:
                assert (token, source) == (record.pruned.token[row], record.pruned.source[row])
    assert {source for record in records for source in proposers(record)} == {-1, 0, 1}


def test_the_stream_is_the_prompt_and_the_text_and_without_a_terminal_nothing_else(pipeline):
    out = io.StringIO()
    records = stream_in_colours(Console(file=out), pipeline, PROMPT, 30)
    assert out.getvalue() == PROMPT + pipeline.generate(PROMPT, 30).text + "\n"
    assert sum(len(record.tokens) for record in records) == 30


def test_on_a_terminal_each_proposer_has_a_colour(pipeline):
    out = io.StringIO()
    stream_in_colours(Console(file=out, force_terminal=True, color_system="standard"), pipeline, PROMPT, 30)
    assert len(set(re.findall(r"\x1b\[[\d;]+m", out.getvalue())) - {"\x1b[0m"}) == 4  # prompt, target, two sources


def test_an_unfinished_character_waits_for_its_end():
    class Halves(Letters):
        def decode(self, token_ids, skip_special_tokens=False):
            text = "é" * (len(token_ids) // 2)
            return text + "\ufffd" * (len(token_ids) % 2)

    out = io.StringIO()
    halved = toy()
    halved.tokenizer = Halves()
    stream_in_colours(Console(file=out), halved, PROMPT, 9)
    assert out.getvalue() == PROMPT + "é" * 4 + "\n"


def test_the_palette_names_sources_by_index_and_everything_else_the_target(pipeline):
    palette = Palette.of(pipeline.sources)
    assert [palette.name(source) for source in (-1, 0, 1)] == ["target", "small", "middle"]
    assert len({palette.style(name) for name in ("target", "small", "middle")}) == 3
    assert palette.legend({"small": 3, "target": 1}).plain == "small 3, target 1"


def test_the_drawn_round_is_a_telling_one(records):
    record = most_telling(records)
    tree = record.state.tree
    assert len(record.verdict.path) and len(record.pruned) < len(tree)
    assert (tree.scorer != tree.source).any()


def test_the_drawn_tree_says_what_happened(pipeline, records):
    record = most_telling(records)
    tree, path = record.state.tree, record.verdict.path
    text = printed(round_tree(record, 4, pipeline))
    lines = text.splitlines()
    assert lines[0] == "Round 4, steps by middle, small, middle, small, middle:"
    assert lines[1] == (
        f"{len(tree) - 1} drafted, {int((tree.scorer != tree.source).sum())} rescored, "
        f"{len(tree) - len(record.pruned)} pruned, {len(record.pruned) - 1} verified, {len(path)} accepted"
    )
    accepted = [line for line in lines[3:] if "accepted" in line]
    shown = re.findall(r"'(\w+)'", "\n".join(accepted))
    assert "".join(shown) == Letters().decode(record.tokens[: len(path)])
    assert re.search(rf"'{Letters().decode(record.tokens[-1:])}'  target's own token", text) or len(path) > 6
    for line in accepted[:6]:
        assert re.search(r"-?\d+\.\d\d  (small|middle)(, rescored by middle)?  accepted$", line)
    assert ESCAPE not in text and max(map(len, lines)) <= 100


def test_no_node_is_drawn_twice_or_left_uncounted(pipeline, records):
    for number, record in enumerate(records):
        if not 0 < len(record.verdict.path) <= 6:
            continue
        tree = record.state.tree
        text = printed(round_tree(record, number, pipeline))
        drawn = len(re.findall(r"  (?:small|middle)\b(?!,? steps)", text))
        hidden = sum(int(count) for count in re.findall(r"and (\d+) more", text))
        rows = {int(np.flatnonzero(tree.uid == uid)[0]) for uid in record.pruned.uid[record.verdict.path]} | {0}
        assert drawn + hidden == sum(int((tree.parent == row).sum()) for row in rows)


def test_a_long_accepted_path_is_cut():
    table = np.full((3, 3), -20.0)
    table[[0, 1, 2], [1, 2, 0]] = 0.0
    models = {"target": MarkovTarget(table), "middle": TableDrafter(table)}
    sure = treegraft.load("all_middle", *FIXED, "steps=9", models=models, tokenizer=Letters())
    (record, *_) = sure.rounds("abc", 20)
    assert len(record.verdict.path) == 9
    text = printed(round_tree(record, 1, sure))
    assert text.count("accepted") == 1 + 6 + 1 and "'abc'  3 more accepted" in text


# -- the comparison ---------------------------------------------------------------------------------------------------


def test_pipelines_take_turns_and_every_figure_is_that_of_the_generations():
    calls = []

    def recorded(name, pipeline):
        generate = pipeline.generate

        def call(prompt, max_new_tokens):
            calls.append((prompt, name))
            return generate(prompt, max_new_tokens)

        pipeline.generate = call
        return pipeline

    pipelines = {name: recorded(name, toy(name)) for name in ("plain", "treegraft_fixed")}
    arms = compare(pipelines, ["abc", "bcd"], 20, repeats=2, max_seconds=1e9)
    assert calls == [(prompt, name) for prompt in ("abc", "bcd") * 2 for name in pipelines]
    plain, fixed = arms.values()
    assert [len(runs) for runs in fixed.runs] == [2, 2]
    assert plain.num_rounds == 40 and fixed.num_rounds == sum(runs[0].num_rounds for runs in fixed.runs) < 40
    assert fixed.a_round(lambda generation: generation.emitted_per_round) == pytest.approx(40 / fixed.num_rounds)
    assert fixed.calls("middle") == sum(runs[1].source_calls["middle"] for runs in fixed.runs) > 0
    assert fixed.same_as(plain) and plain.tokens_per_second > 0

    text = printed(comparison_table(arms, "middle"))
    (row,) = [line.split() for line in text.splitlines() if line.startswith("treegraft_fixed")]
    assert row[3:] == [f"{40 / fixed.num_rounds:.2f}", row[4], str(fixed.num_rounds), str(fixed.calls("middle")), "yes"]
    changed = [[attrs.evolve(run, token_ids=[*run.token_ids[:-1], 99]) for run in runs] for runs in fixed.runs]
    assert not Arm("treegraft_fixed", changed).same_as(plain)


def test_turns_end_when_the_time_is_up_but_the_first_is_taken():
    arms = compare({"plain": toy("plain")}, ["abc", "bcd"], 5, repeats=3, max_seconds=0.0)
    assert [len(runs) for runs in arms["plain"].runs] == [1]


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def invoke(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TREEGRAFT_CACHE", str(tmp_path))
    plan = demo_module.Plan(shown_tokens=24, num_prompts=1, max_new_tokens=16, repeats=1, max_seconds=1e9)
    monkeypatch.setattr(demo_module, "QUICK", plan)
    return lambda *args: CliRunner().invoke(main, ["demo", "--quick", *args])


def test_the_demo_ignores_registry_files_and_writes_plain_text_where_there_is_no_terminal(invoke):
    Path("registry.yaml").write_text("pipelines: {treegraft: {extends: plain}, broken: 3}")
    result = invoke()
    assert (result.exit_code, result.stderr) == (0, "")
    assert ESCAPE not in result.stdout
    assert re.search(r"^Proposed by: small \d+, middle \d+, target \d+$", result.stdout, re.MULTILINE)
    assert "steps by middle, small, middle, small, middle" in result.stdout
    rows = [line.split() for line in result.stdout.splitlines() if line.endswith("yes")]
    assert [row[0] for row in rows] == ["plain", "all_small", "all_middle", "treegraft"]
    assert rows[0][2] == "1.00x"


def test_a_text_that_differs_is_told_and_fails(invoke, monkeypatch):
    def tampered(*args):
        arms = compare(*args)
        arms["all_small"].runs[0][0].token_ids[-1] += 1
        return arms

    monkeypatch.setattr(demo_module, "compare", tampered)
    result = invoke()
    assert result.exit_code == 1
    assert result.stderr == "The text of all_small differs from plain's.\n"
    assert re.search(r"^all_small .* no$", result.stdout, re.MULTILINE)


def test_only_models_can_be_changed(invoke):
    result = invoke("steps=3")
    assert result.exit_code == 2 and "steps=3: only models can be changed here" in result.stderr


def test_a_target_of_ones_own_needs_a_middle_of_ones_own(invoke):
    result = invoke("models.target=./mine")
    assert result.exit_code == 2
    assert "models.middle=PATH" in result.stderr and result.stdout == ""
