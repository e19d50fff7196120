"""`treegraft fit dflash`: a block-diffusion drafter for a target."""

from typing import Any

import click

from treegraft.cli.quiet import quiet
from treegraft.cli.training import fit_of, training_options


@click.command()
@training_options
@click.option("--block-size", type=click.IntRange(min=2), help="The anchor included.  [default: the start's, or 8]")
@click.option("--layers", type=click.IntRange(min=1), help="Of the drafter.  [default: the start's, or 2]")
@click.option("--heads", type=click.IntRange(min=1), help="Of its attention.  [default: the start's, or 4]")
@click.option("--key-value-heads", type=click.IntRange(min=1), help="Of its attention.  [default: the start's, or 2]")
@click.option("--head-dim", type=click.IntRange(min=2), help="Of its attention.  [default: the start's, or 32]")
@click.option("--intermediate-size", type=click.IntRange(min=1), help="Of its MLP.  [default: the start's, or 384]")
@click.option(
    "--target-layer", "target_layers", type=click.IntRange(min=0), multiple=True, metavar="INDEX",
    help="A layer of the target that feeds it, from 0; may be repeated.  [default: the start's, or evenly spaced ones]",
)  # fmt: skip
@click.option(
    "--mask-token", type=click.IntRange(min=0), metavar="ID",
    help="[default: the start's, or the tokenizer's mask token, else its padding]",
)  # fmt: skip
def dflash(
    block_size: int | None,
    layers: int | None,
    heads: int | None,
    key_value_heads: int | None,
    head_dim: int | None,
    intermediate_size: int | None,
    target_layers: tuple[int, ...],
    mask_token: int | None,
    **options: Any,
) -> None:
    """Train a block-diffusion drafter on text and on what the target itself writes.

    DIR then holds the drafter (config.json, model.safetensors), the text (text.npz) and the target's hidden states of
    it (hidden-*.bin), the checkpoint (training.pt) and the held-out curve (curve.jsonl): mean accepted tokens a round
    of the drafter's chains, for each temperature.
    """
    from treegraft_plugins.hf.dflash.training import DFlashShape, fit_dflash

    shape = DFlashShape(
        block_size=block_size,
        num_layers=layers,
        num_heads=heads,
        num_key_value_heads=key_value_heads,
        head_dim=head_dim,
        intermediate_size=intermediate_size,
        target_layer_ids=target_layers or None,
        mask_token_id=mask_token,
    )
    with quiet():
        fit_dflash(fit_of(**options), shape)
