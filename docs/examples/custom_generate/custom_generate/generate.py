"""Decoding through a treegraft pipeline, as transformers loads it from a folder (`trust_remote_code=True`)."""

import treegraft


def generate(model, pipeline="treegraft", models=None, **arguments):
    """What `treegraft.generate` takes beside the model goes in as keyword arguments of `model.generate`."""
    return treegraft.generate(model, pipeline=pipeline, models=models, **arguments)
