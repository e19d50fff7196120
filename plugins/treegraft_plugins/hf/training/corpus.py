"""The text that drafters are trained on: windows of a corpus, and what the target itself writes after them."""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from treegraft.errors import RequestError
from treegraft.tree import Floats, Ints
from treegraft_plugins.options import whole

Report = Callable[[str], None]


@attrs.frozen(eq=False)
class Continuations:
    """Texts that the target continued.

    Attributes:
        tokens: int64 [N, T].
        first: int64 [N], where each continuation begins.
        temperature: float64 [N], at which it was sampled.
    """

    tokens: Ints
    first: Ints
    temperature: Floats

    def at(self, temperature: float) -> "Continuations":
        """Those sampled at one temperature."""
        rows = self.temperature == temperature
        return Continuations(self.tokens[rows], self.first[rows], self.temperature[rows])


def read_texts(paths: Iterable[Path]) -> list[str]:
    """The texts under `paths`: files, folders of files, or prompts (JSON lines with `turns`).

    Raises:
        RequestError: a path does not exist, or nothing in it can be read as text.
    """
    texts = []
    for path in paths:
        files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
        found = [text for file in files for text in _texts_of(file)]
        if not found:
            raise RequestError(
                str(path), "no text", "Allowed: UTF-8 files, folders of them, or JSON lines with `turns`."
            )
        texts.extend(found)
    return texts


def _texts_of(file: Path) -> list[str]:
    if not file.is_file():
        return []
    try:
        text = file.read_text("utf-8")
    except UnicodeDecodeError:
        return []
    if file.suffix == ".jsonl":
        return [turn for line in text.splitlines() for turn in json.loads(line)["turns"]]
    return [text] if text else []


def token_stream(texts: Iterable[str], tokenizer: Any) -> Ints:
    """int64 [T]: all texts one after another, each ended by the end-of-text token if there is one."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return np.array([token for text in texts for token in (*tokenizer.encode(text), *end)], dtype=np.int64)


def windows(stream: Ints, length: int, count: int, rng: np.random.Generator) -> Ints:
    """int64 [count, length]: windows of the stream, begun anywhere.

    Raises:
        RequestError: the stream is shorter than a window.
    """
    if len(stream) < length:
        raise RequestError("text", f"{len(stream)} tokens", f"Allowed: at least one window of {length}.")
    starts = rng.integers(0, len(stream) - length + 1, count)
    return stream[starts[:, None] + np.arange(length)]


@torch.inference_mode()
def continued(
    model: PreTrainedModel,
    prompts: Ints,
    length: int,
    temperature: float,
    generator: torch.Generator,
) -> Ints:
    """int64 [N, length]: `prompts` [N, T] continued by the model's own samples; an end of text does not stop it."""
    ids = torch.from_numpy(prompts)
    pieces, cache = [ids], DynamicCache(config=model.config)
    device = model.get_input_embeddings().weight.device
    for _ in range(length - ids.shape[1]):
        logits = model(input_ids=ids.to(device), cache=cache, use_cache=True, logits_to_keep=1).logits[:, -1].float()
        if temperature:
            ids = torch.multinomial((logits / temperature).softmax(-1).cpu(), 1, generator=generator)
        else:
            ids = logits.argmax(-1, keepdim=True).cpu()
        pieces.append(ids)
    return torch.cat(pieces, dim=1).numpy()


def continuations(
    model: PreTrainedModel,
    stream: Ints,
    *,
    count: int,
    length: int,
    temperatures: Sequence[float],
    seed: int,
    report: Report,
    batch_size: int = 128,
) -> Continuations:
    """Beginnings from the stream, of an eighth to a half of a window, continued by the target.

    Temperatures take turns by batches, so that a larger share is given by naming one more than once.
    """
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    batches = [range(start, min(start + batch_size, count)) for start in range(0, count, batch_size)]
    tokens, first = np.zeros((count, length), np.int64), np.zeros(count, np.int64)
    temperature = np.zeros(count)
    for number, batch in enumerate(batches):
        rows, num_prompt = slice(batch.start, batch.stop), int(rng.integers(length // 8, length // 2 + 1))
        first[rows], temperature[rows] = num_prompt, temperatures[number % len(temperatures)]
        prompts = windows(stream, num_prompt, len(batch), rng)
        tokens[rows] = continued(model, prompts, length, temperature[batch.start], generator)
        report(f"{batch.stop}/{count} texts continued by the target")
    return Continuations(tokens, first, temperature)


@attrs.frozen(kw_only=True)
class TextPlan:
    """What text to train on, and what to hold out.

    Args:
        length: T, tokens of a window.
        num_windows: windows of the corpus.
        num_continued: windows that the target continues itself, at `temperatures` in turn.
        num_held_out: windows of the held-out corpus that the target continues, for each temperature.
        temperatures: of the continuations; name one more than once to give it a larger share.
        seed: of all choices.
    """

    length: int = attrs.field(default=256, validator=whole(32))
    num_windows: int = attrs.field(default=1024, validator=whole(0))
    num_continued: int = attrs.field(default=1024, validator=whole(0))
    num_held_out: int = attrs.field(default=64, validator=whole(1))
    temperatures: tuple[float, ...] = (0.0, 0.8, 0.8, 0.8)
    seed: int = attrs.field(default=0, validator=whole(0))


@attrs.frozen(eq=False)
class Text:
    """Windows to train on, int64 [N, T], and continuations to measure on."""

    train: Ints
    held_out: Continuations


def prepared(
    plan: TextPlan,
    model: PreTrainedModel,
    tokenizer: Any,
    *,
    texts: Sequence[Path],
    held_out: Sequence[Path],
    file: Path,
    report: Report,
) -> Text:
    """The text of a plan: read from `file` where it lies there already, else made and written there.

    Raises:
        RequestError: `file` was made by another plan.
    """
    described = json.dumps([attrs.asdict(plan), model.name_or_path, [str(path) for path in (*texts, *held_out)]])
    if file.exists():
        with np.load(file) as saved:
            if str(saved["plan"]) != described:
                raise RequestError(
                    str(file), "text made by another plan", "Allowed: to go on with the same text.",
                    "Repeat the command as it was, or name another folder.",
                )  # fmt: skip
            columns = (saved[name].astype(np.int64) for name in ("tokens", "first"))
            return Text(saved["train"].astype(np.int64), Continuations(*columns, saved["temperature"]))
    stream, other = (token_stream(read_texts(paths), tokenizer) for paths in (texts, held_out))
    report(f"{len(stream)} tokens of text, {len(other)} held out")
    each = {"length": plan.length, "seed": plan.seed, "report": report}
    held = continuations(
        model, other, count=plan.num_held_out * len(set(plan.temperatures)),
        temperatures=sorted(set(plan.temperatures)), batch_size=plan.num_held_out, **each,
    )  # fmt: skip
    own = continuations(model, stream, count=plan.num_continued, temperatures=plan.temperatures, **each)
    train = np.concatenate(
        [windows(stream, plan.length, plan.num_windows, np.random.default_rng(plan.seed)), own.tokens]
    )
    np.savez_compressed(
        file, plan=described, train=train.astype(np.int32), tokens=held.tokens.astype(np.int32), first=held.first,
        temperature=held.temperature,
    )  # fmt: skip
    return Text(train, held)
