"""Collections: what a part says is what live rounds do, and being killed at any moment costs nothing but time."""

import signal
import subprocess
import sys
from itertools import product
from pathlib import Path

import attrs
import numpy as np
import pyarrow.parquet
import pytest
from collecting_toy import NUM_TOKENS, TEMPERATURES, TEXTS, collect_into, manifest, pipelines

from treegraft.errors import RequestError
from treegraft.interfaces import Scheduler
from treegraft.replay.schedules import Follow
from treegraft_plugins.schedulers.distilled import collect as module
from treegraft_plugins.schedulers.distilled import trajectories
from treegraft_plugins.schedulers.distilled.collect import (
    behaviour,
    cell_name,
    read_collection,
    read_manifest,
    read_rounds,
)
from treegraft_plugins.schedulers.distilled.signals import CANDIDATES, tree_signals

NUM_PARTS = len(TEXTS) * len(TEMPERATURES)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file by its path; Parquet files of the same rounds are the same bytes."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A collection that nothing has interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    collect_into(folder)
    return folder


# -- what it says -----------------------------------------------------------------------------------------------------


def test_a_part_for_each_prompt_and_temperature(whole):
    names = {f"parts/{cell_name(text, temperature)}.parquet" for text in TEXTS for temperature in TEMPERATURES}
    assert set(contents(whole)) == {"manifest.json", *names} and len(names) == NUM_PARTS
    said, rounds = read_collection(whole)
    assert said == manifest()
    assert set(rounds.report.tolist()) == {"toy + table x a", "toy + table x b"}
    assert set(zip(rounds.category.tolist(), rounds.temperature.tolist(), strict=True)) == {
        (text.category, np.float32(temperature)) for text in TEXTS for temperature in TEMPERATURES
    }


@attrs.frozen
class Following(Scheduler):
    """Takes each round's schedule from a behaviour."""

    follow: Follow

    def decide(self, state):
        return self.follow(state.statistics.acceptance.num_rounds)[len(state.steps)]


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_labels_and_signals_are_those_of_a_live_run_that_follows_the_behaviour(whole, temperature, monkeypatch):
    """Its calibration is what its own rounds have taught."""
    text, (live, _) = TEXTS[0], pipelines()
    rounds = read_rounds(whole / "parts" / f"{cell_name(text, temperature)}.parquet")
    follow = behaviour(text, temperature, manifest())
    monkeypatch.setattr(live, "parts", attrs.evolve(live.parts, scheduler=Following(follow)))
    done = live.generate(list(text.token_ids), NUM_TOKENS, temperature, seed=3, keep_rounds=True).rounds
    assert rounds.context.tolist() == [record.state.position + 1 for record in done] and len(done) > 3
    accepted = rounds.accepted(np.full(rounds.num_nodes.shape, 8))
    numbers = {tuple(names): number for number, names in enumerate(product(("small", "middle"), repeat=2))}
    for n, record in enumerate(done):
        number = numbers[follow(n)]
        assert accepted[n, number] == len(record.verdict.path)
        assert rounds.num_nodes[n, number] == len(record.state.tree) - 1
        for k, step in enumerate(record.state.steps):
            state = attrs.evolve(record.state, steps=record.state.steps[:k], tree=step.tree_before)
            at = trajectories.states_of(2)[number, k]
            assert (
                rounds.signals[n, at].tolist() == np.float32(tree_signals(state, live.sources[1], CANDIDATES)).tolist()
            )


def test_behaviours_take_all_schedules_and_differ_from_text_to_text():
    many = manifest(max_new_tokens=200)
    one, other = (behaviour(text, 0.0, many) for text in TEXTS)
    assert {one(number) for number in range(200)} == set(product(("small", "middle"), repeat=2))
    assert [one(number) for number in range(200)] != [other(number) for number in range(200)]
    assert [one(number) for number in range(200)] == [behaviour(TEXTS[0], 0.0, many)(number) for number in range(200)]


# -- killed -----------------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """In the place of a signal: nothing in between may catch it."""


class Killer:
    """Lets so many operations on files pass; the next one is cut off amidst or after what it does."""

    def __init__(self, patch: pytest.MonkeyPatch, num_passed: int, moment: str):
        self.left, self.moment = num_passed, moment
        self._cut(patch, Path, "write_text", lambda path, text, **_: path.write_bytes(text.encode()[: len(text) // 2]))
        self._cut(patch, Path, "replace", lambda path, target: None)  # as a whole or not at all
        self._cut(
            patch, pyarrow.parquet, "write_table", lambda table, path, **options: path.write_bytes(b"PAR1, and no more")
        )

    def _cut(self, patch, owner, name, halfway):
        done = getattr(owner, name)

        def wrapper(*args, **options):
            self.left -= 1
            if self.left != -1:
                return done(*args, **options)
            if self.moment == "amidst":
                halfway(*args, **options)
            if self.moment == "after":
                done(*args, **options)
            raise Killed

        patch.setattr(owner, name, wrapper)


@pytest.mark.parametrize("moment", ["amidst", "after"])
def test_killed_at_any_write_or_rename_it_goes_on_without_loss_or_duplication(whole, tmp_path, moment, monkeypatch):
    def remembered(replayed, recording, text, temperature, said):
        return read_rounds(whole / "parts" / f"{cell_name(text, temperature)}.parquet")

    # What is replayed is known, so that a collection costs little more than its writes.
    monkeypatch.setattr(module, "record", lambda *args: None)
    monkeypatch.setattr(module, "replayed_rounds", remembered)
    num_kills = 0
    while True:
        folder = tmp_path / str(num_kills)
        with pytest.MonkeyPatch.context() as patch:
            Killer(patch, num_kills, moment)
            try:
                collect_into(folder)
            except Killed:
                pass
            else:
                break
        kept = {name: path for name, path in contents(folder).items() if name.endswith((".parquet", ".json"))}
        assert kept.items() <= contents(whole).items(), "what has its name is whole"
        collect_into(folder)
        assert {name: held for name, held in contents(folder).items() if not name.endswith(".part")} == contents(whole)
        num_kills += 1
    assert num_kills == 2 + 2 * NUM_PARTS  # the manifest, the parts


def test_killed_by_a_signal_it_goes_on_and_makes_nothing_again(whole, tmp_path):
    script = Path(__file__).with_name("collecting_toy.py")
    with subprocess.Popen([sys.executable, str(script), str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line.split()[1] == "2":  # at work on the third part
                process.send_signal(signal.SIGKILL)
                break
    assert process.returncode == -signal.SIGKILL
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.parquet")}
    assert len(before) >= 2
    collect_into(tmp_path)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert {name: held for name, held in contents(tmp_path).items() if not name.endswith(".part")} == contents(whole)


# -- folders ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"middle": "other"}, "middle.*'table'; now 'other'"),
        ({"every": 2}, "every.*1; now 2"),
        ({"prompts": "0"}, "prompts"),
        (
            {"pipeline": {"calibration": "off", "sources": {"small": {"rank": 0}, "middle": {"rank": 1}}}},
            "pipeline.calibration.*'on'; now 'off'",
        ),
    ],
)
def test_a_folder_holds_one_collection(whole, changes, message):
    with pytest.raises(RequestError, match=message):
        collect_into(whole, **changes)


def test_costs_and_versions_may_move_and_the_first_ones_stay(whole):
    collect_into(whole, costs={"target": 9.0, "sources": {}}, versions={"treegraft": "1"})
    assert read_manifest(whole) == manifest()


def test_what_this_version_does_not_read_is_refused(whole, tmp_path):
    with pytest.raises(RequestError, match=r"no collection.*\n.*made by treegraft fit collect"):
        read_collection(tmp_path)
    manifest(format=1).save(tmp_path)
    with pytest.raises(RequestError, match=r"format 1.*\n.*reads format 2. Collect anew"):
        read_collection(tmp_path)


def test_a_collection_without_parts_is_refused(tmp_path):
    manifest().save(tmp_path)
    with pytest.raises(RequestError, match=r"without rounds.*\n.*to its end"):
        read_collection(tmp_path)
