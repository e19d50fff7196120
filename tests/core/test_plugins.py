"""Plugins: loaded one by one, names owned by one provider each, failures kept and told."""

import sys
import types
from importlib import metadata

import pytest
import toy_plugin

from treegraft import hookspecs, plugins
from treegraft.errors import PluginError
from treegraft.hookspecs import hookimpl
from treegraft.interfaces import Drafter, Pruner
from treegraft.plugins import KINDS, Plugins, Provider, load_plugins, plural
from treegraft.tree import Expansion

ECHO, OTHER = Provider("treegraft-echo", "0.1"), Provider("treegraft-other", "2.0")


class Echo(Drafter):
    def draft(self, request):
        return Expansion.empty()


def plugin(*named, name="plugin"):
    """A module that registers (name, class) pairs."""

    @hookimpl
    def treegraft_register(register):
        for each in named:
            register(*each)

    module = types.ModuleType(name)
    module.treegraft_register = treegraft_register
    return module


@pytest.fixture
def entry_points(monkeypatch):
    """Installs entry points: `entry_points(("treegraft-echo", "0.1", "module"), ...)`."""

    def install(*dists):
        found = []
        for name, version, value in dists:
            dist = types.SimpleNamespace(name=name, version=version)
            point = metadata.EntryPoint(name, value, hookspecs.PROJECT)
            vars(point)["dist"] = dist
            found.append(point)
        monkeypatch.setattr(metadata, "entry_points", lambda group: found if group == "treegraft" else [])

    return install


def test_the_kind_follows_from_the_base_class():
    loaded = Plugins()
    loaded.add(toy_plugin, Provider("toys", "1"))
    assert {row.kind for row in loaded.registrations()} == set(KINDS)
    for row in loaded.registrations():
        assert issubclass(row.cls, KINDS[row.kind])
        assert loaded.find(row.kind, row.name) is row
    # One name may stand for one class of each kind.
    assert loaded.find("pruner", "toy").cls is toy_plugin.ToyPruner
    assert loaded.find("selector", "toy").cls is toy_plugin.ToySelector


def test_a_name_is_taken_once_and_the_refusal_names_both_owners():
    loaded = Plugins()
    loaded.add(plugin(("echo", Echo)), ECHO)
    with pytest.raises(PluginError, match=r"treegraft-other 2\.0.*'echo' is taken by .*Echo, of treegraft-echo 0\.1"):
        loaded.add(plugin(("mine", Echo), ("echo", Echo)), OTHER)
    assert loaded.find("drafter", "mine") is None, "a refused plugin registers nothing"
    assert loaded.providers == [ECHO]


def test_a_plugin_cannot_take_a_name_twice_either():
    with pytest.raises(PluginError, match="taken by"):
        Plugins().add(plugin(("echo", Echo), ("echo", Echo)), ECHO)


def test_a_refused_plugin_leaves_the_others_as_they_were():
    loaded = Plugins()
    good = plugin(("echo", Echo))
    loaded.add(good, ECHO)
    with pytest.raises(PluginError, match="loaded already"):
        loaded.add(good, OTHER)
    with pytest.raises(PluginError):
        loaded.add(plugin(("echo", Echo)), OTHER)
    loaded.add(plugin(("second", Echo)), OTHER)
    assert loaded.describe("drafter") == "echo (treegraft-echo 0.1); second (treegraft-other 2.0)"


class Abstract(Pruner):
    pass


@pytest.mark.parametrize(
    ("name", "cls", "message"),
    [
        ("echo", dict, "no known kinds"),
        ("echo", Echo(), "no known kinds"),
        ("echo", type("Both", (Echo, Pruner), {"prune": None}), "2 known kinds"),
        ("echo", Abstract, "Missing: prune"),
        ("a.dotted.path", Echo, "no name"),
        ("", Echo, "no name"),
    ],
)
def test_what_cannot_be_registered_is_refused(name, cls, message):
    with pytest.raises(PluginError, match=message):
        Plugins().add(plugin((name, cls)), ECHO)


def test_the_table_freezes_after_loading():
    kept = []
    module = types.ModuleType("keeps")
    module.treegraft_register = hookimpl(specname="treegraft_register")(lambda register: kept.append(register))
    loaded = Plugins()
    loaded.add(module, ECHO)
    loaded.freeze()
    with pytest.raises(PluginError, match="frozen"):
        loaded.add(plugin(("echo", Echo)), OTHER)
    with pytest.raises(PluginError, match="frozen"):
        kept[0]("echo", Echo)
    assert loaded.registrations() == []


def test_unknown_hooks_wrong_arguments_and_no_hook_are_refused():
    unknown = plugin(name="unknown")
    unknown.treegraft_registre = hookimpl(lambda register: None)
    with pytest.raises(PluginError, match="treegraft_registre"):
        Plugins().add(unknown, ECHO)

    wrong = types.ModuleType("wrong")
    wrong.treegraft_register = hookimpl(lambda registrar: None)
    with pytest.raises(PluginError, match="registrar"):
        Plugins().add(wrong, ECHO)

    with pytest.raises(PluginError, match=r"no hook is implemented[\s\S]*@treegraft\.hookimpl"):
        Plugins().add(types.ModuleType("empty"), ECHO)


def test_each_entry_point_loads_in_its_own_try(entry_points, monkeypatch):
    broken = types.ModuleType("broken_plugin")
    broken.treegraft_register = hookimpl(specname="treegraft_register")(lambda register: 1 / 0)
    monkeypatch.setitem(sys.modules, "broken_plugin", broken)
    monkeypatch.setitem(sys.modules, "echo_plugin", plugin(("echo", Echo), name="echo_plugin"))
    entry_points(
        ("treegraft-zebra", "3", "echo_plugin"),
        ("treegraft-medusa", "0.2", "no_such_module"),
        ("treegraft-broken", "1", "broken_plugin"),
        ("treegraft", "0.1", "toy_plugin"),
    )
    loaded = load_plugins()
    assert loaded.providers == [Provider("treegraft", "0.1"), Provider("treegraft-zebra", "3")], "own parts first"
    assert [str(failure) for failure in loaded.failures] == [
        "treegraft-broken 1 (ZeroDivisionError: division by zero)",
        "treegraft-medusa 0.2 (ModuleNotFoundError: No module named 'no_such_module')",
    ]
    assert loaded.describe("drafter").endswith("(treegraft 0.1); echo (treegraft-zebra 3)")


def test_a_module_loads_by_name(entry_points):
    entry_points()
    loaded = load_plugins(["toy_plugin"])
    assert str(loaded.find("drafter", "toy_lookup").provider) == "module toy_plugin"
    with pytest.raises(PluginError, match=r"no_such_module.*cannot be imported"):
        load_plugins(["no_such_module"])


def test_a_plugin_that_exits_is_one_that_failed(entry_points, monkeypatch, tmp_path):
    (tmp_path / "exits.py").write_text("import sys\nsys.exit(3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PluginError, match=r"exits.*cannot be imported \(SystemExit: 3\)"):
        load_plugins(["exits"])
    entry_points(("treegraft-exits", "1", "exits"), ("toys", "1", "toy_plugin"))
    loaded = load_plugins()
    assert [str(failure) for failure in loaded.failures] == ["treegraft-exits 1 (SystemExit: 3)"]
    assert loaded.providers == [Provider("toys", "1")]


def test_a_module_that_fails_to_register_is_named(entry_points, monkeypatch):
    entry_points()
    broken = types.ModuleType("broken_plugin")
    broken.treegraft_register = hookimpl(specname="treegraft_register")(lambda register: 1 / 0)
    monkeypatch.setitem(sys.modules, "broken_plugin", broken)
    with pytest.raises(PluginError, match=r"plugin 'broken_plugin': .* failed \(ZeroDivisionError: division by zero\)"):
        load_plugins(["broken_plugin"])


def test_naming_an_installed_plugin_again_changes_nothing(entry_points):
    entry_points(("toys", "1", "toy_plugin"))
    assert load_plugins(["toy_plugin"]).providers == [Provider("toys", "1")]


def test_the_observer_calls_every_plugin_that_wants_rounds():
    loaded, seen = Plugins(), []
    loaded.add(plugin(("echo", Echo)), ECHO)
    assert loaded.observer is None, "no call where nobody listens"
    for owner in (OTHER, Provider("third")):
        watcher = types.ModuleType(owner.name)
        watcher.treegraft_round_finished = hookimpl(specname="treegraft_round_finished")(
            lambda record, name=owner.name: seen.append((name, record))
        )
        loaded.add(watcher, owner)
    loaded.observer("record")
    assert sorted(seen) == [("third", "record"), ("treegraft-other", "record")]


def test_every_hook_is_documented():
    hooks = [vars(hookspecs)[name] for name in plugins._hook_names()]
    assert len(hooks) == 2
    assert all(hook.__doc__ for hook in hooks)


def test_kinds_in_the_plural():
    assert [plural(kind) for kind in ("drafter", "graft policy")] == ["drafters", "graft policies"]
