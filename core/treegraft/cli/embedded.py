"""What commands do differently for the models that come with treegraft."""

from collections.abc import Mapping
from typing import Any

import torch

from treegraft.interfaces import ModelSpec


def spare_threads(models: Mapping[str, Any]) -> None:
    """Compute on one thread if all models are embedded ones.

    They are so small that sharing a forward among threads brings nothing, and on a busy machine costs many times the
    forward itself.
    """
    if all(isinstance(model, ModelSpec) and model.path.startswith("demo:") for model in models.values()):
        torch.set_num_threads(1)
