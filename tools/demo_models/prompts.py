"""Cut prompts from the demo models' corpus: for `treegraft fit collect`, library code by top-level module.

Usage: prompts.py OUT [MODULES] [EACH]       (12 modules, 20 prompts of each)
       prompts.py OUT held_out [EACH]        (120 of each category)

Writes JSON lines whose category is the module, so that a report is pair x module. Neither files of val_files.json are
cut from, nor tests: the ones are for measuring, the others the task that fitted weights have not seen.
With held_out it is the files of val_files.json alone, and the categories are tests and library.
"""

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from collect import held_out, sources
from texts import HELD_OUT

Reports = dict[str, list[tuple[str, str]]]  # (id, prompt) by category

SIZES = (8, 16, 32)  # lines of a prompt
STRIDE = 64  # lines from one possible beginning to the next
LEAST = 150  # characters of a prompt


def is_test(path: str) -> bool:
    """Whether a file is a test, or helps one."""
    parts = Path(path).parts
    return bool({"test", "tests"} & set(parts)) or parts[-1].startswith("test_")


def windows(path: str, text: str) -> Iterator[tuple[str, str]]:
    """(id, prompt) of every place of a file that may be cut out; no two share a line."""
    lines = text.split("\n")
    for start in range(0, len(lines) - max(SIZES), STRIDE):
        id = f"{path}:{start + 1}"
        prompt = "\n".join(lines[start : start + SIZES[digest(id) % len(SIZES)]])
        if len(prompt) >= LEAST:
            yield id, prompt


def digest(id: str) -> int:
    """A number that a prompt's id settles."""
    return int(hashlib.sha256(id.encode()).hexdigest(), 16)


def cut(reports: Reports, each: int, out: Path) -> None:
    """Write `each` prompts of each report, in an order that a hash of their ids gives."""
    prompts = [
        {"id": id, "category": name, "turns": [prompt]}
        for name, found in reports.items()
        for id, prompt in sorted(found, key=lambda item: digest(item[0]))[:each]
    ]
    out.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    print(", ".join(f"{name} {min(each, len(found))} of {len(found)}" for name, found in reports.items()))


def to_fit(out: Path, num_modules: int = 12, each: int = 20) -> None:
    """Of the modules that have most to cut from."""
    found: Reports = {}
    for path, text in sources():
        if path not in HELD_OUT and not held_out(path) and not is_test(path):
            found.setdefault(Path(path).parts[0].removesuffix(".py"), []).extend(windows(path, text))
    modules = sorted(found, key=lambda module: (-len(found[module]), module))[:num_modules]
    cut({module: found[module] for module in modules}, each, out)


def to_measure(out: Path, each: int = 120) -> None:
    """Of held-out files, for where the 40 prompts of demo_heldout.jsonl leave too wide an interval."""
    found: Reports = {"tests": [], "library": []}
    for path, text in sources():
        if path in HELD_OUT:
            found["tests" if is_test(path) else "library"].extend(windows(path, text))
    cut(found, each, out)


if __name__ == "__main__":
    if sys.argv[2:3] == ["held_out"]:
        to_measure(Path(sys.argv[1]), *map(int, sys.argv[3:]))
    else:
        to_fit(Path(sys.argv[1]), *map(int, sys.argv[2:]))
