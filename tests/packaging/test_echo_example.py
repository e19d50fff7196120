"""The plugin of docs/examples is as short as promised, loads by name, and drafts for real."""

import importlib
from pathlib import Path

import pytest

from treegraft.compose import build, resolve
from treegraft.plugins import load_plugins
from treegraft.testing import MarkovTarget, markov_table

FOLDER = Path(__file__).parents[2] / "docs" / "examples" / "treegraft-echo"


@pytest.fixture
def plugins(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    importlib.invalidate_caches()
    return load_plugins(["treegraft_echo"])


def test_it_is_short():
    code = [line for line in (FOLDER / "treegraft_echo.py").read_text().splitlines() if line.strip()]
    assert 0 < len(code) <= 25


def test_it_is_offered_by_its_entry_point():
    assert '[project.entry-points.treegraft]\necho = "treegraft_echo"' in (FOLDER / "pyproject.toml").read_text()


@pytest.mark.parametrize("pipeline", ["echo", "echo_and_middle"])
def test_its_registry_composes(plugins, pipeline):
    resolved = resolve(pipeline, registry=FOLDER / "registry.yaml", plugins=plugins)
    assert str(resolved.parts["sources.small.draft"].provider) == "module treegraft_echo"


def test_it_drafts_and_changes_nothing(plugins):
    target = MarkovTarget(markov_table(4, order=1, seed=1))  # greedy, so soon in a circle
    options = {"registry": FOLDER / "registry.yaml", "models": {"target": target}, "plugins": plugins}
    echo = build(resolve("echo", ["costs={use: fixed}", "sources.small.draft.lag=12"], **options))
    plain = build(resolve("plain", **options)).generate([0, 1], max_new_tokens=80)
    heard = echo.generate([0, 1], max_new_tokens=80)
    assert heard.token_ids == plain.token_ids
    assert heard.accepted_per_round > 0.5
