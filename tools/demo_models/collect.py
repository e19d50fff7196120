"""Collect the Python standard library's sources, split them by file, train a byte-level BPE.

Usage: collect.py OUT

Writes tokenizer.json, train.bin and val.bin (uint16 ids), and val_files.json (files that are never trained on).
"""

import hashlib
import json
import sys
import sysconfig
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

SKIPPED = {
    "site-packages", "idlelib", "lib2to3", "turtledemo", "__pycache__", "ensurepip", "pydoc_data", "encodings",
}  # fmt: skip
SPECIAL_TOKENS = ["<|endoftext|>", "<|pad|>", "<|mask|>"]
# Words with a leading blank, single digits, line ends, indentation, punctuation, the rest.
PIECES = r" ?[A-Za-z_]+|[0-9]|\n+|[ \t]+(?=\S)| ?[^\sA-Za-z_0-9]+|\s+"

Sources = list[tuple[str, str]]


def sources() -> Sources:
    """(path, text) of every file taken in, by path."""
    root, files = Path(sysconfig.get_paths()["stdlib"]), []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED & set(relative.parts) or "_sysconfigdata" in path.name:
            continue
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError:
            continue
        if 200 < len(text) < (100_000 if "test" in relative.parts else 400_000):
            files.append((str(relative), text))
    return files


def held_out(path: str) -> bool:
    """One file in twenty, by a hash of its path."""
    return int(hashlib.sha256(path.encode()).hexdigest(), 16) % 20 == 0


def train_tokenizer(files: Sources) -> Tokenizer:
    """A byte-level BPE of 4096 tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4096, special_tokens=SPECIAL_TOKENS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator((text for _, text in files), trainer)
    return tokenizer


def main(out: Path) -> None:
    """Write everything to `out`."""
    out.mkdir(exist_ok=True)
    files = sources()
    parts = {
        "train": [file for file in files if not held_out(file[0])],
        "val": [file for file in files if held_out(file[0])],
    }
    tokenizer = train_tokenizer(parts["train"])
    tokenizer.save(str(out / "tokenizer.json"))
    for name, part in parts.items():
        ids = [token for _, text in part for token in (*tokenizer.encode(text).ids, 0)]
        np.array(ids, dtype=np.uint16).tofile(out / f"{name}.bin")
        print(name, len(part), "files", sum(len(text) for _, text in part) / 1e6, "MB", len(ids), "ids")
    (out / "val_files.json").write_text(json.dumps([path for path, _ in parts["val"]]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
