"""The two hooks through which plugins meet treegraft."""

from collections.abc import Callable
from typing import Any

import pluggy

from treegraft.interfaces import RoundRecord

PROJECT = "treegraft"
"""Name of the project, of the hook marker, and of the entry-point group that plugins are found under."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a plugin's implementation of a hook: `@treegraft.hookimpl`."""

Register = Callable[[str, type[Any]], None]


@hookspec
def treegraft_register(register: Register) -> None:
    """Offer parts: call `register("name", Class)` once for each.

    The kind follows from the base class (Drafter, Scheduler, ...). Names are unique within a kind.
    """


@hookspec
def treegraft_round_finished(record: RoundRecord) -> None:
    """See a finished round: for traces, fitting data, progress. The record cannot change the request.

    A call costs about 5 us, once a round.
    """
