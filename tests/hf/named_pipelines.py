"""The pipelines of the packaged registry that any models can be given to."""

from treegraft.registry import Registry, packaged_registry


def for_any_models() -> list[str]:
    """All but ablations of fitted schedulers, which are refused where no weights ship for the models."""
    registry = Registry.read(packaged_registry())
    return [name for name in registry.concrete() if "ablation" not in registry.pipelines[name].get("scheduler", {})]
