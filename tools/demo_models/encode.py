"""Encode the demo models' corpus with the embedded target's own tokenizer: what another middle for it is trained on.

Usage: encode.py OUT

Writes tokenizer.json, train.bin and val.bin (uint16 ids), split as `collect.py` split them. The second middle:
encode.py d; train.py d middle2 4 96 288 2 12 TARGET, with the folder of the embedded target.
"""

import sys
from importlib import resources
from pathlib import Path

import numpy as np
from collect import held_out, sources
from texts import HELD_OUT
from tokenizers import Tokenizer


def main(out: Path) -> None:
    """Write everything to `out`."""
    out.mkdir(exist_ok=True)
    text_of = resources.files("treegraft_plugins.hf.demo_pair") / "target" / "tokenizer.json"
    tokenizer = Tokenizer.from_str(text_of.read_text("utf-8"))
    tokenizer.save(str(out / "tokenizer.json"))
    ids: dict[bool, list[int]] = {False: [], True: []}
    for path, text in sources():
        ids[path in HELD_OUT or held_out(path)] += [*tokenizer.encode(text).ids, 0]
    for name, part in (("train", ids[False]), ("val", ids[True])):
        np.array(part, dtype=np.uint16).tofile(out / f"{name}.bin")
        print(name, len(part), "ids")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
