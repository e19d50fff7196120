"""Constructor options: what is not allowed is refused, naming the option, what was given and what is allowed."""

import attrs
import pytest

from treegraft_plugins.options import number, one_of, switch, whole


@attrs.frozen
class Options:
    count: int = attrs.field(default=3, alias="how_many", validator=whole(1, 5))
    at_least: int = attrs.field(default=1, validator=whole(0))
    factor: float = attrs.field(default=1.0, validator=number(0))
    share: float = attrs.field(default=0.5, validator=number(0, 1))
    mode: str = attrs.field(default="mix", validator=one_of("mix", "copy"))
    on: bool = attrs.field(default=True, validator=switch)


def test_allowed_values_are_kept_as_they_are():
    options = Options(how_many=5, at_least=0, factor=2, share=1, mode="copy", on=False)
    assert attrs.astuple(options) == (5, 0, 2, 1, "copy", False)
    assert type(options.factor) is int


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"how_many": 0}, ValueError, "how_many: got 0; allowed: an int in [1, 5]."),
        ({"how_many": 6}, ValueError, "how_many: got 6; allowed: an int in [1, 5]."),
        ({"how_many": "3"}, TypeError, "how_many: got '3'; allowed: an int in [1, 5]."),
        ({"how_many": True}, TypeError, "how_many: got True; allowed: an int in [1, 5]."),
        ({"how_many": 2.0}, TypeError, "how_many: got 2.0; allowed: an int in [1, 5]."),
        ({"at_least": -1}, ValueError, "at_least: got -1; allowed: an int >= 0."),
        ({"factor": -0.5}, ValueError, "factor: got -0.5; allowed: a finite number >= 0."),
        ({"factor": float("inf")}, ValueError, "factor: got inf; allowed: a finite number >= 0."),
        ({"factor": float("nan")}, ValueError, "factor: got nan; allowed: a finite number >= 0."),
        ({"factor": False}, TypeError, "factor: got False; allowed: a finite number >= 0."),
        ({"share": 1.5}, ValueError, "share: got 1.5; allowed: a number in [0, 1]."),
        ({"share": float("nan")}, ValueError, "share: got nan; allowed: a number in [0, 1]."),
        ({"share": True}, TypeError, "share: got True; allowed: a number in [0, 1]."),
        ({"mode": "mixed"}, ValueError, "mode: got 'mixed'; allowed: one of mix, copy."),
        ({"mode": ["mix"]}, ValueError, "mode: got ['mix']; allowed: one of mix, copy."),
        ({"on": 1}, TypeError, "on: got 1; allowed: true or false."),
    ],
)
def test_others_are_refused(given, error, message):
    with pytest.raises(error) as caught:
        Options(**given)
    assert str(caught.value) == message
