"""Cut prompts for `treegraft fit collect` from the demo models' corpus: library code by top-level module.

Usage: prompts.py OUT [MODULES] [EACH]        (12 modules, 20 prompts of each)

Writes JSON lines whose category is the module, so that a report is pair x module. Neither files of val_files.json are
cut from, nor tests: the ones are for measuring, the others the task that fitted weights have not seen.
"""

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from collect import held_out, sources
from texts import HELD_OUT

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


def main(out: Path, num_modules: int = 12, each: int = 20) -> None:
    """Write the prompts of the modules that have most to cut from, in an order that a hash of their ids gives."""
    found: dict[str, list[tuple[str, str]]] = {}
    for path, text in sources():
        if path not in HELD_OUT and not held_out(path) and not is_test(path):
            found.setdefault(Path(path).parts[0].removesuffix(".py"), []).extend(windows(path, text))
    modules = sorted(found, key=lambda module: (-len(found[module]), module))[:num_modules]
    prompts = [
        {"id": id, "category": module, "turns": [prompt]}
        for module in modules
        for id, prompt in sorted(found[module], key=lambda item: digest(item[0]))[:each]
    ]
    out.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    print(", ".join(f"{module} {min(each, len(found[module]))} of {len(found[module])}" for module in modules))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
