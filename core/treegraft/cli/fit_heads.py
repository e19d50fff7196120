"""`treegraft fit heads`: a Medusa-type drafter for a target."""

from typing import Any

import click

from treegraft.cli.quiet import quiet
from treegraft.cli.training import fit_of, training_options


@click.command()
@training_options
@click.option("--num-heads", type=click.IntRange(min=1), help="Places that are covered.  [default: the start's, or 4]")
def heads(num_heads: int | None, **options: Any) -> None:
    """Train a small head for each of the next places, on text and on what the target itself writes.

    DIR then holds the heads (config.json, model.safetensors), the text (text.npz) and the target's hidden states of it
    (hidden-*.bin), the checkpoint (training.pt) and the held-out curve (curve.jsonl): mean accepted tokens a round of
    the heads' chains, for each temperature.
    """
    from treegraft_plugins.hf.heads.training import HeadsShape, fit_heads

    with quiet():
        fit_heads(fit_of(**options), HeadsShape(num_heads=num_heads))
