"""Benchmark prompts: JSON lines of our own form, or Spec-Bench's.

Ours: `{"id": ..., "category": ..., "turns": ["...", ...]}`. Spec-Bench's names the id `question_id`; what else stands
in a line is left alone.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs

from treegraft.errors import RequestError, suggest

MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
"""Spec-Bench's categories that are MT-Bench's: one task of its six, under the name `mt_bench`."""
ID_KEYS = ("id", "question_id")
_ALLOWED = (
    'Allowed: one JSON object a line, {"id": ..., "category": "...", "turns": ["...", ...]}, '
    "or with question_id in the place of id, as Spec-Bench has it."
)


@attrs.frozen
class Prompt:
    """A benchmark's question.

    Attributes:
        id: within its file.
        category: as the file has it.
        turns: the user's messages; the benchmark decodes the first.
        file: where it stands, as that was named.
    """

    id: str
    category: str
    turns: tuple[str, ...]
    file: str

    @property
    def task(self) -> str:
        """Its category, or `mt_bench` for one of MT-Bench's eight."""
        return task_of(self.category)


def task_of(category: str) -> str:
    """Spec-Bench's task: the category, save that MT-Bench's eight are one, `mt_bench`."""
    return "mt_bench" if category in MT_BENCH else category


def read_all(paths: Sequence[Path], limit: int | None = None, per_task: int | None = None) -> list[Prompt]:
    """The prompts of several files, each read as `read_prompts` reads it."""
    return [prompt for path in paths for prompt in read_prompts(path, limit, per_task)]


def read_prompts(path: Path, limit: int | None = None, per_task: int | None = None) -> list[Prompt]:
    """The prompts of a file, in its order.

    Args:
        path: JSON lines in UTF-8; blank lines are skipped.
        limit: the first so many.
        per_task: of those, so many of each task; tasks take turns, so that a run cut short has all of them, and so do
            a task's categories.

    Raises:
        RequestError: the file cannot be read, or a line is no prompt; it names file and line.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # a string of JSON may hold what splitlines() splits at
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not UTF-8 (at byte {error.start})"
        raise RequestError(f"--prompts {path}", reason or type(error).__name__, _ALLOWED, _near_miss(path)) from error
    prompts: dict[str, Prompt] = {}
    for number, line in enumerate(lines, 1):
        if line.strip():
            prompt = _prompt(line, f"{path}:{number}", str(path))
            if prompt.id in prompts:
                raise RequestError(f"{path}:{number}", f"the id {prompt.id!r} a second time", "Allowed: each once.")
            prompts[prompt.id] = prompt
    if not prompts:
        raise RequestError(f"--prompts {path}", "no prompts", _ALLOWED)
    chosen = list(prompts.values())[:limit]
    return chosen if per_task is None else _of_each_task(chosen, per_task)


def _prompt(line: str, where: str, file: str) -> Prompt:
    try:
        content: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise RequestError(where, f"not JSON ({error})", _ALLOWED) from error
    if not isinstance(content, dict):
        raise RequestError(where, f"a {type(content).__name__}", _ALLOWED)
    keys = [key for key in ID_KEYS if key in content]
    missing = [key for key in ("category", "turns") if key not in content]
    if missing or not keys:
        missing = missing if keys else ["id", *missing]
        hint = next(filter(None, (suggest(key, content) for key in missing)), None)
        raise RequestError(where, f"no {', '.join(map(repr, missing))}", _ALLOWED, hint)
    number, category, turns = content[keys[0]], content["category"], content["turns"]
    if not isinstance(number, int | str) or isinstance(number, bool) or number == "":
        raise RequestError(where, f"{keys[0]} {number!r}", "Allowed: an int or a string.")
    if not isinstance(category, str) or not category:
        raise RequestError(where, f"category {category!r}", "Allowed: a string.")
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise RequestError(where, f"turns {turns!r:.60}", "Allowed: a list of at least one string, none of them empty.")
    return Prompt(str(number), category, tuple(turns), file)


def _of_each_task(prompts: Iterable[Prompt], number: int) -> list[Prompt]:
    """`number` prompts of each task, one of each after another; a task's categories take turns."""
    by_category = [prompt for _, prompt in _in_turn(prompts, "category")]
    return [prompt for turn, prompt in _in_turn(by_category, "task") if turn < number]


def _in_turn(prompts: Iterable[Prompt], group: str) -> list[tuple[int, Prompt]]:
    """The first prompt of every group, then every second one, and so on, each with the number of its turn."""
    turns: dict[str, int] = {}  # of a group's next prompt
    ranked: list[tuple[int, Prompt]] = []
    for prompt in prompts:
        name = getattr(prompt, group)
        ranked.append((turns.setdefault(name, 0), prompt))
        turns[name] += 1
    return sorted(ranked, key=lambda item: item[0])  # stable: the order of `prompts` within a turn


def _near_miss(path: Path) -> str | None:
    folder = path.parent
    return suggest(str(path), map(str, folder.glob("*.jsonl"))) if folder.is_dir() and not path.exists() else None
