"""Errors say where, what was found, what is allowed and what to do, and are what a caller would expect to catch."""

import pytest

from treegraft import errors
from treegraft.errors import ComposeError, Faults, TreeGraftError, suggest


def children(cls: type) -> set[type]:
    return {cls, *(below for child in cls.__subclasses__() for below in children(child))}


def test_four_parts_in_order():
    error = TreeGraftError("models.target", "a folder without weights", "Allowed: a checkpoint.", "Download it.")
    assert (error.where, error.found, error.allowed, error.action) == (
        "models.target", "a folder without weights", "Allowed: a checkpoint.", "Download it.",
    )  # fmt: skip
    assert str(error) == "models.target: a folder without weights\n  Allowed: a checkpoint. Download it."


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        (("seed", "-1"), "seed: -1"),
        (("seed", "-1", "Allowed: >= 0."), "seed: -1\n  Allowed: >= 0."),
        (("seed", "-1", None, "Take 0."), "seed: -1\n  Take 0."),
    ],
)
def test_parts_that_say_nothing_leave_no_trace(parts, text):
    assert str(TreeGraftError(*parts)) == text


@pytest.mark.parametrize("cls", sorted(children(TreeGraftError) - {TreeGraftError}, key=lambda cls: cls.__name__))
def test_every_error_is_also_a_builtin_and_documented(cls):
    assert issubclass(cls, ValueError | RuntimeError) and cls.__doc__
    assert str(cls("here", "this")) == "here: this"


def test_the_warning_is_one_that_users_see():
    assert issubclass(errors.DrafterWarning, UserWarning)


def test_suggestions():
    assert suggest("hf_casual_lm", ["ngram", "hf_causal_lm"]) == "Did you mean 'hf_causal_lm'?"
    assert suggest("zebra", ["ngram", "hf_causal_lm"]) is None
    assert suggest("ngram", []) is None


def test_faults_are_shown_together():
    faults = Faults()
    faults.raise_all("pipelines.mine")
    faults.unknown("draft", "drafter", "ngarm", ["ngram", "suffix"])
    with pytest.raises(ComposeError, match=r"Known drafters: ngram, suffix\. Did you mean 'ngram'") as single:
        faults.raise_all("pipelines.mine")
    assert single.value.where == "draft"
    faults.add("draft", "a fault that follows from the first")
    faults.add("steps", "-1", "Allowed: an int >= 0.")
    with pytest.raises(ComposeError, match="2 faults") as both:
        faults.raise_all("pipelines.mine")
    assert "ngarm" in str(both.value) and "steps: -1" in str(both.value) and "follows" not in str(both.value)
