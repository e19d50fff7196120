"""The pipelines of the packaged registry that any models can be given to."""

from treegraft.compose import resolve
from treegraft.registry import Registry, packaged_registry


def for_any_models() -> list[str]:
    """All but ablations of fitted schedulers, which are refused where no weights ship for the models."""
    registry = Registry.read(packaged_registry())
    return [name for name in registry.concrete() if "ablation" not in registry.pipelines[name].get("scheduler", {})]


def repeating_plain() -> list[str]:
    """Those of them whose sampled text is plain decoding's with the same seed."""
    return [name for name in for_any_models() if resolve(name, registry=packaged_registry()).repeats_plain]
