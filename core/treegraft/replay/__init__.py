"""Labels without verification: accepted lengths of any pipeline, schedule and budget along text that is decoded once.

`record` decodes plainly. `replay` runs a pipeline, loaded with a `ReplayTarget`, along the recording; `schedules` grows
the trees of all schedules after each prefix of it. No target forwards, no clocks: two runs give the same figures.
"""

from treegraft.replay.recording import Recording, ReplayTarget, record, replay, wants_of
from treegraft.replay.schedules import Label, Prefix, Schedule, schedules
from treegraft.replay.throughput import Outcome, ScheduleTable, outcome_of, sampled_oracle, tabulate

__all__ = [
    "Label",
    "Outcome",
    "Prefix",
    "Recording",
    "ReplayTarget",
    "Schedule",
    "ScheduleTable",
    "outcome_of",
    "record",
    "replay",
    "sampled_oracle",
    "schedules",
    "tabulate",
    "wants_of",
]
