"""Requests leave nothing behind: neither tensors nor memory grow with their number."""

import gc
import resource
from pathlib import Path

import pytest
import torch
from hf.families import FAMILIES, middle_of

import treegraft
from treegraft.registry import packaged_registry

NUM_REQUESTS = 200
NUM_TOKENS = 3
SPECULATE = ("costs={use: fixed}", "budget={use: fixed, verify_nodes: 8}", "steps=2")


@pytest.fixture(scope="module")
def models():
    target = FAMILIES["llama"]()
    return {"target": target, "middle": middle_of(target)}


def resident_bytes():
    """What the system counts as this process's memory, or 0 where it does not say."""
    counts = Path("/proc/self/statm")
    return int(counts.read_text().split()[1]) * resource.getpagesize() if counts.exists() else 0


def num_live_tensors():
    gc.collect()
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())


@pytest.mark.parametrize("name", ["plain", "treegraft_fixed"])
def test_memory_is_flat_after_the_third_request(name, models):
    pipeline = treegraft.load(name, *SPECULATE, models=models, registry=packaged_registry())
    tensors, resident, accepted = {}, {}, 0
    for request in range(NUM_REQUESTS):
        prompt = [1 + (7 * request + index * (index + 3)) % 60 for index in range(4 + request % 9)]
        result = pipeline.generate(prompt, NUM_TOKENS)
        accepted += sum(number * count for number, count in result.accepted_histogram.items())
        if request in (3, NUM_REQUESTS // 2, NUM_REQUESTS - 1):
            tensors[request], resident[request] = num_live_tensors(), resident_bytes()
    assert (accepted > 0) == (name != "plain")
    assert len(set(tensors.values())) == 1, f"live tensors after requests: {tensors}"
    # A cache's slots alone, 200 kB here, would come to 20 MB; less is the allocator's own.
    growth = (resident[NUM_REQUESTS - 1] - resident[NUM_REQUESTS // 2]) / 2**20
    assert growth < 8, f"{growth:.1f} MiB more resident after {NUM_REQUESTS // 2} requests"
