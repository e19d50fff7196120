"""What a run's manifest says of what is asked, of what it is asked with, and of the machine."""

import hashlib
import importlib.metadata
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch

from treegraft.bench.arms import Arm
from treegraft.bench.lineup import Lineup
from treegraft.bench.prompts import Prompt
from treegraft.bench.run import Task
from treegraft.interfaces import ModelSpec, TargetModel


def of_lineup(lineup: Lineup) -> dict[str, Any]:
    """The pipelines as they were resolved, and the models."""
    models = {
        name: attrs.asdict(model) if isinstance(model, ModelSpec) else str(type(model).__name__)
        for name, model in lineup.models.items()
    }
    from treegraft_plugins.hf.loading import checkpoint_digest  # transformers' part, where it is asked for

    return {
        "pipelines": {name: pipeline.config for name, pipeline in lineup.pipelines.items()},
        "models": {name: model["path"] if isinstance(model, dict) else model for name, model in models.items()},
        "model_specs": models,
        "model_digests": {
            name: checkpoint_digest(model) for name, model in lineup.models.items() if isinstance(model, ModelSpec)
        },
        "files": {name: pipeline.file_digests for name, pipeline in lineup.pipelines.items()},
    }


def of_prompts(paths: Sequence[Path], prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Which prompts, with hashes of the files and of what is read of them."""
    return {
        "prompts": [
            {
                "file": str(path), "sha256": _sha256(path.read_bytes()),
                "num_prompts": sum(prompt.file == str(path) for prompt in prompts),
            }
            for path in paths
        ],
        "prompt_hashes": {f"{prompt.file} {prompt.id}": _sha256(prompt.turns[0].encode())[:16] for prompt in prompts},
    }  # fmt: skip


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def of_machine(lineup: Lineup) -> dict[str, Any]:
    """Versions and hardware."""
    versions = {"python": platform.python_version()}
    for package in ("treegraft", "torch", "transformers", "numpy"):
        versions[package] = importlib.metadata.version(package)
    for pipeline in lineup.pipelines.values():
        for part in pipeline.parts.values():
            versions.setdefault(part.provider.name, part.provider.version or "")
    machine = {"platform": platform.platform(), "processor": platform.machine(), "num_cores": os.cpu_count()}
    return {"versions": versions, "machine": machine, "batch_size": 1}


def of_arms(target: TargetModel, arms: Sequence[Arm], tasks: Sequence[Task]) -> dict[str, Any]:
    """What is read back once everything is loaded."""
    ids = np.resize(np.array(tasks[0].ids, dtype=np.int64), 2)
    dtype = next(iter(target.teacher_force(ids, 1))).tensor.dtype
    device = {"device": str(target.device)}
    if target.device.type == "cuda":
        device["device_name"] = torch.cuda.get_device_name(target.device)
    return {
        **device, "dtype": str(dtype).removeprefix("torch."), "num_threads": torch.get_num_threads(),
        "arm_settings": {
            arm.name: {"drafts": arm.drafts, "is_ours": arm.is_ours, **arm.settings()} for arm in arms
        },
    }  # fmt: skip
