"""`treegraft.generate`: a model's own `generate`, with a pipeline inside."""

from collections.abc import Mapping
from typing import Any

from treegraft.compose import load
from treegraft.errors import RequestError
from treegraft.pipeline import Pipeline
from treegraft.sampling import Seed


def generate(
    model: Any,
    inputs: Any = None,
    pipeline: str | Pipeline = "treegraft",
    models: Mapping[str, Any] | None = None,
    *,
    seed: Seed | None = None,
    tokenizer: Any = None,
    **options: Any,
) -> Any:
    """`model.generate(...)` through a pipeline: the same arguments, the same text, the same kind of result.

    What transformers drops before a `custom_generate`, this takes: a streamer and stop strings.

    Args:
        model: a loaded transformers model.
        inputs: what the tokenizer returns, or token ids [rows, T]; padding is on the left.
        pipeline: a name in the registry, or what `load` returned for this very model. A name is loaded anew in each
            call: load it once for many.
        models: with a name, the pipeline's other models, as in `load`.
        seed: of sampling, an int; row r draws as a single run with `(seed, r)`. None draws one from torch's default
            generator.
        tokenizer: for stop strings and for the pipeline; by default the pipeline's.
        options: streamer, stop_strings, stopping_criteria, logits_processor, generation_config, and whatever else
            the model's `generate` takes.

    Returns:
        Sequences int64 [rows, T], or with `return_dict_in_generate` transformers' output, whose `treegraft` is the
        Generation (a tuple of them for several rows).

    Raises:
        RequestError: an option that cannot be honoured, by name, before anything is computed.
        ComposeError, ModelError: as `load`.
    """
    from treegraft_plugins.hf.generate import front_door  # transformers' part, where it is asked for

    if isinstance(pipeline, str):
        models = dict(models or {})
        if "target" in models:
            raise RequestError("models.target", "a target beside the model", "Allowed: drafters' models.")
        models["target"] = model if tokenizer is None else (model, tokenizer)
        pipeline = _loaded(pipeline, models, options)
    elif not isinstance(pipeline, Pipeline):
        raise RequestError(
            "pipeline", f"a {type(pipeline).__name__}", "Allowed: a name in the registry, or what `load` returned."
        )
    elif models:
        raise RequestError("models", "models beside a loaded pipeline, which has its own", "Allowed: None.")
    return front_door(model, inputs, pipeline, seed=seed, tokenizer=tokenizer, **options)


def _loaded(name: str, models: Mapping[str, Any], options: Mapping[str, Any]) -> Pipeline:
    try:
        return load(name, models=models)
    except BaseException:
        if options.get("streamer") is not None:
            options["streamer"].end()  # its reader waits for it
        raise
