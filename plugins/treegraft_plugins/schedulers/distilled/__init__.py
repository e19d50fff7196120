"""The value-distilled scheduler: what it reads and decides online, and the offline path beside it."""

from treegraft_plugins.schedulers.distilled.scheduler import DistilledScheduler

__all__ = ["DistilledScheduler"]
