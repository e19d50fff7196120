"""Pipelines as arms: which names there are, what an override reaches, what is shared, and what a request tells."""

from collections import Counter

import numpy as np
import pytest
import toy_plugin

from treegraft.bench import checks
from treegraft.bench.arms import Request
from treegraft.bench.lineup import AGAIN, Lineup, resolve_arms
from treegraft.bench.prompts import Prompt
from treegraft.bench.run import Bench, Plan, Task
from treegraft.errors import ComposeError, ModelError
from treegraft.plugins import load_plugins

REGISTRY = (
    toy_plugin.REGISTRY
    + """
  plain: {extends: toys, scheduler: {use: toy, pattern: []}, budget: {use: toy, verify_nodes: 0}}
  copies: {extends: one, sources: {small: {draft: {use: ngram}}}, steps: 2}
  remembers: {extends: copies, sources: {small: {draft: {use: ngram, shared: true}}}}
  elsewhere: {extends: one, target: {use: toy_target, model: middle}}
"""
)
REQUEST = Request(max_new_tokens=12, temperature=0.0, seed=3)
PROMPT = (1, 2, 3, 1, 2, 3, 1)


@pytest.fixture(scope="module")
def plugins():
    """The built-ins and the toys."""
    return load_plugins(["toy_plugin"])


@pytest.fixture
def compose(tmp_path, plugins):
    def call(*names, overrides=(), own="") -> Lineup:
        file = tmp_path / "registry.yaml"
        file.write_text(REGISTRY + own)
        toy_plugin.MADE.clear()
        return resolve_arms(names, overrides, file, plugins)

    return call


# -- names and overrides ----------------------------------------------------------------------------------------------


def test_pipelines_and_rivals_are_arms_and_plain_comes_twice(compose):
    lineup = compose("one", "plain", "hf_plain")
    assert lineup.names == ("one", "plain", "hf_plain", AGAIN)
    assert set(lineup.pipelines) == {"one", "plain", AGAIN} and set(lineup.rivals) == {"hf_plain"}
    assert compose("one").names == ("one",)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("tow",), r"no arm named 'tow'.*\n.*Did you mean 'two'"),
        (("hf_plian",), "Did you mean 'hf_plain'"),
        (("toys",), "no arm named 'toys'"),
        (("one", "one"), "a second time"),
        ((), "no arm"),
        (("one", "elsewhere"), r"pipelines\.elsewhere\.target: another target than that of one"),
    ],
)
def test_names_that_are_no_arms_are_refused(compose, names, message):
    with pytest.raises(ComposeError, match=message):
        compose(*names)


def test_overrides_reach_the_pipelines_that_have_the_part(compose):
    overrides = ("steps=2", "sources.middle.width=3", "models.middle=toy:other")
    lineup = compose("plain", "one", "two", overrides=overrides)
    assert {name: each.config["steps"] for name, each in lineup.pipelines.items()} == {
        "plain": 3, AGAIN: 3, "one": 2, "two": 2,
    }  # fmt: skip
    assert lineup.pipelines["two"].sources["middle"].width == 3
    assert lineup.models["middle"].path == "toy:other"


@pytest.mark.parametrize(
    ("names", "override", "message"),
    [
        (("one",), "sources.midle.width=3", r"no arm has a source named 'midle'"),
        (("two",), "sources.midle.width=3", r"Did you mean 'middle'"),
        (("plain",), "steps=2", "no arm that it could change"),
        (("plain", "one"), "stpes=2", "stpes"),
        (("plain",), "models.tagret=x", r"no model named 'tagret'"),
    ],
)
def test_an_override_that_reaches_nothing_is_refused(compose, names, override, message):
    with pytest.raises(ComposeError, match=message):
        compose(*names, overrides=(override,))


# -- what is shared ---------------------------------------------------------------------------------------------------


def test_all_arms_decode_with_one_target_object(compose):
    target, arms = compose("plain", "one", "two").build()
    assert all(arm.pipeline.target is target for arm in arms)
    assert Counter(name for name, _ in toy_plugin.MADE)["ToyTarget"] == 1
    assert [arm.name for arm in arms] == ["plain", "one", "two", AGAIN]
    assert [arm.drafts for arm in arms] == [False, True, True, False]


def test_transformers_arms_need_a_target_of_transformers(compose):
    with pytest.raises(ModelError, match="hf_plain: a target of class ToyTarget"):
        compose("one", "hf_plain").build()


# -- settings ---------------------------------------------------------------------------------------------------------


def test_settings_are_read_from_the_live_objects(compose):
    _, (arm,) = compose("two", overrides=("sources.middle.draft.rescore_limit=8",)).build()
    found = arm.settings()
    assert (found["steps"], found["verify_nodes"], found["budget.verify_nodes"]) == (3, 9, 9)
    assert (found["sources.small.width"], found["sources.middle.draft.rescore_limit"]) == (4, 8)
    assert found["scheduler.pattern"] == ["middle", "small"] and found["sources.small.draft.use"] == "toy_lookup"
    assert checks.shape(found) == {"steps": 3, "verify_nodes": 9, "width": [4, 10], "branching": [10]}
    assert checks.ignored_options([arm]) == []


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (
            lambda pipeline: setattr(pipeline.sources[0].drafter, "max_n", 1),
            "sources.small.draft.max_n was to be 3 and is 1",
        ),
        (lambda pipeline: setattr(pipeline.parts.budget, "max_verify_nodes", 2), "verify_nodes was to be 9 and is 2"),
        (lambda pipeline: setattr(pipeline, "calibration", False), "calibration was to be 'on' and is 'off'"),
    ],
)  # fmt: skip
def test_an_option_that_did_not_arrive_is_found(compose, spoil, sentence):
    _, (arm,) = compose("one").build()
    spoil(arm.pipeline)
    assert f"one: {sentence}" in checks.ignored_options([arm])


def test_what_a_request_ran_with_is_read_back(compose):
    _, (arm,) = compose("one").build()
    told = arm.run(PROMPT, Request(12, 0.7, 3)).tell()
    asked = {"max_new_tokens": 12, "temperature": pytest.approx(0.7), "seed": 3, "steps": 3, "verify_nodes": 9}
    assert told.settings == asked
    assert arm.run(PROMPT, REQUEST).tell().settings["temperature"] == 0.0


# -- state ------------------------------------------------------------------------------------------------------------


def test_a_drafter_that_remembers_earlier_prompts_is_found(compose):
    target, arms = compose("copies", "remembers").build()
    tasks = [Task(Prompt(str(n), "c", ("x",), "f"), ids) for n, ids in enumerate((PROMPT, (4, 4, 2)))]
    found = Bench(arms, target, tasks, Plan((16,))).probe()
    assert [each.split(":")[0] for each in found] == ["remembers"] and "keeps state between prompts" in found[0]


def test_frozen_costs_learn_nothing_and_the_arm_gets_its_own_back(compose):
    _, (arm,) = compose("one").build()
    own = arm.pipeline.costs
    with arm.frozen():
        frozen = arm.pipeline.costs
        frozen.record_target(3, 10, 99.0)
        assert frozen is not own and frozen.table() == own.table()
        own.target = 7.0
        assert float(frozen.target_ms(np.array(1), 0)) == 1.0
    assert arm.pipeline.costs is own


# -- what rounds tell -------------------------------------------------------------------------------------------------


def test_a_request_tells_of_every_round(compose):
    _, (arm,) = compose("copies").build()
    answer = arm.run(PROMPT, REQUEST)
    told = answer.tell()
    assert sum(each.emitted for each in told.rounds) == len(answer.token_ids) == 12
    assert any(each.accepted for each in told.rounds), "else this shows little"
    for each in told.rounds:
        assert each.accepted <= each.followed <= each.emitted and each.verified <= min(each.drafted, 9)
        assert sum(each.accepted_by_source.values()) == each.accepted
        assert set(each.ms) == {"schedule", "draft", "build", "target", "verify", "commit", "learn"}
        assert each.ms["draft"] == pytest.approx(sum(each.source_ms.values()), abs=1e-3)
        assert each.source_calls.get("small", 0) <= 2
    assert told.num_copied == sum(each.accepted for each in told.rounds), "nothing else can have proposed them"
    assert told.faults == [] and told.prefill_ms >= 0


def test_depths_and_calibration_are_counted_along_the_emitted_path(compose):
    _, (arm,) = compose("two").build()
    pipeline = arm.pipeline
    records = list(pipeline.rounds(list(PROMPT), 12))
    told = arm.run(PROMPT, REQUEST).tell()
    depths = Counter()
    labelled = {"small": [], "middle": []}
    for record in records:
        tree, row = record.state.tree, 0
        for token in record.tokens:
            children = [child for child in range(len(tree)) if tree.parent[child] == row]
            for child in children:
                name = ("small", "middle")[tree.scorer[child]]
                labelled[name].append((float(np.exp(tree.edge_score[child])), tree.token[child] == token))
            row = next((child for child in children if tree.token[child] == token), None)
            if row is None:
                break
        verified = record.pruned
        for depth, row in enumerate([0, *record.verdict.path]):
            if row in verified.parent:
                depths[depth, "there"] += 1
                depths[depth, "accepted"] += depth < len(record.verdict.path)
    assert told.by_depth == [[depths[d, "there"], depths[d, "accepted"]] for d in range(len(told.by_depth))]
    assert told.by_depth[0][0] > 0 and (len(told.by_depth), "there") not in depths
    assert labelled["middle"], "else this shows little"
    for name, found in labelled.items():
        table = told.calibration[name]
        assert sum(count for count, _, _ in table) == len(found)
        assert sum(total for _, total, _ in table) == pytest.approx(sum(p for p, _ in found), abs=1e-4)
        assert sum(accepted for _, _, accepted in table) == sum(bool(hit) for _, hit in found)
        assert all(
            0.1 * place * n - 1e-6 <= total <= 0.1 * (place + 1) * n + 1e-6 for place, (n, total, _) in enumerate(table)
        )


def test_tokens_of_a_network_are_not_copied(compose):
    _, (arm,) = compose("two", overrides=("scheduler.pattern=[middle]",)).build()
    told = arm.run(PROMPT, REQUEST).tell()
    assert told.num_copied == 0 and sum(each.accepted for each in told.rounds) > 0


def test_plain_decoding_drafts_nothing_and_says_the_same_text(compose):
    _, arms = compose("plain", "one", "two").build()
    texts = {arm.name: arm.run(PROMPT, REQUEST).token_ids for arm in arms}
    assert len({tuple(ids) for ids in texts.values()}) == 1
    told = arms[0].run(PROMPT, REQUEST).tell()
    assert [(each.emitted, each.accepted, each.verified, each.drafted) for each in told.rounds] == [(1, 0, 0, 0)] * 12
