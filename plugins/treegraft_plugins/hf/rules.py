"""Processors, criteria and EOS of a request, built by transformers itself."""

import contextlib
import threading
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch
from transformers import (
    EosTokenCriteria,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    MaxLengthCriteria,
    MinPLogitsWarper,
    PreTrainedModel,
    StoppingCriteria,
    StopStringCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
from transformers.utils import logging

from treegraft.errors import RequestError
from treegraft.sampling import SamplingOptions, SamplingRules

_ONE_QUIET = threading.RLock()

_STATELESS = {
    TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper, TypicalLogitsWarper,
    EpsilonLogitsWarper, EtaLogitsWarper,
}  # fmt: skip

# Settings of a model's generation_config that choose how it decodes: here the caller and the pipeline do.
_DECODING = {
    "num_beams": 1, "num_return_sequences": 1, "penalty_alpha": None, "prompt_lookup_num_tokens": None,
    "assistant_early_exit": None, "use_mtp": False, "min_p": None, "top_h": None, "typical_p": None,
    "epsilon_cutoff": None, "eta_cutoff": None, "stop_strings": None, "cache_implementation": None,
}  # fmt: skip


def warpers(options: SamplingOptions, tokenizer: Any = None) -> SamplingRules:
    """The caller's options alone, for targets that have no generation settings of their own."""
    processors: list[Any] = []
    if options.temperature not in (0.0, 1.0):
        processors.append(TemperatureLogitsWarper(float(options.temperature)))
    if options.top_k:
        processors.append(TopKLogitsWarper(options.top_k))
    if options.top_p < 1:
        processors.append(TopPLogitsWarper(options.top_p))
    return SamplingRules(
        greedy=options.temperature == 0,
        processors=tuple(processors),
        warpers=tuple(processors),
        criteria=_stop_strings(options.stop, tokenizer),
    )


def generation_rules(
    model: PreTrainedModel, tokenizer: Any, ids: torch.Tensor, options: SamplingOptions, max_new_tokens: int
) -> SamplingRules:
    """The caller's options on top of what the model's generation_config says, as its `generate` would honour it.

    Args:
        model: whose generation_config counts; nothing of it is changed.
        tokenizer: for stop strings, or None.
        ids: int64 [1, T], the prompt.
        options: the caller's; they replace the model's sampling settings, all of them.
        max_new_tokens: the caller's.

    Raises:
        RequestError: the settings cannot be honoured.
    """
    if model.generation_config.token_healing:
        raise RequestError("generation_config.token_healing", "it rewrites the prompt", "Allowed: False.")
    greedy = options.temperature == 0
    sampling = {} if greedy else {
        "temperature": float(options.temperature), "top_k": options.top_k, "top_p": float(options.top_p)
    }  # fmt: skip
    built: dict[str, Any] = {}

    def capture(_model: PreTrainedModel, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        built.update(kwargs)
        return input_ids

    try:
        with _quiet():
            model.generate(
                ids, custom_generate=capture, do_sample=not greedy, max_new_tokens=max(1, max_new_tokens),
                **_DECODING, **sampling,
            )  # fmt: skip
    except ValueError as error:
        raise RequestError(f"{type(model).__name__}.generation_config", str(error).strip().split("\n")[0]) from error
    mode = built["generation_config"].get_generation_mode()
    if mode not in ("greedy_search", "sample"):
        raise RequestError("generation_config", f"it asks for {mode.value}", "Allowed: greedy search or sampling.")
    rules = split_rules(built["logits_processor"], built["stopping_criteria"], greedy)
    stops = _stop_strings([*(model.generation_config.stop_strings or ()), *options.stop], tokenizer)
    return attrs.evolve(rules, criteria=(*rules.criteria, *stops))


def split_rules(
    processors: Sequence[Any],
    stopping_criteria: Sequence[Any],
    greedy: bool,
    *,
    keep_scores: bool = False,
    keep_logits: bool = False,
    device: torch.device | None = None,
) -> SamplingRules:
    """Sort what transformers built into what the sampler does itself (EOS, length) and what it calls."""
    criteria, eos_ids = [], frozenset[int]()
    for criterion in stopping_criteria:
        if type(criterion) is EosTokenCriteria:
            eos_ids |= set(criterion.eos_token_id.tolist())
        elif type(criterion) is not MaxLengthCriteria:
            criteria.append(criterion)
    return SamplingRules(
        greedy=greedy,
        processors=tuple(processors),
        warpers=tuple(processor for processor in processors if type(processor) in _STATELESS),
        criteria=tuple(criteria),
        eos_ids=eos_ids,
        keep_scores=keep_scores,
        keep_logits=keep_logits,
        device=device,
    )


def _stop_strings(stop: Any, tokenizer: Any) -> tuple[StoppingCriteria, ...]:
    if not stop:
        return ()
    if tokenizer is None:
        raise RequestError(
            "stop", f"{list(stop)!r} without a tokenizer to read the text with", None, "Pass tokenizer= to load()."
        )
    return (StopStringCriteria(tokenizer=tokenizer, stop_strings=list(stop)),)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' remarks on settings that are overridden here anyway."""
    # Both belong to the process: of two threads, one would take the other's silence for the caller's setting.
    with _ONE_QUIET, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        verbosity = logging.get_verbosity()
        logging.set_verbosity_error()
        try:
            yield
        finally:
            logging.set_verbosity(verbosity)
