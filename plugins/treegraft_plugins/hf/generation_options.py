"""Every option of transformers' GenerationConfig, and what becomes of it here."""

from collections.abc import Callable
from typing import Any, Literal

import attrs

from treegraft.errors import RequestError


@attrs.frozen
class Option:
    """What becomes of an option.

    Attributes:
        status: "honoured"; "refused" by name before anything is computed; or "unread", as in `generate` itself outside
            the decoding mode that reads it (which is refused).
        note: how, or why not.
        neutral: values of a refused option that ask for nothing.
    """

    status: Literal["honoured", "refused", "unread"]
    note: str
    neutral: tuple[Any, ...] = (None,)


def _honoured(note: str) -> Option:
    return Option("honoured", note)


def _refused(note: str, *neutral: Any) -> Option:
    return Option("refused", note, (None, *neutral))


def _unread(note: str) -> Option:
    return Option("unread", note)


_PROCESSOR = _honoured("transformers' processor, called lazily with the true prefix")
_WARPER = _honoured("transformers' warper, with do_sample")
_BEAMS = "beam search follows several texts at once"
_ASSISTED = "the pipeline is the assistant"

GENERATION_OPTIONS: dict[str, Option] = {
    # length
    "max_length": _honoured("counts the padded prompt, as in generate"),
    "max_new_tokens": _honoured("the context limit may allow fewer"),
    "min_length": _PROCESSOR,
    "min_new_tokens": _PROCESSOR,
    "max_time": _honoured("tested after each token; one clock for all rows, each of which gets at least a token"),
    "stop_strings": _honoured("tested after each token; through treegraft.generate, which knows the tokenizer"),
    "early_stopping": _unread("read by beam search"),
    # how tokens are chosen
    "do_sample": _honoured("draws by the seed, and never from the global generators"),
    "num_beams": _refused(_BEAMS, 1),
    "num_return_sequences": _honoured("row r draws as a single run with seed=(seed, r)"),
    "use_mtp": _refused(_ASSISTED, False),
    "temperature": _WARPER,
    "top_k": _WARPER,
    "top_p": _WARPER,
    "min_p": _WARPER,
    "top_h": _WARPER,
    "typical_p": _WARPER,
    "epsilon_cutoff": _WARPER,
    "eta_cutoff": _WARPER,
    # processors
    "repetition_penalty": _PROCESSOR,
    "encoder_repetition_penalty": _honoured("transformers' processor; the prompt is its encoder input"),
    "encoder_no_repeat_ngram_size": _honoured("transformers' processor; the prompt is its encoder input"),
    "no_repeat_ngram_size": _PROCESSOR,
    "bad_words_ids": _PROCESSOR,
    "renormalize_logits": _PROCESSOR,
    "forced_bos_token_id": _PROCESSOR,
    "forced_eos_token_id": _PROCESSOR,
    "remove_invalid_values": _PROCESSOR,
    "exponential_decay_length_penalty": _PROCESSOR,
    "suppress_tokens": _PROCESSOR,
    "begin_suppress_tokens": _PROCESSOR,
    "sequence_bias": _PROCESSOR,
    "guidance_scale": _honoured("transformers' processor, with its own forward of the target for each emitted token"),
    "watermarking_config": _PROCESSOR,
    "token_healing": _refused("it rewrites the prompt", False),
    # output
    "return_dict_in_generate": _honoured("the Generation is output.treegraft, a tuple of them for several rows"),
    "output_scores": _honoured("processed scores, float32, a row an emitted token; zeros behind a row's end"),
    "output_logits": _honoured("raw logits, float32, a row an emitted token; zeros behind a row's end"),
    "output_attentions": _refused("attention under a tree mask has no row for each emitted token", False),
    "output_hidden_states": _refused("a tree's forward has no state for each emitted token alone", False),
    # special tokens
    "pad_token_id": _honoured("fills rows behind their end"),
    "bos_token_id": _honoured("begins an empty input, as in generate"),
    "eos_token_id": _honoured("one or several, tested after each token"),
    "decoder_start_token_id": _unread("read by encoder-decoder models, which are refused"),
    # cache and speed
    "use_cache": _honoured("without it no cache is returned; keys and values of the request are kept in any case"),
    "cache_implementation": _refused(
        "offloaded and quantized caches cannot be rolled back to a path of the tree, and paged is another loop",
        "dynamic", "static", "hybrid", "sliding_window", "hybrid_chunked",
    ),
    "cache_config": _unread("read by quantized caches, which are refused"),
    "max_cache_len": _honoured("the size of a static cache"),
    "prefill_chunk_size": _honoured("tokens a forward of the prompt; 256 without it"),
    "compile_config": _refused("forwards of trees have ever new shapes and are not compiled"),
    "disable_compile": _honoured("nothing is compiled"),
    "continuous_batching_config": _refused("it belongs to generate_batch"),
    # assisted generation
    "prompt_lookup_num_tokens": _refused(_ASSISTED),
    "assistant_early_exit": _refused(_ASSISTED),
    "speculation_type": _refused(_ASSISTED),
    "assistant_ensemble_weight": _refused("it is not lossless"),
    "is_assistant": _refused("a pipeline is no assistant of another model", False),
    "num_assistant_tokens": _unread("read by assisted generation"),
    "num_assistant_tokens_schedule": _unread("read by assisted generation"),
    "assistant_confidence_threshold": _unread("read by assisted generation"),
    "max_matching_ngram_size": _unread("read by prompt lookup"),
    "assistant_lookbehind": _unread("read by assisted generation with two tokenizers"),
    "target_lookbehind": _unread("read by assisted generation with two tokenizers"),
    # beams and other decoding modes
    "length_penalty": _unread("read by beam search"),
    "num_beam_groups": _refused(_BEAMS, 1),
    "diversity_penalty": _refused(_BEAMS, 0.0),
    "constraints": _refused(_BEAMS),
    "force_words_ids": _refused(_BEAMS),
    "penalty_alpha": _refused("contrastive search compares hidden states of candidates", 0, 0.0),
    "low_memory": _unread("read by contrastive search"),
    "dola_layers": _refused("DoLa contrasts layers of the target"),
    # no options
    "transformers_version": _unread("metadata"),
}  # fmt: skip
"""By name, all of the installed transformers; a test compares."""


def refuse_options(value_of: Callable[[str], Any]) -> None:
    """Refuse what cannot be honoured.

    Args:
        value_of: an option's value by name, None where it is not set.

    Raises:
        RequestError: naming the option.
    """
    for name, option in GENERATION_OPTIONS.items():
        value = value_of(name)
        if option.status == "refused" and value not in option.neutral:
            allowed = ", ".join(map(repr, option.neutral))
            raise RequestError(
                f"generation_config.{name}", f"{value!r}: {option.note}", f"Allowed: {allowed}.",
                "Leave it out, or call generate() without a pipeline.",
            )  # fmt: skip
