"""Plugins: finding them, the table of names they offer, and who offers what."""

import functools
import inspect
import re
from collections.abc import Iterable
from importlib import import_module, metadata
from typing import Any

import attrs
import pluggy

from treegraft import hookspecs
from treegraft.errors import PluginError
from treegraft.interfaces import (
    BudgetPolicy,
    Drafter,
    EdgeScorer,
    GraftPolicy,
    PositionSelector,
    Pruner,
    RoundObserver,
    Scheduler,
    TargetModel,
    Verifier,
)
from treegraft.statistics import CostModel

KINDS: dict[str, type[Any]] = {
    "target": TargetModel,
    "drafter": Drafter,
    "selector": PositionSelector,
    "graft policy": GraftPolicy,
    "scheduler": Scheduler,
    "budget": BudgetPolicy,
    "pruner": Pruner,
    "edge scorer": EdgeScorer,
    "verifier": Verifier,
    "cost model": CostModel,
}
"""What can be registered: the kinds, and the base class that makes a class one of them."""


def plural(kind: str) -> str:
    """The kind in the plural, for messages."""
    return f"{kind.removesuffix('y')}ies" if kind.endswith("y") else f"{kind}s"


@attrs.frozen
class Provider:
    """Who offers a part: a distribution and its version, or something without one, such as `module my_drafter`."""

    name: str
    version: str | None = None

    def __str__(self) -> str:
        return f"{self.name} {self.version}" if self.version else self.name


@attrs.frozen
class Registration:
    """A row of the name table: the class that `use: name` stands for, and who offers it."""

    kind: str
    name: str
    cls: type[Any]
    provider: Provider


@attrs.frozen
class Failure:
    """A plugin that was found and could not be loaded."""

    provider: Provider
    error: BaseException

    @property
    def reason(self) -> str:
        """The error in one line."""
        return f"{type(self.error).__name__}: {' '.join(str(self.error).split())}"

    def __str__(self) -> str:
        return f"{self.provider} ({self.reason})"


class Plugins:
    """The loaded plugins: a table of names that is filled while loading and frozen afterwards.

    Attributes:
        failures: the entry points that could not be loaded, and why.
        providers: those that could, in order of loading.
    """

    def __init__(self) -> None:
        self._manager = pluggy.PluginManager(hookspecs.PROJECT)
        self._manager.add_hookspecs(hookspecs)
        self._table: dict[tuple[str, str], Registration] = {}
        self._frozen = False
        self.failures: list[Failure] = []
        self.providers: list[Provider] = []

    # -- loading ------------------------------------------------------------------------------------------------------

    def load_entry_points(self) -> None:
        """Load every installed plugin, treegraft's own parts first; a failure is kept and stops nothing else."""
        for entry_point in sorted(metadata.entry_points(group=hookspecs.PROJECT), key=_own_first):
            dist = entry_point.dist
            provider = Provider(dist.name, dist.version) if dist else Provider(f"module {entry_point.module}")
            try:
                self.add(entry_point.load(), provider)
            except (Exception, SystemExit) as error:  # a script exits on its own account
                self.failures.append(Failure(provider, error))

    def load_module(self, name: str) -> None:
        """Load an unpackaged plugin: an importable module with a hook implementation.

        Raises:
            PluginError: it cannot be imported, or breaks the rules of registration.
        """
        try:
            module = import_module(name)
        except (Exception, SystemExit) as error:
            raise PluginError(
                f"plugin {name!r}", f"cannot be imported ({type(error).__name__}: {error})",
                "Allowed: the dotted name of a module on Python's path.",
            ) from error  # fmt: skip
        if self._manager.is_registered(module):
            return  # an installed plugin may be named again, to no effect
        try:
            self.add(module, Provider(f"module {name}"))
        except PluginError:
            raise
        except Exception as error:
            raise PluginError(
                f"plugin {name!r}", f"its treegraft_register failed ({type(error).__name__}: {error})",
                action="--debug shows where.",
            ) from error  # fmt: skip

    def add(self, plugin: object, provider: Provider) -> None:
        """Take in a plugin (a module or any object with hook implementations) and what it registers, or nothing.

        Raises:
            PluginError: no hook implementation, an unknown hook, a name taken twice, a class of no known kind.
        """
        name = getattr(plugin, "__name__", repr(plugin))
        self._require_open(f"plugin {provider.name!r}")
        if self._manager.is_registered(plugin):
            raise PluginError(str(provider), f"{name!r} is loaded already")
        offered: dict[tuple[str, str], Registration] = {}

        def register(name: str, cls: type[Any]) -> None:
            self._require_open(f"{provider}: register({name!r})")
            row = Registration(_kind_of(name, cls, provider), name, cls, provider)
            taken = self._table.get((row.kind, name)) or offered.get((row.kind, name))
            if taken is not None:
                raise PluginError(
                    f"{provider}: {cls.__module__}.{cls.__qualname__}",
                    f"the {row.kind} {name!r} is taken by {taken.cls.__module__}.{taken.cls.__qualname__}, "
                    f"of {taken.provider}",
                    "Names are unique within a kind.", "Register it under another name, or uninstall one of the two.",
                )  # fmt: skip
            offered[row.kind, name] = row

        try:
            self._manager.register(plugin, name=f"{provider.name}: {name}")
            self._manager.check_pending()
            self._call_register(plugin, provider, register)
        except Exception as error:
            if self._manager.is_registered(plugin):
                self._manager.unregister(plugin)
            if isinstance(error, pluggy.PluginValidationError):
                raise PluginError(str(provider), str(error), f"Hooks: {', '.join(_hook_names())}.") from error
            raise
        self._table |= offered
        self.providers.append(provider)

    def _call_register(self, plugin: object, provider: Provider, register: hookspecs.Register) -> None:
        """Call the one plugin's `treegraft_register`, so that what it offers is known to be its own."""
        if not self._manager.get_hookcallers(plugin):
            raise PluginError(
                str(provider), "no hook is implemented",
                f"Hooks: {', '.join(_hook_names())}.", "Mark the implementation with @treegraft.hookimpl.",
            )  # fmt: skip
        others = [other for other in self._manager.get_plugins() if other is not plugin]
        self._manager.subset_hook_caller("treegraft_register", others)(register=register)

    def freeze(self) -> None:
        """End loading: from now on the table cannot change."""
        self._frozen = True

    def _require_open(self, where: str) -> None:
        if self._frozen:
            raise PluginError(where, "the table of names is frozen", "Plugins register while they are loaded.")

    # -- asking -------------------------------------------------------------------------------------------------------

    def find(self, kind: str, name: str) -> Registration | None:
        """What `use: name` means for a kind, or None."""
        return self._table.get((kind, name))

    def registrations(self, kind: str | None = None) -> list[Registration]:
        """The rows of the table (of one kind), by provider in order of loading, then by kind and name."""
        order = {provider: index for index, provider in enumerate(self.providers)}
        kinds = list(KINDS)
        rows = [row for row in self._table.values() if kind in (None, row.kind)]
        return sorted(rows, key=lambda row: (order[row.provider], kinds.index(row.kind), row.name))

    def describe(self, kind: str) -> str:
        """Names of a kind with who offers them: `hf_causal_lm, ngram (treegraft 0.1); echo (treegraft-echo 0.1)`."""
        names: dict[Provider, list[str]] = {}
        for row in self.registrations(kind):
            names.setdefault(row.provider, []).append(row.name)
        return "; ".join(f"{', '.join(names)} ({provider})" for provider, names in names.items()) or "none"

    @property
    def observer(self) -> RoundObserver | None:
        """Calls `treegraft_round_finished` of every plugin, or None where none implements it."""
        hook = self._manager.hook.treegraft_round_finished
        return (lambda record: hook(record=record)) if hook.get_hookimpls() else None


def load_plugins(modules: Iterable[str] = ()) -> Plugins:
    """Every installed plugin, and unpackaged `modules` by name; frozen.

    Raises:
        PluginError: one of `modules` cannot be loaded.
    """
    plugins = Plugins()
    plugins.load_entry_points()
    for module in modules:
        plugins.load_module(module)
    plugins.freeze()
    return plugins


@functools.cache
def installed_plugins() -> Plugins:
    """The installed plugins, loaded once a process."""
    return load_plugins()


def _own_first(entry_point: metadata.EntryPoint) -> tuple[bool, str, str]:
    name = entry_point.dist.name if entry_point.dist else ""
    return name != hookspecs.PROJECT, name, entry_point.name


def _hook_names() -> list[str]:
    return [name for name in vars(hookspecs) if name.startswith("treegraft_")]


def _kind_of(name: str, cls: type[Any], provider: Provider) -> str:
    where = f"{provider}: register({name!r}, {getattr(cls, '__qualname__', cls)})"
    if not (isinstance(name, str) and re.fullmatch(r"[\w-]+", name)):
        raise PluginError(where, f"{name!r} is no name", "Allowed: letters, digits, '_' and '-'.")
    kinds = [kind for kind, base in KINDS.items() if isinstance(cls, type) and issubclass(cls, base)]
    if len(kinds) != 1:
        raise PluginError(
            where, f"a class of {len(kinds) or 'no'} known kinds",
            f"Allowed: a subclass of one of {', '.join(base.__name__ for base in KINDS.values())}.",
        )  # fmt: skip
    if inspect.isabstract(cls):
        missing = ", ".join(sorted(cls.__abstractmethods__))
        raise PluginError(where, "an abstract class", f"Missing: {missing}.", "Implement them.")
    return kinds[0]
