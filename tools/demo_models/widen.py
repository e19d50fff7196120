"""Widen the feed-forward of a block drafter without changing what it computes: `widen.py FROM OUT WIDTH`.

The new units read the stream through random weights and write nothing yet, so that a training from OUT
(`treegraft fit dflash --start OUT`) begins where FROM stands.
"""

import json
import re
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def main(source: str, out: str, width: str) -> None:
    file = Path(source) / "config.json"
    config = json.loads(file.read_text()) if file.is_file() else {}
    if config.get("architectures") != ["DFlashDraftModel"]:
        raise SystemExit(f"FROM: {source} is no folder of a block drafter (config.json with DFlashDraftModel).")
    added = int(width) - config["intermediate_size"] if width.isdecimal() else 0
    if added <= 0:
        raise SystemExit(
            f"WIDTH: {width}, where {source} has {config['intermediate_size']} already. Give a larger number."
        )
    if Path(out).exists():
        raise SystemExit(f"OUT: {out} exists. Give a new folder.")
    weights = load_file(Path(source) / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name, weight in weights.items():
        if re.search(r"mlp\.(gate|up)_proj\.weight$", name):
            new = torch.randn(added, weight.shape[1], generator=generator) * weight.float().std()
            weights[name] = torch.cat([weight, new.to(weight.dtype)])
        elif re.search(r"mlp\.down_proj\.weight$", name):
            weights[name] = torch.cat([weight, weight.new_zeros(weight.shape[0], added)], dim=1)
    Path(out).mkdir(parents=True)
    (Path(out) / "config.json").write_text(json.dumps({**config, "intermediate_size": int(width)}, indent=2) + "\n")
    save_file(weights, Path(out) / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    if len(sys.argv) != 4:
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
