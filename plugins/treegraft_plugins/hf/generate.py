"""`model.generate(custom_generate=pipeline)` and the front door `treegraft.generate`."""

import copy
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedModel,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.cache_utils import Cache
from transformers.generation import GenerateDecoderOnlyOutput

from treegraft.errors import RequestError
from treegraft.pipeline import Generation, Pipeline
from treegraft.sampling import SamplingRules, Seed, SeededDraws, TokenSampler
from treegraft_plugins.hf import past as caches
from treegraft_plugins.hf.cache import KeysValues, Past
from treegraft_plugins.hf.generation_options import refuse_options
from treegraft_plugins.hf.row_rules import Row, row_criteria, row_processors
from treegraft_plugins.hf.rules import split_rules
from treegraft_plugins.hf.target import HFCausalLMTarget

_UNLIMITED = 2**31
_DOOR = "Use treegraft.generate(model, inputs, pipeline=...)"
# What transformers drops before it calls a custom_generate, without a word.
_DROPPED = {
    "streamer": f"{_DOOR}, which takes a streamer.",
    "assistant_model": "The pipeline's drafters assist: name the model in models=.",
    "synced_gpus": "One process decodes one text.",
}


@attrs.frozen(eq=False)
class _Plan:
    """A row before it is decoded."""

    row: Row
    sampler: TokenSampler
    seed: Seed
    past: Past | None


@attrs.frozen(eq=False)
class _Done:
    """A row when it is decoded; `states` are the keys and values of its tokens, None where none was emitted."""

    plan: _Plan
    generation: Generation
    states: list[KeysValues] | None


# -- the front door ---------------------------------------------------------------------------------------------------


def front_door(
    model: PreTrainedModel,
    inputs: Any,
    pipeline: Pipeline,
    *,
    seed: Seed | None = None,
    streamer: Any = None,
    tokenizer: Any = None,
    stop_strings: str | Sequence[str] | None = None,
    stopping_criteria: Any = None,
    logits_processor: Any = None,
    generation_config: GenerationConfig | None = None,
    **generate_kwargs: Any,
) -> Any:
    """See `treegraft.generate`."""
    try:
        given = _inputs(inputs, generate_kwargs)
        for name in ("custom_generate", "assistant_model", "assistant_tokenizer", "synced_gpus"):
            if given.get(name):
                raise RequestError(name, "an argument beside a pipeline", None, _DROPPED.get(name))
            given.pop(name, None)
        refuse_options(lambda name: given.get(name, getattr(generation_config, name, None)))
        _require_own_model(pipeline, model)
        stops = _stop_strings(stop_strings, generation_config, model.generation_config)
        criteria = StoppingCriteriaList(stopping_criteria or ())
        if stops:
            criteria.append(_stop_criterion(stops, tokenizer if tokenizer is not None else pipeline.tokenizer))
        if generation_config is not None and generation_config.stop_strings is not None:
            generation_config = copy.deepcopy(generation_config)
            generation_config.stop_strings = None
        if model.generation_config.stop_strings is not None:
            given["stop_strings"] = None  # they are among the criteria; transformers would ask for a tokenizer again

        def run(
            model: Any,
            input_ids: Any,
            logits_processor: Any,
            stopping_criteria: Any,
            generation_config: Any,
            **rest: Any,
        ) -> Any:
            return generate_rows(
                pipeline, model, input_ids, logits_processor, stopping_criteria, generation_config, seed,
                stream_to=streamer, **rest,
            )  # fmt: skip

        return model.generate(
            **given, custom_generate=run, generation_config=generation_config, stopping_criteria=criteria,
            logits_processor=LogitsProcessorList(logits_processor or ()),
        )  # fmt: skip
    finally:
        if streamer is not None:
            streamer.end()  # whatever happens: a reader waits for it


def _inputs(inputs: Any, generate_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs and the other arguments of `generate`."""
    if inputs is None:
        return dict(generate_kwargs)
    if isinstance(inputs, torch.Tensor):
        if inputs.ndim != 2:
            raise RequestError("inputs", f"token ids of shape {tuple(inputs.shape)}", "Allowed: [rows, T].")
        return {"inputs": inputs, **generate_kwargs}
    if isinstance(inputs, Mapping):
        twice = sorted(set(inputs) & set(generate_kwargs))
        if twice:
            raise RequestError(twice[0], "given twice, in the inputs and beside them", "Allowed: one of the two.")
        return {**inputs, **generate_kwargs}
    raise RequestError(
        "inputs", f"a {type(inputs).__name__}", "Allowed: what the tokenizer returns, or token ids [rows, T].",
        'Tokenize text first: tokenizer(text, return_tensors="pt").',
    )  # fmt: skip


def _stop_strings(own: str | Sequence[str] | None, *configs: GenerationConfig | None) -> list[str]:
    """The caller's stop strings, else those of the first configuration that has any."""
    for found in (own, *(config.stop_strings for config in configs if config is not None)):
        if found is not None:
            return [found] if isinstance(found, str) else list(found)
    return []


def _stop_criterion(stops: list[str], tokenizer: Any) -> StopStringCriteria:
    if tokenizer is None:
        raise RequestError(
            "stop_strings", f"{stops!r} without a tokenizer to read the text with", None, "Pass tokenizer=."
        )
    return StopStringCriteria(tokenizer=tokenizer, stop_strings=stops)


# -- what transformers calls ------------------------------------------------------------------------------------------


def generate_rows(
    pipeline: Pipeline,
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: Sequence[Any],
    stopping_criteria: Sequence[Any],
    generation_config: GenerationConfig,
    seed: Seed | None = None,
    *,
    stream_to: Any = None,
    **model_kwargs: Any,
) -> Any:
    """Decode every row, one after another, and return what `generate` returns.

    Args:
        pipeline: whose target is `model`.
        model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs: as transformers
            prepared them.
        seed: of the draws; None draws one from torch's default generator, if tokens are sampled.
        stream_to: a streamer that gets the prompt and each token as it is accepted; the caller ends it.

    Raises:
        RequestError: an option that cannot be honoured, by name, before anything is computed.
    """
    _refuse_dropped()
    refuse_options(lambda name: getattr(generation_config, name, None))
    _require_own_model(pipeline, model)
    cache: Cache | None = model_kwargs.pop("cache", None)
    if cache is not None:
        caches.check_cache(cache, len(input_ids))
    mask = _attention_mask(input_ids, model_kwargs.pop("attention_mask", None), generation_config, cache)
    _refuse_other(model_kwargs, mask)
    if stream_to is not None and len(input_ids) > 1:
        raise RequestError("streamer", f"{len(input_ids)} rows", "Allowed: one row, as in generate.")

    returned = bool(generation_config.return_dict_in_generate)
    lengths = [criterion.max_length for criterion in stopping_criteria if type(criterion) is MaxLengthCriteria]
    max_new_tokens = min(lengths, default=_UNLIMITED) - input_ids.shape[1]
    if cache is not None and not (returned or getattr(cache, "_is_user_defined", False)):
        cache = None  # made by `generate` and seen by nobody
    if cache is not None:
        caches.check_room(cache, mask.shape[1] + max_new_tokens - 1)
    rules = split_rules(
        logits_processor, stopping_criteria, greedy=not generation_config.do_sample,
        keep_scores=returned and bool(generation_config.output_scores),
        keep_logits=returned and bool(generation_config.output_logits), device=input_ids.device,
    )  # fmt: skip
    seeds = _seeds(seed, len(input_ids), rules.greedy)
    plans = [
        _plan(pipeline, input_ids, mask, index, rules, seeds[index], max_new_tokens, cache)
        for index in range(len(input_ids))
    ]
    pad = _pad_token(generation_config, plans, rules)
    if stream_to is not None:
        stream_to.put(input_ids.cpu())
    rows = [_decode(pipeline, plan, generation_config.prefill_chunk_size, cache, stream_to) for plan in plans]
    return _output(input_ids, mask, rows, pad, rules, cache, returned)


def _plan(
    pipeline: Pipeline,
    input_ids: torch.Tensor,
    mask: torch.Tensor,
    index: int,
    rules: SamplingRules,
    seed: Seed,
    max_new_tokens: int,
    cache: Cache | None,
) -> _Plan:
    """Check a row and prepare its request."""
    held = caches.num_slots(cache)
    num_masked = int((mask[index] == 0).sum())
    num_before = mask.shape[1] - input_ids.shape[1]  # columns that only the cache knows
    num_padding = max(0, num_masked - num_before)
    tokens = input_ids[index, num_padding:]
    row = Row(index, len(input_ids), tokens, num_padding, num_masked)
    past = None
    if held:
        past = caches.read_row(cache, index, min(num_masked, held), max(0, num_before - num_masked))
        if past.length - past.num_unseen >= len(tokens):
            raise RequestError(
                "cache", f"it holds all {len(tokens)} tokens of the prompt", "Allowed: all but the last, or fewer.",
                "Crop it by one: cache.crop(-1).",
            )  # fmt: skip
    own = attrs.evolve(
        rules, processors=row_processors(rules.processors, row), criteria=row_criteria(rules.criteria, row)
    )
    num_unseen = past.num_unseen if past is not None else 0
    sampler = pipeline.sampler(tokens, own, SeededDraws(seed), max_new_tokens, num_unseen)
    return _Plan(row, sampler, seed, past)


def _decode(pipeline: Pipeline, plan: _Plan, chunk_size: int | None, cache: Cache | None, streamer: Any) -> _Done:
    """Run one row to its end."""
    target, states = pipeline.target, None
    rounds = pipeline.run(plan.sampler, plan.seed, lambda: target.prepare(plan.past, chunk_size))
    while True:
        try:
            record = next(rounds)
        except StopIteration as end:
            return _Done(plan, end.value, states)
        if streamer is not None:
            for token in record.tokens:
                streamer.put(torch.tensor([token]))
        if cache is not None and plan.sampler.stop_reason is not None:
            states = target.committed()  # the request's end frees them


# -- what is refused --------------------------------------------------------------------------------------------------


def _refuse_dropped() -> None:
    """Find the call of `generate` that this one stands in, to see what it was given and did not hand on.

    transformers would push the prompt to a streamer and never end it, so that its reader waits for ever.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "generate" and frame.f_globals["__name__"] == "transformers.generation.utils":
            break
        frame = frame.f_back
    if frame is None:
        return
    for name, action in _DROPPED.items():
        value = frame.f_locals.get(name)
        if value is not None and value is not False:
            if name == "streamer":
                value.end()  # it has got the prompt already, and its reader waits
            raise RequestError(
                f"generate({name}=)", f"a {type(value).__name__} beside custom_generate, where transformers drops it",
                None, action,
            )  # fmt: skip


def _require_own_model(pipeline: Pipeline, model: PreTrainedModel) -> None:
    own = pipeline.target
    where = f"pipelines.{pipeline.name}"
    if not isinstance(own, HFCausalLMTarget):
        raise RequestError(where, f"a target of class {type(own).__name__}", "Allowed: hf_causal_lm.")
    if own.model is not model:
        raise RequestError(
            where, f"it was loaded for another {type(own.model).__name__} than this {type(model).__name__}",
            "Allowed: the pipeline's own model object.",
            'Load one for this model: treegraft.load(..., models={"target": model}).',
        )  # fmt: skip
    if model.training:
        raise RequestError(type(model).__name__, "it is in training mode", None, "Call model.eval() first.")


def _attention_mask(
    input_ids: torch.Tensor, mask: torch.Tensor | None, config: GenerationConfig, cache: Cache | None
) -> torch.Tensor:
    """int64 [rows, columns] on the CPU; columns of what the cache holds may stand before those of `input_ids`."""
    if mask is None:
        width = getattr(config, "_mask_length", None) or input_ids.shape[1]
        mask = torch.ones((len(input_ids), max(width, input_ids.shape[1])), dtype=torch.long)
    mask = (mask != 0).long().cpu()
    held = caches.num_slots(cache)
    if mask.shape[1] not in (input_ids.shape[1], held + input_ids.shape[1]):
        raise RequestError(
            "attention_mask", f"{mask.shape[1]} columns for {input_ids.shape[1]} of input_ids and {held} in the cache",
            f"Allowed: {input_ids.shape[1]} (the whole text), or {held + input_ids.shape[1]} (new tokens only).",
        )  # fmt: skip
    if (mask.diff(dim=1) < 0).any():
        raise RequestError(
            "attention_mask", "padding behind or between tokens", "Allowed: padding on the left.",
            "Set tokenizer.padding_side = 'left'.",
        )  # fmt: skip
    return mask


def _refuse_other(model_kwargs: Mapping[str, Any], mask: torch.Tensor) -> None:
    """Refuse what goes into a forward beside token ids and the mask."""
    positions = model_kwargs.get("position_ids")
    if positions is not None:
        expected = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 0)
        width = min(positions.shape[-1], expected.shape[-1])
        if not (positions.cpu()[..., -width:] == expected[:, -width:]).all():
            raise RequestError("position_ids", "positions of your own", "Allowed: those that the mask implies.")
    known = {"position_ids", "logits_to_keep", "use_cache"}
    for name, value in model_kwargs.items():
        if name not in known and value is not None:
            raise RequestError(
                f"generate({name}=)", "an input beside token ids", "Allowed: input_ids, attention_mask, cache."
            )


def _seeds(seed: Seed | None, num_rows: int, greedy: bool) -> list[Seed]:
    """A seed for each row."""
    if seed is None:
        seed = 0 if greedy else int(torch.randint(2**63 - 1, (1,)))
    elif isinstance(seed, tuple) and num_rows > 1:
        raise RequestError("seed", f"{seed!r} for {num_rows} rows", "Allowed: an int s; row r draws with (s, r).")
    SeededDraws(seed)  # refuses what is no seed
    return [seed] if num_rows == 1 else [(int(seed), row) for row in range(num_rows)]


def _pad_token(config: GenerationConfig, plans: Sequence[_Plan], rules: SamplingRules) -> int | None:
    """The token behind a row's end, or None where all rows end together."""
    pad = getattr(config, "_pad_token_tensor", None)
    if pad is not None:
        return int(pad)
    ends_alike = not rules.criteria and not rules.eos_ids and len({plan.sampler.max_tokens for plan in plans}) == 1
    if len(plans) > 1 and not ends_alike:
        raise RequestError("pad_token_id", "none, for rows that may end apart", None, "Pass pad_token_id=.")
    return None


# -- what comes back --------------------------------------------------------------------------------------------------


def _output(
    input_ids: torch.Tensor,
    mask: torch.Tensor,
    rows: Sequence[_Done],
    pad: int | None,
    rules: SamplingRules,
    cache: Cache | None,
    returned: bool,
) -> Any:
    emitted = [row.generation.token_ids for row in rows]
    num_new = max(map(len, emitted))
    new = np.full((len(rows), num_new), 0 if pad is None else pad, np.int64)
    for row, tokens in zip(new, emitted, strict=True):
        row[: len(tokens)] = tokens
    sequences = torch.cat([input_ids, torch.from_numpy(new).to(input_ids)], dim=1)
    if cache is not None and all(row.states is not None for row in rows):
        kept = [caches.Row(row.states, row.plan.row.num_masked) for row in rows]
        caches.write_rows(cache, kept, mask.shape[1] + num_new - 1)
    if not returned:
        return sequences
    samplers = [row.plan.sampler for row in rows]
    output = GenerateDecoderOnlyOutput(
        sequences=sequences,
        scores=_columns([sampler.scores for sampler in samplers], num_new) if rules.keep_scores else None,
        logits=_columns([sampler.logits for sampler in samplers], num_new) if rules.keep_logits else None,
        cache=cache,
    )
    generations = tuple(row.generation for row in rows)
    output.treegraft = generations[0] if len(generations) == 1 else generations
    return output


def _columns(rows: Sequence[Sequence[torch.Tensor]], num_new: int) -> tuple[torch.Tensor, ...]:
    """float32 [rows, V] an emitted token, zeros behind a row's end."""
    nothing = next((torch.zeros_like(row[0]) for row in rows if row), None)
    return tuple(
        torch.cat([row[column] if column < len(row) else nothing for row in rows]) for column in range(num_new)
    )
