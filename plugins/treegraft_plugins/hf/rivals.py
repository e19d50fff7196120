"""transformers' own `generate` as arms of a benchmark, on the model object that our arms decode with."""

import hashlib
import json
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

import torch
from transformers import MaxLengthCriteria, PreTrainedModel

from treegraft.bench.arms import Answer, Arm, Request, Timed, Told, request_settings
from treegraft.bench.records import Round
from treegraft.errors import ModelError
from treegraft.interfaces import TargetModel
from treegraft_plugins.hf.dflash.drafter import DFlashDrafter
from treegraft_plugins.hf.dflash.model import as_assistant
from treegraft_plugins.hf.loading import load_causal_lm
from treegraft_plugins.hf.rules import split_rules
from treegraft_plugins.hf.target import HFCausalLMTarget

LONGEST = 64  # draft length that is tried


class PlainGenerate(Arm):
    """`model.generate(ids, max_new_tokens=...)`, sampling through the warpers that our arms sample through.

    It cannot take our draws: above temperature 0 torch is seeded for every (seed, prompt), inside `fork_rng`.
    """

    name = "hf_plain"
    drafts = False
    source = ""

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.device = model.get_input_embeddings().weight.device

    # -- what a subclass adds -----------------------------------------------------------------------------------------

    def drafting(self, request: Request) -> dict[str, Any]:
        """Further arguments of `generate`."""
        return {}

    @contextmanager
    def drafter(self, request: Request) -> Iterator[None]:
        """While entered, the settings that are not arguments are in force."""
        yield

    def read_back(self, config: Any) -> dict[str, Any]:
        """Further settings, from the configuration that `generate` would run with."""
        return {}

    # -- an arm -------------------------------------------------------------------------------------------------------

    def settings(self) -> dict[str, Any]:
        dtype = str(self.model.dtype).removeprefix("torch.")
        return {"model": type(self.model).__name__, "dtype": dtype, "device": str(self.device)}

    def run(self, prompt: Sequence[int], request: Request) -> Answer:
        ids = torch.tensor([list(prompt)], device=self.device)
        arguments = self._arguments(ids, request)
        with ExitStack() as stack:
            if request.temperature > 0:
                devices = [] if self.device.type == "cpu" else [self.device]
                stack.enter_context(torch.random.fork_rng(devices, device_type=_forked(self.device)))
                torch.manual_seed(torch_seed(request))
            stack.enter_context(self.drafter(request))
            watch = stack.enter_context(_Watch(self.model, self.assistant, len(prompt)).watching())
            streamer = {} if not self.drafts else {"streamer": watch}
            output = self.model.generate(**arguments, **self.drafting(request), **streamer)
            new = output[0, len(prompt) :].tolist()

        def tell() -> Told:
            rounds = watch.rounds(self.source, len(new))
            return Told(
                settings=self._prepared(ids, request),
                prefill_ms=round(watch.prefill_ms, 4),
                num_prefill_tokens=1 if not rounds else rounds[0].emitted,
                rounds=rounds,
                num_copied=sum(each.accepted for each in rounds) if self.source == "lookup" else 0,
                by_depth=_by_depth(rounds),
            )

        return Answer(new, tell)

    @property
    def assistant(self) -> PreTrainedModel | None:
        """The model that drafts, if one does."""
        return None

    def _arguments(self, ids: torch.Tensor, request: Request) -> dict[str, Any]:
        config = self.model.generation_config
        sampled = {"temperature": request.temperature, "top_k": 0, "top_p": 1.0} if request.temperature > 0 else {}
        pad = config.pad_token_id
        if pad is None and config.eos_token_id is not None:
            pad = config.eos_token_id if isinstance(config.eos_token_id, int) else config.eos_token_id[0]
        return {
            "inputs": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": request.max_new_tokens,
            "do_sample": request.temperature > 0, "pad_token_id": pad, **sampled,
        }  # fmt: skip

    def _prepared(self, ids: torch.Tensor, request: Request) -> dict[str, Any]:
        """What `generate` makes of these arguments, handed out before it decodes."""
        built: dict[str, Any] = {}

        def capture(_model: PreTrainedModel, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            built.update(kwargs)
            return input_ids

        options = {name: value for name, value in self.drafting(request).items() if name != "assistant_model"}
        with warnings.catch_warnings(), self.drafter(request):
            warnings.simplefilter("ignore")
            self.model.generate(**self._arguments(ids, request), **options, custom_generate=capture)
            further = self.read_back(built["generation_config"])
        lengths = [each.max_length for each in built["stopping_criteria"] if type(each) is MaxLengthCriteria]
        rules = split_rules(
            built["logits_processor"], built["stopping_criteria"], greedy=not built["generation_config"].do_sample
        )
        return {"max_new_tokens": min(lengths) - ids.shape[1], **request_settings(rules), **further}


class SearchedGenerate(PlainGenerate):
    """`generate` with drafting, whose draft length is searched at the start, for each temperature."""

    drafts = True
    setting: ClassVar[str]
    grid: ClassVar[tuple[int, ...]]

    def __init__(self, model: PreTrainedModel):
        super().__init__(model)
        self._chosen: dict[str, int] = {}

    def length(self, request: Request) -> int:
        """The draft length at this temperature; the grid's first where none was searched."""
        return self._chosen.get(str(request.temperature), self.grid[0])

    def tune(self, prompts: Sequence[Sequence[int]], requests: Sequence[Request], timed: Timed) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for request in requests:
            self._try(request, self.grid[0])
            timed(prompts[0], request)  # the first request of all is no measure
            totals: dict[int, float] = {}
            lengths = self.grid
            while lengths:
                totals |= dict.fromkeys(lengths, 0.0)
                for ids in prompts:
                    for length in lengths:
                        self._try(request, length)
                        totals[length] += timed(ids, request)
                best = max(totals, key=lambda length: totals[length])
                # The longest so far may be too short still.
                lengths = (2 * best,) if best == max(totals) and 2 * best <= LONGEST else ()
            rates = {str(length): round(total / len(prompts), 3) for length, total in totals.items()}
            found[str(request.temperature)] = {
                "setting": self.setting, "chosen": best, "tokens_per_second": rates,
                "num_prompts": len(prompts), "max_new_tokens": request.max_new_tokens,
            }  # fmt: skip
        return found

    def choose(self, found: Mapping[str, Any]) -> None:
        self._chosen = {temperature: each["chosen"] for temperature, each in found.items()}

    def _try(self, request: Request, length: int) -> None:
        self._chosen[str(request.temperature)] = length


class PromptLookupGenerate(SearchedGenerate):
    """`generate(prompt_lookup_num_tokens=n)`: copies what followed the last two tokens, or the last, before."""

    name, source = "hf_prompt_lookup", "lookup"
    setting, grid = "prompt_lookup_num_tokens", (3, 5, 10, 20)

    def drafting(self, request: Request) -> dict[str, Any]:
        return {"prompt_lookup_num_tokens": self.length(request)}

    def read_back(self, config: Any) -> dict[str, Any]:
        return {
            "prompt_lookup_num_tokens": config.prompt_lookup_num_tokens,
            "max_matching_ngram_size": config.max_matching_ngram_size or 2,
        }


class _WithAssistant(PlainGenerate):
    """Drafts with a model."""

    def __init__(self, model: PreTrainedModel, assistant: PreTrainedModel):
        super().__init__(model)
        self._assistant = assistant

    @property
    def assistant(self) -> PreTrainedModel:
        return self._assistant


class AssistedGenerate(_WithAssistant, SearchedGenerate):
    """`generate(assistant_model=middle)`, on a constant schedule; its confidence threshold stays transformers' own."""

    name, source = "hf_assisted", "assistant"
    setting, grid = "num_assistant_tokens", (2, 3, 5, 8)

    def drafting(self, request: Request) -> dict[str, Any]:
        return {"assistant_model": self._assistant}

    @contextmanager
    def drafter(self, request: Request) -> Iterator[None]:
        # They are no arguments of `generate`, and the model is also our own arms': nothing of it stays changed.
        config = self._assistant.generation_config
        kept = config.num_assistant_tokens, config.num_assistant_tokens_schedule
        config.num_assistant_tokens, config.num_assistant_tokens_schedule = self.length(request), "constant"
        try:
            yield
        finally:
            config.num_assistant_tokens, config.num_assistant_tokens_schedule = kept

    def read_back(self, config: Any) -> dict[str, Any]:
        own = self._assistant.generation_config
        names = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")
        return {name: getattr(own, name) for name in names}


class BlockGenerate(_WithAssistant):
    """`generate(assistant_model=..., speculation_type="dflash")`: chains as long as the checkpoint's blocks.

    Above temperature 0 it samples them from the block's marginals, as transformers does.
    """

    name, source = "hf_dflash", "assistant"
    drafts = True

    def drafting(self, request: Request) -> dict[str, Any]:
        return {"assistant_model": self._assistant, "speculation_type": "dflash"}

    def read_back(self, config: Any) -> dict[str, Any]:
        return {"speculation_type": config.speculation_type, "block_size": self._assistant.config.block_size}


class _Watch:
    """Counts what a call of `generate` does, by what is public: forward hooks and a streamer.

    Args:
        model: the target.
        assistant: the model that drafts, or None.
        num_prompt: tokens of the prompt.
    """

    def __init__(self, model: PreTrainedModel, assistant: PreTrainedModel | None, num_prompt: int):
        self._model, self._assistant, self._num_prompt = model, assistant, num_prompt
        self._begin = time.perf_counter()
        self.prefill_ms = 0.0
        self._num_rows: list[int] = []  # of each forward of the target
        self._num_calls: list[int] = [0]  # of the assistant before each
        self._num_emitted: list[int] = []

    @contextmanager
    def watching(self) -> Iterator["_Watch"]:
        hooks = [
            self._model.register_forward_pre_hook(self._before, with_kwargs=True),
            self._model.register_forward_hook(self._after),
        ]
        if self._assistant is not None:
            hooks.append(self._assistant.register_forward_pre_hook(self._drafted))
        try:
            yield self
        finally:
            for hook in hooks:
                hook.remove()

    def _before(self, _model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        self._num_rows.append(0 if ids is None else ids.shape[1])
        self._num_calls.append(0)

    def _after(self, _model: Any, _args: Any, output: Any) -> None:
        if len(self._num_rows) == 1:
            if output.logits.device.type != "cpu":
                torch.accelerator.synchronize(output.logits.device)
            self.prefill_ms = (time.perf_counter() - self._begin) * 1e3

    def _drafted(self, _model: Any, _args: Any) -> None:
        self._num_calls[-1] += 1

    def put(self, value: torch.Tensor) -> None:
        """transformers hands over the prompt, then what each round emits."""
        self._num_emitted.append(value.numel())

    def end(self) -> None:
        """transformers says that the text is over."""

    def rounds(self, source: str, num_new: int) -> list[Round]:
        """A round for each forward of the target."""
        if not source:  # a token a forward; an accelerator may run one or two beyond EOS before that is known
            return [Round(1, 0, 0, 0, 0) for _ in range(num_new)]
        rounds = []
        for index, emitted in enumerate(self._num_emitted[1:]):
            candidates = self._num_rows[index] - (self._num_prompt if index == 0 else 1)
            accepted = min(emitted - 1, candidates)
            rounds.append(
                Round(
                    emitted=emitted, accepted=accepted, verified=candidates, drafted=candidates, followed=accepted,
                    accepted_by_source={source: accepted} if accepted else {},
                    source_calls={source: self._num_calls[index] if self._assistant is not None else 1},
                )
            )  # fmt: skip
        return rounds


def _by_depth(rounds: Sequence[Round]) -> list[list[int]]:
    """Of chains: a depth is reached where all before it were accepted."""
    deepest = max((min(each.verified, each.accepted + 1) for each in rounds), default=0)
    return [
        [
            sum(depth <= min(each.verified, each.accepted + 1) for each in rounds),
            sum(depth <= each.accepted for each in rounds),
        ]
        for depth in range(1, deepest + 1)
    ]


def torch_seed(request: Request) -> int:
    """torch's seed for a request: another one for each prompt and repeat, the same in every run."""
    digest = hashlib.sha256(json.dumps([request.seed, request.prompt_id]).encode()).digest()
    return int.from_bytes(digest[:6], "big")


def _forked(device: torch.device) -> str:
    return "cuda" if device.type == "cpu" else device.type


def rival(name: str, target: TargetModel, models: Mapping[str, Any]) -> Arm:
    """One of transformers' arms.

    Args:
        name: `hf_plain`, `hf_prompt_lookup`, `hf_assisted` or `hf_dflash`.
        target: whose model is decoded with.
        models: with `middle` or `dflash`, the assistant.

    Raises:
        ModelError: the target is no transformers model, or the block drafter was made for another one.
    """
    if not isinstance(target, HFCausalLMTarget):
        raise ModelError(name, f"a target of class {type(target).__name__}", "Allowed: hf_causal_lm.")
    if name == "hf_assisted":
        return AssistedGenerate(target.model, load_causal_lm(models["middle"])[0])
    if name == "hf_dflash":
        drafter = DFlashDrafter(models["dflash"])
        drafter.bind(target)
        return BlockGenerate(target.model, as_assistant(drafter.network))
    return {"hf_plain": PlainGenerate, "hf_prompt_lookup": PromptLookupGenerate}[name](target.model)
