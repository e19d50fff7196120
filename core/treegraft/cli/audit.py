"""`treegraft audit`: which tokens of an output the target, in float32, would not have chosen, and by how much."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import click
import numpy as np
from click.core import ParameterSource

from treegraft.audit import audit as differences_of
from treegraft.cli.differences import Report
from treegraft.cli.embedded import spare_threads
from treegraft.cli.options import Finite, pipeline_options, resolve_options
from treegraft.cli.quiet import quiet
from treegraft.cli.report import RECORDED
from treegraft.cli.run import (
    chat_prompt,
    check_sampling,
    prompt_options,
    read_prompt,
    read_text,
    sampling_options,
    template_arguments,
    with_defaults,
)
from treegraft.compose import ResolvedPipeline, build
from treegraft.errors import RequestError
from treegraft.interfaces import ModelSpec, TargetModel
from treegraft.pipeline import Pipeline
from treegraft.sampling import SamplingOptions, Seed, SeededDraws
from treegraft.tree import Ints

TOLERANCE = 1e-3
# A step of bfloat16 is 0.25 at logits from 32 on, where large models have them, and sums inside round as well.
HALF_PRECISION_TOLERANCE = 0.5  # at temperature 1; logits are divided by it, and their errors with them


@attrs.frozen
class Output:
    """What is audited.

    Attributes:
        token_ids: the new tokens.
        seed: of the request, or None.
        rounded: whether it was decoded in half precision.
        sampling: the options it was decoded under, as far as the file says.
        repeats_plain: whether sampled text is its seed's at every position; None where the file does not say.
    """

    token_ids: list[int]
    seed: Seed | None
    rounded: bool
    sampling: Mapping[str, Any] = attrs.field(factory=dict)
    repeats_plain: bool | None = None


@click.command()
@pipeline_options
@prompt_options
@click.option(
    "--json-file", metavar="FILE", help="Audit what `run --json` printed for this prompt; - is the standard input."
)
@sampling_options
@click.option("--dtype", help="To generate in; the audit itself is in float32 (or float64, where a model says so).")
@click.option("--device", help="Of every model that does not say its own: cpu, cuda, cuda:1, ...")
@click.option(
    "--tolerance", type=Finite(min=0.0), metavar="GAP",
    help=f"Largest gap to put down to rounding.  [default: {TOLERANCE}; for text decoded in half precision "
    f"{HALF_PRECISION_TOLERANCE}, over the temperature if sampled]",
)  # fmt: skip
@click.option("--json", "json_wanted", is_flag=True, help="One JSON object on stdout, and nothing else.")
@click.pass_context
def audit(
    ctx: click.Context,
    /,
    pipeline: str,
    overrides: Sequence[str],
    registry: Path | None,
    modules: Sequence[str],
    prompt: str | None,
    prompt_file: str | None,
    chat: bool,
    system: str | None,
    template: Sequence[str],
    json_file: str | None,
    dtype: str | None,
    device: str | None,
    tolerance: float | None,
    json_wanted: bool,
    **sampling: Any,
) -> None:
    """Tell rounding from a fault: list the tokens that the target, in float32, would not have chosen.

    Continues the prompt with PIPELINE, or takes the output of `run --json`, and reads the text through the target once
    more in plain float32 forwards. Ends with 1 if a token is further from being chosen than the tolerance.
    """
    if not chat and (system is not None or template):
        raise click.UsageError("--system and --template need --chat.")
    if json_file == prompt_file == "-":
        raise click.UsageError("--prompt-file and --json-file cannot both be the standard input.")
    arguments = template_arguments(template)
    check_sampling(sampling)
    text = read_prompt(prompt, prompt_file)
    output = None if json_file is None else read_output(json_file)
    if output is not None:
        names = ("temperature", "top_p", "top_k")
        if all(ctx.get_parameter_source(name) is ParameterSource.DEFAULT for name in names):
            sampling |= output.sampling
            check_sampling(sampling)

    def token_ids(tokenizer: Any) -> Ints:
        ids = chat_prompt(tokenizer, text, system, arguments) if chat else text_prompt(tokenizer, text)
        return np.array(ids, dtype=np.int64)

    with quiet():
        resolved = with_defaults(resolve_options(pipeline, overrides, registry, modules), dtype, device)
        spare_threads(resolved.models)
        check_auditable(resolved, output, sampling["temperature"])
        if output is None:
            target, output = generated(build(resolved), token_ids, sampling)
        else:
            target = precise_target(resolved)
        if output.rounded and target.lossless_note is not None:
            del target  # room for the larger one
            target = precise_target(resolved)
        report = compare(target, token_ids(target.tokenizer), output, sampling, tolerance)
    click.echo(report.as_json() if json_wanted else report.as_text())
    ctx.exit(0 if report.passed else 1)


def check_auditable(resolved: ResolvedPipeline, output: Output | None, temperature: float) -> None:
    """Refuse sampled text that is not its seed's at every position, by what the output says, else by the pipeline.

    Raises:
        RequestError: a verifier that draws for itself made it, or would.
    """
    said = None if output is None else output.repeats_plain
    if temperature == 0 or (resolved.repeats_plain if said is None else said):
        return
    where = f"pipelines.{resolved.name}.verifier: {resolved.parts['verifier'].use}" if said is None else "--json-file"
    raise RequestError(
        where, "sampled text that is not plain decoding's with the same seed",
        "Audited draw by draw is what a pipeline samples that verifies by match.",
        "Audit at temperature 0, or sample with such a pipeline.",
    )  # fmt: skip


def read_output(file: str) -> Output:
    """What `run --json` printed, or any JSON object with `token_ids` and, for sampled text, `seed`.

    Raises:
        RequestError: it is no such object.
    """
    allowed = "Allowed: the object that `treegraft run --json` prints; token_ids is needed, a list of int."
    try:
        content = json.loads(read_text("--json-file", file))
    except json.JSONDecodeError as error:
        raise RequestError(f"--json-file {file}", f"not JSON ({error})", allowed) from error
    ids = content.get("token_ids") if isinstance(content, dict) else None
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise RequestError(f"--json-file {file}", "no list of token_ids", allowed)
    seed = content.get("seed")
    seed = tuple(seed) if isinstance(seed, list) else seed
    try:
        SeededDraws(seed)
    except RequestError as error:
        raise RequestError(f"--json-file {file}", f"seed {error.found}", error.allowed) from error
    recorded = content.get("sampling", {})
    if not isinstance(recorded, dict) or not set(recorded) <= set(RECORDED):
        raise RequestError(f"--json-file {file}", f"sampling {recorded!r:.60}", f"Keys: {', '.join(RECORDED)}.")
    repeats_plain = content.get("repeats_plain")
    if not isinstance(repeats_plain, bool | None):
        raise RequestError(f"--json-file {file}", f"repeats_plain {repeats_plain!r:.60}", "Allowed: true or false.")
    return Output(ids, seed, content.get("lossless_note") is not None, recorded, repeats_plain)


def generated(
    pipeline: Pipeline, prompt: Callable[[Any], Ints], sampling: Mapping[str, Any]
) -> tuple[TargetModel, Output]:
    """Generate, and keep no more of the pipeline than its target."""
    generation = pipeline.generate(prompt(pipeline.target.tokenizer).tolist(), **sampling)
    return pipeline.target, Output(generation.token_ids, generation.seed, generation.lossless_note is not None)


def precise_target(resolved: ResolvedPipeline) -> TargetModel:
    """The pipeline's target in float32, or in float64 where its model says so; nothing else is loaded."""

    def precise(model: Any) -> Any:
        keep = not isinstance(model, ModelSpec) or model.dtype == "float64"
        return model if keep else attrs.evolve(model, dtype="float32")

    models = {name: precise(model) for name, model in resolved.models.items()}
    target: TargetModel = resolved.parts["target"].make(models)
    return target


def compare(
    target: TargetModel, prompt: Ints, output: Output, sampling: Mapping[str, Any], tolerance: float | None
) -> Report:
    """The audit itself, under the request's own processors.

    Raises:
        RequestError: sampled text without its seed.
    """
    options = SamplingOptions(sampling["temperature"], sampling["top_p"], sampling["top_k"])
    rules = target.sampling_rules(prompt, options, sampling["max_new_tokens"])
    seed = output.seed if sampling["seed"] is None else sampling["seed"]
    if seed is None and not rules.greedy:
        raise RequestError("--seed", "none, and none in the file", "Sampled text is audited draw by draw.", "Name it.")
    if tolerance is None:
        tolerance = HALF_PRECISION_TOLERANCE / (options.temperature or 1.0) if output.rounded else TOLERANCE
    found = differences_of(target, prompt, output.token_ids, rules, seed)
    return Report(output.token_ids, found, tolerance, not rules.greedy, target.tokenizer)


def text_prompt(tokenizer: Any, text: str) -> list[int]:
    """Token ids of `text`, as `Pipeline.generate` reads it."""
    if tokenizer is None:
        raise RequestError("--prompt", "the target has no tokenizer to read text with", "Allowed: one that has.")
    ids: list[int] = tokenizer(text)["input_ids"]
    return ids
