"""`treegraft show` and `treegraft plugins`: what is on which stream, and the exit status of good and bad use."""

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from click.testing import CliRunner
from omegaconf import OmegaConf
from toy_plugin import REGISTRY

from treegraft.cli import COMMANDS, main
from treegraft.registry import packaged_registry


@pytest.fixture
def invoke(tmp_path, monkeypatch):
    """Runs the command line in an empty folder, with the toys as an unpackaged plugin and their registry."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(metadata, "entry_points", lambda group: [])
    Path("toys.yaml").write_text(REGISTRY)

    def call(*args):
        return CliRunner().invoke(main, [str(arg) for arg in args])

    return call


TOY_OPTIONS = ("--plugin", "toy_plugin", "--registry", "toys.yaml")


def test_show_prints_a_registry_file_that_resolves_to_the_same(invoke):
    shown = invoke("show", "two", "steps=4", "models.middle.dtype=float16", *TOY_OPTIONS)
    assert (shown.exit_code, shown.stderr) == (0, "")
    content = OmegaConf.to_container(OmegaConf.create(shown.stdout))
    assert content["models"] == {
        "target": {"path": "toy:target", "dtype": "float64"},
        "middle": {"path": "toy:middle", "dtype": "float16"},
    }
    assert content["pipelines"]["two"]["steps"] == 4
    Path("shown.yaml").write_text(shown.stdout)
    again = invoke("show", "two", "--plugin", "toy_plugin", "--registry", "shown.yaml")
    assert OmegaConf.create(again.stdout) == OmegaConf.create(shown.stdout)


def test_show_says_which_files_took_part_who_provides_each_part_and_whether_it_is_lossless(invoke):
    lines = invoke("show", "two", *TOY_OPTIONS).stdout.splitlines()
    assert [line for line in lines if line.startswith("# file: ")] == [
        f"# file: {packaged_registry()}", "# file: toys.yaml",
    ]  # fmt: skip
    assert "# lossless: yes" in lines
    (row,) = [line.split() for line in lines if line.startswith("# sources.middle.draft")]
    assert row == ["#", "sources.middle.draft", "toy_model", "toy_plugin.ToyDrafter", "module", "toy_plugin"]
    assert "# lossless: no" in invoke("show", "two", "verifier={use: toy}", *TOY_OPTIONS).stdout.splitlines()


def test_plugins_lists_what_is_loaded_and_what_failed(invoke, monkeypatch):
    broken = metadata.EntryPoint("broken", "no_such_module", "treegraft")
    monkeypatch.setattr(metadata, "entry_points", lambda group: [broken])
    listed = invoke("plugins", "--plugin", "toy_plugin")
    assert (listed.exit_code, listed.stderr) == (0, "")
    assert ["drafter", "toy_lookup", "toy_plugin.ToyLookup", "module", "toy_plugin"] in [
        line.split() for line in listed.stdout.splitlines()
    ]
    failure = "ModuleNotFoundError: No module named 'no_such_module'"
    assert f"not loaded: module no_such_module ({failure})" in listed.stdout

    content = json.loads(invoke("plugins", "--json", "--plugin", "toy_plugin").stdout)
    assert content["failed"] == [{"provider": "module no_such_module", "version": None, "error": failure}]
    assert {
        "kind": "drafter", "name": "toy_lookup", "class": "toy_plugin.ToyLookup", "provider": "module toy_plugin",
        "version": None,
    } in content["registered"]  # fmt: skip


def test_show_tells_on_stderr_what_failed_to_load(invoke, monkeypatch):
    broken = metadata.EntryPoint("broken", "no_such_module", "treegraft")
    monkeypatch.setattr(metadata, "entry_points", lambda group: [broken])
    assert "not loaded: module no_such_module" in invoke("show", "two", *TOY_OPTIONS).stderr


@pytest.mark.parametrize(
    ("args", "status", "message"),
    [
        (["show", "tow", *TOY_OPTIONS], 2, "ComposeError: pipeline: no pipeline named 'tow'."),
        (["show", "two", "stepz=3", *TOY_OPTIONS], 2, "ComposeError: pipelines.two.stepz: no key named 'stepz'."),
        (["show", "two", "steps", *TOY_OPTIONS], 2, "ComposeError: override 'steps'"),
        (["show", "two", "--registry", "nowhere.yaml"], 2, "ComposeError: nowhere.yaml: no such file"),
        (["show", "two", "--plugin", "nowhere"], 2, "PluginError: plugin 'nowhere': cannot be imported"),
        (["show"], 2, "Missing argument 'PIPELINE'"),
        (["show", "two", "--colour"], 2, "No such option"),
        (["shwo"], 2, "No such command 'shwo'"),
    ],
)
def test_bad_use_and_failure_exit_with_a_message_and_no_traceback(invoke, args, status, message):
    result = invoke(*args)
    assert result.exit_code == status
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_debug_shows_the_traceback(invoke):
    result = invoke("show", "tow", "--debug", *TOY_OPTIONS)
    assert result.exit_code == 2
    assert result.stderr.startswith("Traceback") and "no pipeline named 'tow'" in result.stderr


def test_what_is_not_foreseen_is_told_in_a_line(invoke, monkeypatch):
    monkeypatch.setattr("treegraft.cli.show.resolve_options", lambda *args: 1 / 0)
    result = invoke("show", "two")
    assert result.exit_code == 1
    assert result.stderr == "ZeroDivisionError: division by zero\n  Not foreseen; --debug shows where.\n"


def test_an_unpackaged_plugin_may_lie_in_the_working_directory(tmp_path):
    (tmp_path / "lying_here.py").write_text((Path(__file__).parent / "toy_plugin.py").read_text())
    (tmp_path / "registry.yaml").write_text(REGISTRY)
    command = "from treegraft.cli import main; main()"
    args = ["show", "one", "--plugin", "lying_here"]
    # -P keeps Python itself from looking in the working directory, as for an installed command.
    result = subprocess.run(
        [sys.executable, "-P", "-c", command, *args], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "lying_here.ToyLookup" in result.stdout


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_every_command_has_help(invoke, command):
    result = invoke(*command.split(), "--help")
    assert result.exit_code == 0
    assert "Usage:" in result.stdout and "--help" in result.stdout
