"""Write the demo models' corpus as text files: what they were trained on, and what was held out.

Usage: texts.py OUT

Writes OUT/train/ and OUT/held_out/, split as `collect.py` split them; no file of val_files.json lies in OUT/train/.
"""

import json
import sys
from pathlib import Path

from collect import held_out, sources

HELD_OUT = frozenset(json.loads((Path(__file__).parent / "val_files.json").read_text()))


def main(out: Path) -> None:
    """Write everything to `out`."""
    for path, text in sources():
        file = out / ("held_out" if path in HELD_OUT or held_out(path) else "train") / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
