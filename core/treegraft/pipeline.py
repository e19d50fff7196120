"""A composed pipeline: prompts in, the target's own text out."""

import threading
import time
import warnings
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import numpy as np
import torch

from treegraft.errors import ComposeError, DrafterWarning, PipelineBusyError, RequestError
from treegraft.interfaces import (
    BudgetPolicy,
    Pruner,
    RoundObserver,
    RoundRecord,
    Scheduler,
    Source,
    Statistics,
    TargetModel,
    Verifier,
    Wants,
)
from treegraft.round import Parts, Request, decode_round, narrowed
from treegraft.sampling import Draws, SamplingOptions, SamplingRules, Seed, SeededDraws, TokenSampler
from treegraft.statistics import AcceptanceStats, CostModel
from treegraft.tree import Ints

Prompt = str | Sequence[int] | torch.Tensor


@attrs.frozen
class Generation:
    """What a request brought, and how.

    Attributes:
        token_ids: the new tokens only.
        text: the new tokens decoded, or None without a tokenizer.
        finish_reason: "eos", "length", "context_limit" or "stop".
        num_rounds: decode rounds, each one target forward.
        rounds: the RoundRecords with `keep_rounds=True`, else None.
        emitted_per_round: mean tokens emitted a round: accepted + 1, save where the request ends inside a block.
        accepted_per_round: mean draft tokens kept a round.
        accepted_histogram: number of rounds by draft tokens kept.
        target_calls: tree forwards of the target, prefill not counted.
        source_calls: drafting steps by source.
        latency_ms: target, commit, prefill, sources {name: ms}, framework, total (ms).
        tokens_per_second: new tokens over the total time, prefill included; loading and cost warm-up not.
        seed: reproduces sampled output.
        lossless: whether the text has exactly the target's distribution.
        repeats_plain: whether sampled text is plain decoding's with the same seed, token for token.
        lossless_note: where rounding may tell it from plain decoding (half precision), else None.
        faults: {"source", "error"} of each drafter that failed and was left out.
        costs: the cost table in use at the end, as arguments of the cost model `fixed`.
    """

    token_ids: list[int]
    text: str | None
    finish_reason: str
    num_rounds: int
    rounds: tuple[RoundRecord, ...] | None
    emitted_per_round: float
    accepted_per_round: float
    accepted_histogram: dict[int, int]
    target_calls: int
    source_calls: dict[str, int]
    latency_ms: dict[str, Any]
    tokens_per_second: float
    seed: Seed | None
    lossless: bool
    repeats_plain: bool
    lossless_note: str | None
    faults: list[dict[str, str]]
    costs: dict[str, Any]


@attrs.define
class _Totals:
    """Sums over the rounds of a request."""

    num_rounds: int = 0
    histogram: dict[int, int] = attrs.field(factory=dict)
    source_calls: dict[str, int] = attrs.field(factory=dict)
    latency_ms: dict[str, float] = attrs.field(factory=lambda: {"target": 0.0, "commit": 0.0, "framework": 0.0})
    source_ms: dict[str, float] = attrs.field(factory=dict)

    def add(self, record: RoundRecord) -> None:
        accepted = len(record.verdict.path)
        self.num_rounds += 1
        self.histogram[accepted] = self.histogram.get(accepted, 0) + 1
        for step in record.state.steps:
            if len(step.positions):
                self.source_calls[step.source] = self.source_calls.get(step.source, 0) + 1
        for part in ("target", "commit"):
            self.latency_ms[part] += record.latency_ms[part]
        self.latency_ms["framework"] += record.framework_ms
        for name, ms in record.source_ms.items():
            self.source_ms[name] = self.source_ms.get(name, 0.0) + ms


_BUSY: "weakref.WeakKeyDictionary[TargetModel, threading.Lock]" = weakref.WeakKeyDictionary()


class Pipeline:
    """Drafters, scheduler and the rest around one target; made by `treegraft.load`.

    It serves any number of prompts, one at a time.

    Args:
        name: for messages.
        target: the model whose distribution the output has.
        sources: drafters and how they take part, by ascending index.
        scheduler, budget, pruner, verifier, costs: the other parts.
        steps: D, most drafting steps a round.
        calibration: put all sources' scores on one scale, learnt online.
        tokenizer: instead of the target's own.
        on_round: called with every finished RoundRecord.
        rebuild: makes another pipeline like this one on the same weights, for `clone`.

    Attributes:
        parts: what a round needs of it: the parts themselves, D, and what they want to know.

    Raises:
        ComposeError: the parts do not fit together.
    """

    def __init__(
        self,
        *,
        name: str,
        target: TargetModel,
        sources: Sequence[Source],
        scheduler: Scheduler,
        budget: BudgetPolicy,
        pruner: Pruner,
        verifier: Verifier,
        costs: CostModel,
        steps: int,
        calibration: bool = True,
        tokenizer: Any = None,
        on_round: RoundObserver | None = None,
        rebuild: "Callable[[], Pipeline] | None" = None,
    ):
        self.name, self.target, self.sources, self.costs = name, target, tuple(sources), costs
        self.calibration, self.on_round, self._rebuild = calibration, on_round, rebuild
        self.tokenizer = tokenizer if tokenizer is not None else target.tokenizer
        self._busy = _BUSY.setdefault(target, threading.Lock())  # pipelines may share a target object
        drafters = {source.name: _named(source.drafter) for source in self.sources}
        for place, *fault in biases(drafters, _named(budget), _named(verifier)):
            raise ComposeError(f"pipelines.{name}.{place}", *fault)
        for source in self.sources:
            source.drafter.bind(target)
            if source.edge_scorer is not None:
                source.edge_scorer.meet(target)
        wants = Wants(
            num_top=max((source.drafter.wants.num_top for source in self.sources), default=0),
            hidden_layers=tuple(sorted({i for source in self.sources for i in source.drafter.wants.hidden_layers})),
        )
        self.parts = Parts(target, scheduler, budget, pruner, verifier, steps, wants)
        costs.bind(target, self.sources)

    @property
    def lossless(self) -> bool:
        """Whether the output has exactly the target's distribution."""
        return self.parts.verifier.lossless

    @property
    def repeats_plain(self) -> bool:
        """Whether sampled text is plain decoding's with the same seed, token for token."""
        return self.parts.verifier.repeats_plain

    def generate(
        self,
        prompt: Prompt,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: Seed | None = None,
        stop: str | Sequence[str] | None = None,
        keep_rounds: bool = False,
    ) -> Generation:
        """Continue a prompt; greedy by default.

        Args:
            prompt: text, a list of token ids, or a tensor of them [N] or [1, N].
            max_new_tokens: most tokens to emit.
            temperature, top_p, top_k: as in transformers; 0.0 takes the arg-max.
            seed: an int or a pair; None draws a fresh one and reports it.
            stop: strings that end the text once they appear in it; they stay in the text.
            keep_rounds: keep every RoundRecord in the result.

        Raises:
            RequestError: a prompt or an option that cannot be honoured.
            PipelineBusyError: another call is under way.
        """
        kept: list[RoundRecord] | None = [] if keep_rounds else None
        return _exhaust(self.rounds(prompt, max_new_tokens, temperature, top_p, top_k, seed, stop), kept)

    def stream(self, prompt: Prompt, *args: Any, **options: Any) -> Generator[str, None, Generation]:
        """The text of `generate`, piece by piece as rounds finish; the generator's return value is the Generation.

        A piece never ends inside a character. Arguments are those of `generate`, without `keep_rounds`.
        """
        if self.tokenizer is None:
            raise RequestError("stream", "a pipeline without a tokenizer", None, "Pass load(..., tokenizer=...).")
        rounds = self.rounds(prompt, *args, **options)
        return self._pieces(rounds)

    def rounds(
        self,
        prompt: Prompt,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: Seed | None = None,
        stop: str | Sequence[str] | None = None,
    ) -> Generator[RoundRecord, None, Generation]:
        """The RoundRecords of `generate` as they finish; the generator's return value is the Generation."""
        if not isinstance(stop, str | Sequence | None):
            raise RequestError("stop", f"{stop!r}", "Allowed: a string, a list of strings, or None.")
        stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
        options = SamplingOptions(temperature, top_p, top_k, stops)
        draws = SeededDraws(seed)
        return self.run(self._sampler(prompt, draws, max_new_tokens, options), draws.seed)

    def decode(
        self, prompt: Prompt, draws: Draws, max_new_tokens: int, options: SamplingOptions | None = None
    ) -> Generation:
        """`generate` with its randomness given: what `treegraft.testing` enumerates."""
        return _exhaust(self.run(self._sampler(prompt, draws, max_new_tokens, options or SamplingOptions()), None))

    def __call__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        seed: Seed | None = None,
        **model_kwargs: Any,
    ) -> Any:
        """What transformers calls in `model.generate(..., custom_generate=pipeline, seed=...)`.

        `model` is the pipeline's own target. A streamer or stop strings go through `treegraft.generate`.

        Raises:
            RequestError: an option that cannot be honoured, by name, before anything is computed.
        """
        from treegraft_plugins.hf.generate import generate_rows  # transformers' part, where transformers asks for it

        return generate_rows(
            self, model, input_ids, logits_processor, stopping_criteria, generation_config, seed, **model_kwargs
        )

    def clone(self) -> "Pipeline":
        """Another pipeline on the same weights and tokenizer, with a state of its own: one for each thread.

        Nothing is loaded, checked or measured again. What this one has learnt about costs goes along as a copy.

        Raises:
            ComposeError: it holds an object of the caller's that cannot be cloned.
        """
        if self._rebuild is None:
            raise ComposeError(
                f"pipelines.{self.name}.clone", "a pipeline that was put together by hand",
                "Allowed: what treegraft.load returns.", "Put another one together.",
            )  # fmt: skip
        return self._rebuild()

    # -- requests in two steps ----------------------------------------------------------------------------------------

    def sampler(
        self, prompt: Prompt, rules: SamplingRules, draws: Draws, max_new_tokens: int, num_unseen: int = 0
    ) -> TokenSampler:
        """A request for `run`: the prompt and how the target chooses.

        Args:
            prompt: text, a list of token ids, or a tensor of them [N] or [1, N].
            rules: processors, criteria, EOS.
            draws: the randomness.
            max_new_tokens: most tokens to emit; the target's context may hold fewer.
            num_unseen: tokens before the prompt that only the target's cache knows.

        Raises:
            RequestError: a prompt that the target cannot take.
        """
        ids = self._token_ids(prompt)
        return TokenSampler(ids, rules, draws, *self._room(num_unseen + len(ids), max_new_tokens), num_unseen)

    def run(
        self, sampler: TokenSampler, seed: Seed | None, before_prefill: Callable[[], None] | None = None
    ) -> Generator[RoundRecord, None, Generation]:
        """The RoundRecords of a prepared request as they finish.

        Args:
            sampler: the request.
            seed: what the Generation reports.
            before_prefill: called once nobody else can be using the target.
        """
        begin = time.perf_counter()
        faults: list[dict[str, str]] = []
        with self.request(sampler, faults, before_prefill) as request:
            prefill_ms = (time.perf_counter() - begin) * 1e3
            totals = _Totals()
            while sampler.stop_reason is None:
                record = decode_round(self.parts, request)
                totals.add(record)
                if self.on_round is not None:
                    self.on_round(record)
                yield record
        return self._generation(sampler, totals, faults, seed, prefill_ms, begin)

    @contextmanager
    def request(
        self,
        sampler: TokenSampler,
        faults: list[dict[str, str]],
        before_prefill: Callable[[], None] | None = None,
    ) -> Iterator[Request]:
        """A prepared request under way: the target has taken the prompt in, the drafters have started.

        Args:
            sampler: the request.
            faults: takes {"source", "error"} of each drafter that fails.
            before_prefill: called once nobody else can be using the target.

        Raises:
            PipelineBusyError: another one is under way.
        """
        if not self._busy.acquire(blocking=False):
            raise PipelineBusyError(
                f"pipelines.{self.name}", "a second request while one is still under way",
                "A pipeline serves one request at a time.", "Finish or close the first, or clone the pipeline.",
            )  # fmt: skip
        try:
            if before_prefill is not None:
                before_prefill()
            request = self._begin(sampler, faults)
            try:
                yield request
            finally:
                self._stop_drafters(request)
        finally:
            self.target.reset()
            self.costs.save()
            self._busy.release()

    # -- internals ----------------------------------------------------------------------------------------------------

    def _begin(self, sampler: TokenSampler, faults: list[dict[str, str]]) -> Request:
        """Prefill the target and start every drafter."""

        def fault(request: Request, source: Source, error: Exception) -> None:
            message = f"{type(error).__name__}: {error}"
            faults.append({"source": source.name, "error": message})
            request.sources = {name: other for name, other in request.sources.items() if name != source.name}
            text = f"sources.{source.name}: its drafter failed and is left out for the rest of the request ({message})"
            warnings.warn(text, DrafterWarning, stacklevel=2)

        statistics = Statistics(self.costs, AcceptanceStats(len(self.sources), self.calibration))
        request = Request(
            sampler, self.target.vocab_size, statistics, {source.name: source for source in self.sources}, fault
        )
        if sampler.stop_reason is None:
            (seen,) = self.target.prefill([sampler.tokens], self.parts.wants)
            for source in self.sources:
                try:
                    source.drafter.start(narrowed(seen, self.parts.wants, source.drafter.wants))
                except Exception as error:
                    fault(request, source, error)
        return request

    def _stop_drafters(self, request: Request) -> None:
        """End the request for every drafter, those left out included."""
        for source in self.sources:
            try:
                source.drafter.stop()
            except Exception as error:
                if source.name in request.sources:  # else it is reported already
                    request.fault(request, source, error)

    def _sampler(self, prompt: Prompt, draws: Draws, max_new_tokens: int, options: SamplingOptions) -> TokenSampler:
        if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int | np.integer) or max_new_tokens < 0:
            raise RequestError("max_new_tokens", f"{max_new_tokens!r}", "Allowed: an int >= 0.")
        ids = self._token_ids(prompt)
        max_tokens, limit_reason = self._room(len(ids), max_new_tokens)
        rules = self.target.sampling_rules(ids, options, max_new_tokens)
        return TokenSampler(ids, rules, draws, max_tokens, limit_reason)

    def _room(self, num_tokens: int, max_new_tokens: int) -> tuple[int, str]:
        """Most tokens to emit after `num_tokens`, and what to report when they are used up."""
        if self.target.max_length is not None:
            room = self.target.max_length - num_tokens
            if room < 0:
                raise RequestError(
                    "prompt", f"{num_tokens} tokens",
                    f"The target's context holds {self.target.max_length}.", "Shorten the prompt.",
                )  # fmt: skip
            if room < max_new_tokens:
                return room, "context_limit"
        return max_new_tokens, "length"

    def _token_ids(self, prompt: Prompt) -> Ints:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError(
                    "prompt", "text, but the pipeline has no tokenizer",
                    "Allowed: token ids.", "Or pass load(..., tokenizer=...).",
                )  # fmt: skip
            ids = self.tokenizer(prompt)["input_ids"]
        elif isinstance(prompt, torch.Tensor):
            ids = prompt[0] if prompt.ndim == 2 and len(prompt) == 1 else prompt
            if ids.ndim != 1 or ids.is_floating_point() or ids.dtype == torch.bool:
                raise RequestError(
                    "prompt", f"a tensor of shape {tuple(prompt.shape)} and dtype {prompt.dtype}",
                    "Allowed: integer token ids [N] or [1, N].",
                )  # fmt: skip
            ids = ids.tolist()
        else:
            ids = prompt
        allowed = f"Allowed: at least one token id, each an int in [0, {self.target.vocab_size})."
        if not isinstance(ids, Sequence | np.ndarray) or isinstance(ids, bytes) or not len(ids):
            raise RequestError("prompt", "no tokens" if isinstance(ids, Sequence) else f"{prompt!r:.60}", allowed)
        for index, token in enumerate(ids):
            is_int = isinstance(token, int | np.integer) and not isinstance(token, bool)
            if not is_int or not 0 <= token < self.target.vocab_size:
                raise RequestError("prompt", f"{token!r} at index {index}", allowed)
        return np.array(ids, dtype=np.int64)

    def _pieces(self, rounds: Generator[RoundRecord, None, Generation]) -> Generator[str, None, Generation]:
        token_ids: list[int] = []
        shown = ""
        while True:
            try:
                token_ids.extend(next(rounds).tokens)
            except StopIteration as end:
                generation: Generation = end.value
                rest = (generation.text or "")[len(shown) :]
                if rest:
                    yield rest
                return generation
            text = self._text(token_ids)
            # An unfinished character decodes to U+FFFD, which must not be shown before it is known to be final.
            if not text.endswith("\ufffd") and text.startswith(shown) and len(text) > len(shown):
                piece, shown = text[len(shown) :], text
                yield piece

    def _text(self, token_ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        return text

    def _generation(
        self,
        sampler: TokenSampler,
        totals: _Totals,
        faults: list[dict[str, str]],
        seed: Seed | None,
        prefill_ms: float,
        begin: float,
    ) -> Generation:
        emitted = sampler.emitted
        text = None if self.tokenizer is None else self._text(emitted)
        total_ms = (time.perf_counter() - begin) * 1e3
        num_rounds = totals.num_rounds
        accepted = sum(kept * count for kept, count in totals.histogram.items())
        assert sampler.stop_reason is not None
        sources: Mapping[str, float] = {s.name: totals.source_ms.get(s.name, 0.0) for s in self.sources}
        return Generation(
            token_ids=emitted,
            text=text,
            finish_reason=sampler.stop_reason,
            num_rounds=num_rounds,
            rounds=None,
            emitted_per_round=len(emitted) / num_rounds if num_rounds else 0.0,
            accepted_per_round=accepted / num_rounds if num_rounds else 0.0,
            accepted_histogram=dict(sorted(totals.histogram.items())),
            target_calls=num_rounds,
            source_calls={s.name: totals.source_calls.get(s.name, 0) for s in self.sources},
            latency_ms={**totals.latency_ms, "prefill": prefill_ms, "sources": dict(sources), "total": total_ms},
            tokens_per_second=len(emitted) / total_ms * 1e3 if total_ms else 0.0,
            seed=seed,
            lossless=self.lossless,
            repeats_plain=self.repeats_plain,
            lossless_note=self.target.lossless_note,
            faults=faults,
            costs=self.costs.table(),
        )


Named = tuple[str, Any]
"""A part as messages call it, and its class or object."""


def biases(
    drafters: Mapping[str, Named], budget: Named | None, verifier: Named
) -> Iterator[tuple[str, str, str, str]]:  # fmt: skip
    """Why parts would not keep the target's distribution together: where, what is found, what is allowed, what to do.

    Args:
        drafters: by source; only what they declare is read.
        budget, verifier: likewise; a budget of None is not looked at.
    """
    accepted = verifier[1].accepts
    for name, (shown, drafter) in drafters.items():
        if drafter.proposals not in accepted:
            yield (
                f"sources.{name}.draft", f"{shown} makes {drafter.proposals} proposals, "
                f"for which the verifier {verifier[0]} would not keep the target's distribution.",
                f"It accepts: {', '.join(sorted(accepted))}.",
                "Take another drafter, or the verifier for it: match for deterministic ones, block for sampled chains.",
            )  # fmt: skip
    if not verifier[1].lossless:
        return
    drawn = [shown for shown, drafter in drafters.values() if drafter.proposals == "sampled"]
    if drawn and len(drafters) > 1:
        yield (
            "sources", f"{len(drafters)} of them, and {drawn[0]} makes sampled proposals.",
            "Allowed beside it: no other. A token that one draws and another chooses cannot be one node without bias.",
            "Take the others out, or a drafter that chooses.",
        )  # fmt: skip
    if drawn and budget is not None and not budget[1].verifies_all:
        yield (
            "budget", f"{budget[0]} leaves out nodes by their scores, and {drawn[0]} makes sampled proposals.",
            "Allowed for them: budgets that verify all that was drawn. To choose among it would bias the text.",
            "Take budget={use: fixed}.",
        )  # fmt: skip


def _named(part: Any) -> Named:
    return type(part).__name__, part


def _exhaust(rounds: Generator[RoundRecord, None, Generation], kept: list[RoundRecord] | None = None) -> Generation:
    """Run a request to its end; with a list, keep its rounds."""
    while True:
        try:
            record = next(rounds)
        except StopIteration as end:
            generation: Generation = end.value
            return generation if kept is None else attrs.evolve(generation, rounds=tuple(kept))
        if kept is not None:
            kept.append(record)
