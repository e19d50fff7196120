"""The text that drafters are trained on: windows of a corpus, and what the target itself writes after them."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from attrs.validators import deep_iterable, min_len
from transformers import DynamicCache, PreTrainedModel

from treegraft.errors import RequestError
from treegraft.kept import damaged
from treegraft.tree import Floats, Ints
from treegraft_plugins.hf.fingerprint import asked_otherwise, fingerprint, text_fingerprint
from treegraft_plugins.options import number, whole

Report = Callable[[str], None]
_PROMPTS = 'Allowed in JSON lines: objects with "turns", a list of strings.'


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
        RequestError: a path does not exist, nothing in it can be read as text, or a line of JSON is no prompt.
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
        lines = enumerate(text.split("\n"), 1)  # a string of JSON may hold what splitlines() splits at
        return [turn for at, line in lines if line.strip() for turn in _turns(line, f"{file}:{at}")]
    return [text] if text else []


def _turns(line: str, where: str) -> list[str]:
    try:
        turns = json.loads(line)["turns"]
    except json.JSONDecodeError as error:
        raise RequestError(where, f"not JSON ({error})", _PROMPTS) from error
    except (KeyError, TypeError) as error:
        raise RequestError(where, "no 'turns'", _PROMPTS) from error
    if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
        raise RequestError(where, f"turns {turns!r:.60}", _PROMPTS)
    return turns


def token_stream(texts: Iterable[str], tokenizer: Any) -> Ints:
    """int64 [T]: all texts one after another, each ended by the end-of-text token if there is one."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return np.array([token for text in texts for token in (*tokenizer.encode(text), *end)], dtype=np.int64)


def windows(stream: Ints, length: int, count: int, rng: np.random.Generator) -> Ints:
    """int64 [count, length]: windows of a stream that is as long as one at least, begun anywhere."""
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
    for turn, batch in enumerate(batches):
        rows, num_prompt = slice(batch.start, batch.stop), int(rng.integers(length // 8, length // 2 + 1))
        first[rows], temperature[rows] = num_prompt, temperatures[turn % len(temperatures)]
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

    Raises:
        RequestError: no window at all to train on.
    """

    length: int = attrs.field(default=256, validator=whole(32))
    num_windows: int = attrs.field(default=1024, validator=whole(0))
    num_continued: int = attrs.field(default=512, validator=whole(0))
    num_held_out: int = attrs.field(default=32, validator=whole(1))
    temperatures: tuple[float, ...] = attrs.field(
        default=(0.0, 0.8, 0.8, 0.8), validator=[min_len(1), deep_iterable(number(0.0))]
    )
    seed: int = attrs.field(default=0, validator=whole(0))

    def __attrs_post_init__(self) -> None:
        if not self.num_windows + self.num_continued:
            raise RequestError(
                "num_windows", "0, and num_continued 0: nothing to train on", "Allowed: at least 1 of either."
            )


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
        RequestError: `file` was made by another plan, of another text or for another target; or there is too little
            text, or some of it is held out and trained on.
    """
    _require_apart(texts, held_out)
    read = {"text": read_texts(texts), "held out": read_texts(held_out)}
    asked = {
        **attrs.asdict(plan),
        "target": fingerprint(model),
        **{name: text_fingerprint(read[name]) for name in read},
    }
    if file.exists():
        return _saved(file, asked)
    streams = {name: token_stream(read[name], tokenizer) for name in read}
    for name, stream in streams.items():
        if len(stream) < plan.length:
            raise RequestError(name, f"{len(stream)} tokens in all", f"Allowed: at least one window of {plan.length}.")
    stream, other = streams.values()
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
    partial = file.with_name(f"part-{file.name}")
    np.savez_compressed(
        partial, plan=json.dumps(asked), train=train.astype(np.int32), tokens=held.tokens.astype(np.int32),
        first=held.first, temperature=held.temperature,
    )  # fmt: skip
    partial.replace(file)
    return Text(train, held)


def _saved(file: Path, asked: Mapping[str, Any]) -> Text:
    with damaged(file), file.open("rb") as content, np.load(content) as saved:
        made = dict(json.loads(str(saved["plan"])))
        columns = {name: saved[name] for name in saved.files if name != "plan"}
    changed = asked_otherwise(made, asked)
    if changed:
        raise RequestError(
            str(file), f"text made otherwise ({'; '.join(changed.values())})", "Allowed: to go on with the same text.",
            "Repeat the command as it was, or name another folder.",
        )  # fmt: skip
    tokens, first = columns["tokens"].astype(np.int64), columns["first"].astype(np.int64)
    return Text(columns["train"].astype(np.int64), Continuations(tokens, first, columns["temperature"]))


def _require_apart(texts: Sequence[Path], held_out: Sequence[Path]) -> None:
    """Refuse held-out text that is, or holds, or lies in what is trained on."""
    for path in held_out:
        for other in texts:
            inner, outer = sorted((path.resolve(), other.resolve()), key=lambda each: len(each.parts), reverse=True)
            if inner.is_relative_to(outer):
                raise RequestError("held out", f"{path}, and {other} to train on", "Allowed: text of its own.")
