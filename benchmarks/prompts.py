"""Prompts for the benchmarks: JSON lines with `id`, `category` and `turns`."""

import json
from pathlib import Path

HELD_OUT = Path(__file__).parent / "data" / "demo_heldout.jsonl"


def read_prompts(path: Path, limit: int | None = None) -> list[str]:
    """The first turn of the first `limit` prompts of a file."""
    lines = path.read_text().splitlines()[:limit]
    return [json.loads(line)["turns"][0] for line in lines]
