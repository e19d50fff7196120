"""Errors and warnings. Every message has four parts: where, what was found, what is allowed, what to do."""

from collections.abc import Iterable
from difflib import get_close_matches


class TreeGraftError(Exception):
    """Base of every error that treegraft raises on purpose.

    Args:
        where: the key path, option, file or component concerned.
        found: what was found there.
        allowed: what would have been accepted, or None where `found` says it all.
        action: what to do about it, or None where it follows from `allowed`.
    """

    def __init__(self, where: str, found: str, allowed: str | None = None, action: str | None = None):
        self.where, self.found, self.allowed, self.action = where, found, allowed, action
        rest = " ".join(part for part in (allowed, action) if part)
        super().__init__(f"{where}: {found}" + (f"\n  {rest}" if rest else ""))


class ComposeError(TreeGraftError, ValueError):
    """A pipeline, registry file or override that cannot be composed."""


class PluginError(TreeGraftError, RuntimeError):
    """A plugin that breaks the rules of registration (a name taken twice, a class of no known kind)."""


class ModelError(TreeGraftError, ValueError):
    """A model that cannot be loaded, served under a tree mask, or paired with another."""


class RequestError(TreeGraftError, ValueError):
    """A prompt or a generation option that cannot be honoured."""


class PipelineBusyError(TreeGraftError, RuntimeError):
    """A second call to a pipeline that is still decoding."""


class InvariantError(TreeGraftError, ValueError):
    """A value that breaks its own rules: a malformed draft tree, expansion or verdict."""


class DrafterWarning(UserWarning):
    """A drafter failed and was left out for the rest of the request; the output is unaffected."""


class SchedulerWarning(UserWarning):
    """A scheduler decides in another way than it was composed to."""


def suggest(name: str, known: Iterable[str]) -> str | None:
    """A near-miss suggestion, ready to be appended to an error, or None."""
    match = get_close_matches(name, list(known), n=1)
    return f"Did you mean {match[0]!r}?" if match else None


class Faults:
    """All that is wrong with one thing, collected so that it can be shown together."""

    def __init__(self) -> None:
        self._found: dict[str, TreeGraftError] = {}

    def add(self, where: str, found: str, allowed: str | None = None, action: str | None = None) -> None:
        """Keep a fault; the first at each place counts, later ones there follow from it."""
        self.keep(ComposeError(where, found, allowed, action))

    def keep(self, error: TreeGraftError) -> None:
        """The same for an error that was raised."""
        self._found.setdefault(error.where, error)

    def unknown(self, where: str, noun: str, name: object, known: Iterable[str]) -> None:
        """A name that is none of the known ones."""
        known = list(known)
        allowed = f"Known {noun}s: {', '.join(known) or 'none'}."
        self.add(where, f"no {noun} named {name!r}.", allowed, suggest(str(name), known))

    def at(self, where: str) -> bool:
        """Whether something is wrong at a key path or below it."""
        return any(place == where or place.startswith((f"{where}.", f"{where}[", f"{where}:")) for place in self._found)

    def raise_all(self, where: str) -> None:
        """Raise what was found, if anything, as one error.

        Raises:
            TreeGraftError: the one fault, or a ComposeError at `where` with all of them.
        """
        faults = list(self._found.values())
        if len(faults) == 1:
            raise faults[0]
        if faults:
            raise ComposeError(where, f"{len(faults)} faults", "\n".join(map(str, faults)).replace("\n", "\n  "))
