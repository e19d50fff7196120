"""`treegraft run`: continue a prompt with a pipeline."""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import attrs
import click
from omegaconf import OmegaConf

from treegraft.cli.embedded import spare_threads
from treegraft.cli.options import pipeline_options, resolve_options
from treegraft.cli.quiet import quiet
from treegraft.cli.report import as_json, summary
from treegraft.compose import ResolvedPipeline, build
from treegraft.errors import RequestError
from treegraft.interfaces import ModelSpec
from treegraft.pipeline import Generation, Pipeline, Prompt
from treegraft.registry import one_line
from treegraft.sampling import SamplingOptions, SeededDraws

Command = Callable[..., Any]


def prompt_options(command: Command) -> Command:
    """Adds what the prompt is made from."""
    decorators = (
        click.option("--prompt", metavar="TEXT", help="The text to continue."),
        click.option("--prompt-file", metavar="FILE", help="Read it from a UTF-8 file; - is the standard input."),
        click.option("--chat", is_flag=True, help="Put the prompt as a user's message into the chat template."),
        click.option("--system", metavar="TEXT", help="With --chat: a system message before it."),
        click.option(
            "--template", multiple=True, metavar="KEY=VALUE",
            help="With --chat: an argument of the template, such as enable_thinking=false; may be repeated.",
        ),
    )  # fmt: skip
    for decorator in reversed(decorators):
        command = decorator(command)
    return command


def sampling_options(command: Command) -> Command:
    """Adds what `Pipeline.generate` takes, by the same names."""
    decorators = (
        click.option(
            "--max-new-tokens", type=click.IntRange(min=0), default=256, show_default=True, help="Most tokens to emit."
        ),
        click.option(
            "--temperature", type=float, default=0.0, show_default=True, help="0 takes the most probable token."
        ),
        click.option("--top-p", type=float, default=1.0, show_default=True, help="Keep this much probability mass."),
        click.option("--top-k", type=int, default=0, show_default=True, help="Keep the k best tokens; 0 keeps all."),
        click.option("--seed", type=int, help="Makes sampled text repeatable.  [default: a fresh one, reported]"),
        click.option(
            "--stop", multiple=True, metavar="TEXT", help="End once this appears in the text; may be repeated."
        ),
    )
    for decorator in reversed(decorators):
        command = decorator(command)
    return command


@click.command()
@pipeline_options
@prompt_options
@sampling_options
@click.option("--dtype", help="Of every model that does not say its own: float32, bfloat16, ...")
@click.option("--device", help="Of every model that does not say its own: cpu, cuda, cuda:1, ...")
@click.option("--json", "json_wanted", is_flag=True, help="One JSON object on stdout, and nothing else.")
def run(
    pipeline: str,
    overrides: Sequence[str],
    registry: Path | None,
    modules: Sequence[str],
    prompt: str | None,
    prompt_file: str | None,
    chat: bool,
    system: str | None,
    template: Sequence[str],
    dtype: str | None,
    device: str | None,
    json_wanted: bool,
    **sampling: Any,
) -> None:
    """Continue a prompt with PIPELINE.

    The text goes to stdout as it comes, statistics go to stderr.

    KEY=VALUE changes a part of the pipeline (steps=3, sources.middle.width=4) or a model (models.target=PATH).
    """
    if not chat and (system is not None or template):
        raise click.UsageError("--system and --template need --chat.")
    arguments = template_arguments(template)
    check_sampling(sampling)
    text = read_prompt(prompt, prompt_file)
    with quiet():
        resolved = with_defaults(resolve_options(pipeline, overrides, registry, modules), dtype, device)
        spare_threads(resolved.models)
        built = build(resolved)
        question = chat_prompt(built.tokenizer, text, system, arguments) if chat else text
        if json_wanted:
            generation = built.generate(question, **sampling)
            click.echo(as_json(generation, sampling))
        else:
            generation = write_text(built, question, sampling)
    if not json_wanted:
        click.echo(summary(generation, sampled=sampling["temperature"] > 0), err=True)


def check_sampling(sampling: Mapping[str, Any]) -> None:
    """Refuse what generating would refuse, before models are loaded for it.

    Raises:
        RequestError: an option that cannot be honoured.
    """
    SamplingOptions(sampling["temperature"], sampling["top_p"], sampling["top_k"], sampling["stop"])
    SeededDraws(sampling["seed"])


def read_prompt(prompt: str | None, file: str | None) -> str:
    """The prompt's text: as given, of a UTF-8 file, or of stdin for "-".

    Raises:
        click.UsageError: both, or neither.
        RequestError: the file cannot be read, or the text is not UTF-8.
    """
    if (prompt is None) == (file is None):
        raise click.UsageError("Give exactly one of --prompt and --prompt-file.")
    if file is None:
        return checked_text("--prompt", prompt or "")
    return read_text("--prompt-file", file)


def checked_text(option: str, text: str) -> str:
    """A text of the command line, in which Python keeps bytes that are not UTF-8 as something no tokenizer takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(option, f"not UTF-8 (at character {error.start})", "Allowed: text in UTF-8.") from error
    return text


def read_text(option: str, file: str) -> str:
    """The text of a UTF-8 file that `option` names, or of stdin for "-".

    Raises:
        RequestError: it cannot be read.
    """
    try:
        content = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        return content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        found = f"not UTF-8 (at byte {error.start})" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise RequestError(
            f"{option} {file}", found or type(error).__name__,
            "Allowed: a text file in UTF-8, or - for the standard input.",
        ) from error  # fmt: skip


def template_arguments(texts: Sequence[str]) -> dict[str, Any]:
    """`KEY=VALUE` texts as arguments of a chat template, values read as YAML: `enable_thinking=false`."""
    for text in texts:
        if not all(text.partition("=")[:2]):
            raise click.UsageError(f"--template {text}: not KEY=VALUE.")
    try:
        arguments: dict[str, Any] = OmegaConf.to_container(OmegaConf.from_dotlist(list(texts)))  # type: ignore[assignment]
    except Exception as error:  # YAML's own
        raise click.UsageError(f"--template: a value that is no YAML ({one_line(error)}).") from error
    return arguments


def chat_prompt(tokenizer: Any, text: str, system: str | None, arguments: Mapping[str, Any]) -> list[int]:
    """Token ids of `text` as the user's message and of the reply's beginning, by the tokenizer's chat template.

    Raises:
        RequestError: there is no chat template, it does not read one of `arguments`, or it refuses the messages.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise RequestError(
            "--chat", "the target's tokenizer has no chat template", "Allowed: the tokenizer of a chat model.",
            "Leave --chat out to have the text continued as it is.",
        )  # fmt: skip
    template = tokenizer.get_chat_template()
    for name in arguments:
        if name not in template:
            raise RequestError(f"--template {name}", "the chat template does not read it", "Allowed: what it reads.")
    messages = [] if system is None else [{"role": "system", "content": checked_text("--system", system)}]
    messages.append({"role": "user", "content": text})
    try:
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **arguments)
    except Exception as error:  # a template can raise anything, and some refuse a system message
        raise RequestError("--chat", f"the chat template refused ({error})", "Allowed: what it accepts.") from error
    ids: list[int] = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    return ids


def with_defaults(resolved: ResolvedPipeline, dtype: str | None, device: str | None) -> ResolvedPipeline:
    """The same pipeline, its models taking dtype and device from here where they do not say their own."""

    def filled(model: Any) -> Any:
        if not isinstance(model, ModelSpec):
            return model
        if dtype is not None and model.dtype == "auto":
            model = attrs.evolve(model, dtype=dtype)
        if device is not None and model.device == "auto" and model.device_map is None:
            model = attrs.evolve(model, device=device)
        return model

    return attrs.evolve(resolved, models={name: filled(model) for name, model in resolved.models.items()})


def write_text(pipeline: Pipeline, prompt: Prompt, sampling: Mapping[str, Any]) -> Generation:
    """Write the text to stdout as it comes."""
    with closing(pipeline.stream(prompt, **sampling)) as pieces:
        while True:
            try:
                click.echo(next(pieces), nl=False)
            except StopIteration as end:
                click.echo()
                generation: Generation = end.value
                return generation
