"""registry.yaml -> Pipeline, in two stages.

`resolve` finds out what a pipeline is (classes, arguments, who offers them, all that is wrong) and loads no model;
`build` loads and connects. `load` is both.
"""

import contextlib
import hashlib
import inspect
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs

from treegraft.errors import ComposeError, Faults, ModelError, TreeGraftError, suggest
from treegraft.interfaces import Drafter, ModelSpec, Setting, Source, SourceSetting, TargetModel
from treegraft.pipeline import Pipeline, biases
from treegraft.plugins import KINDS, Plugins, Provider, installed_plugins, load_plugins, plural
from treegraft.registry import Config, Overrides, Registry, lay_over
from treegraft.schema import PipelineSchema, SourceSchema, model_spec, typed
from treegraft.statistics import CostModel

DEMO = "demo:"
DEMO_TARGET = "demo:target"
DEFAULT_TARGET = {"use": "hf_causal_lm", "model": "target"}
CALLER = Provider("the caller")
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

PIPELINE_PARTS = {
    "target": "target",
    "scheduler": "scheduler",
    "budget": "budget",
    "pruner": "pruner",
    "verifier": "verifier",
    "costs": "cost model",
}
RESERVED = {"target", "prefill", "commit", "framework", "total"}
"""What results and reports call parts of a round: no names of sources."""
BOUND_KINDS = ("scheduler", "budget", "edge scorer")
SOURCE_PARTS = {"draft": "drafter", "select": "selector", "graft": "graft policy", "edges": "edge scorer"}

# -- what it comes to -------------------------------------------------------------------------------------------------


@attrs.frozen
class Part:
    """A component of a pipeline: the class behind its `use`, and what to make it with.

    Attributes:
        where: its full key path, such as `pipelines.treegraft.sources.middle.draft`.
        kind: as in `treegraft.plugins.KINDS`.
        use: the registered name.
        cls: the class.
        provider: who offers the class.
        arguments: of its constructor; `model` is the name of a model.
        given: the object that the caller passed in its place, or None.
    """

    where: str
    kind: str
    use: str
    cls: type[Any]
    provider: Provider
    arguments: Config
    given: Any = None

    @property
    def model(self) -> str | None:
        """The name of the model to load for it, or None."""
        return self.arguments.get("model") if self.given is None else None

    @property
    def speaker(self) -> Any:
        """The class, or the object in its place: what declares `rescores`, `proposals`, `lossless`, ..."""
        return self.cls if self.given is None else self.given

    def says(self, name: str) -> Any:
        """What it declares under this name."""
        return getattr(self.speaker, name)

    def make(self, models: Mapping[str, Any]) -> Any:
        """The component itself; its `model` argument becomes the ModelSpec or the object in `models`.

        Raises:
            ComposeError: the constructor refused its arguments.
            ModelError: it takes a model, and that could not be loaded.
        """
        if self.given is not None:
            return self.given
        if self.model is None:
            return self.report(ComposeError, self.cls, **self.arguments)
        return self.report(ModelError, self.cls, **self.arguments | {"model": models[self.model]})

    def check(self) -> None:
        """See what its class's own validators say of the arguments, without making it.

        Raises:
            ComposeError: one of them refuses its argument.
        """
        self.report(ComposeError, self._validate)

    def _validate(self) -> None:
        unmade = object.__new__(self.cls)
        for field in attrs.fields(self.cls) if attrs.has(self.cls) else ():
            if field.validator is None or field.alias not in self.arguments or field.alias == "model":
                continue
            value = self.arguments[field.alias]
            with contextlib.suppress(AttributeError):  # one that reads other fields waits until it is made
                field.validator(unmade, field, value if field.converter is None else field.converter(value))

    def bind(self, made: Any, setting: Setting) -> None:
        """Let the component that was made of this meet its pipeline, if its kind does.

        Raises:
            ComposeError: it does not suit the pipeline.
        """
        if self.kind == "edge scorer":
            self.report(ComposeError, made.bind, setting, self.where.split(".")[-2])
        elif self.kind in BOUND_KINDS:
            self.report(ComposeError, made.bind, setting)

    def make_again(self, made: Any, models: Mapping[str, Any]) -> Any:
        """The component for a second pipeline: a clone of `made` where it offers one, else made anew.

        Raises:
            ComposeError: it is the caller's object, of which there is only one.
        """
        clone = made.clone() if isinstance(made, TargetModel | Drafter | CostModel) else None
        if clone is not None:
            return clone
        if self.given is not None:
            raise ComposeError(
                self.where, f"the caller's {type(made).__name__} object, which cannot be cloned",
                f"Allowed in a pipeline to clone: models that load() makes objects of, or a {self.kind} with clone().",
                "Load another pipeline, with an object of its own.",
            )  # fmt: skip
        return self.make(models)

    def report(self, kind: type[TreeGraftError], call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call, with the key path put before whatever goes wrong."""
        try:
            return call(*args, **options)
        except TreeGraftError as error:
            raise type(error)(f"{self.where}: {error.where}", error.found, error.allowed, error.action) from error
        except Exception as error:
            # attrs' validators put more than the message into an exception's arguments.
            message = error.args[0] if error.args else ""
            raise kind(self.where, f"{type(error).__name__}: {message}") from error


@attrs.frozen
class ResolvedPipeline:
    """A pipeline without faults, before any model is loaded.

    Attributes:
        name: in the registry.
        config: what it says after inheritance, overrides, interpolation and defaults.
        parts: its components by key path inside the pipeline (`sources.middle.draft`).
        sources: its sources, in order.
        models: the models it uses, by name: a ModelSpec, or the object that the caller passed.
        files: the registry files that took part.
        notes: by key path, what a part says about itself in this pipeline.
        plugins: where the components come from.
    """

    name: str
    config: Config
    parts: dict[str, Part]
    sources: dict[str, SourceSchema]
    models: dict[str, Any]
    files: tuple[Path, ...]
    notes: Mapping[str, str]
    plugins: Plugins = attrs.field(repr=False)

    @property
    def lossless(self) -> bool:
        """Whether the output has exactly the target's distribution."""
        return bool(self.parts["verifier"].says("lossless"))

    @property
    def repeats_plain(self) -> bool:
        """Whether sampled text is plain decoding's with the same seed, token for token."""
        return bool(self.parts["verifier"].says("repeats_plain"))

    @property
    def file_digests(self) -> dict[str, str]:
        """By key path, a hash of every file that an argument names: weights, a cost table."""
        return {
            f"{path}.{name}": hashlib.sha256(Path(value).read_bytes()).hexdigest()[:16]
            for path, part in self.parts.items()
            for name, value in part.arguments.items()
            if isinstance(value, str) and name != "model" and Path(value).is_file()
        }

    def setting(self, verify_nodes: int, made: Mapping[str, Any]) -> Setting:
        """The pipeline as its parts may know it; names of models are those of what is `made`."""
        target = made["target"]
        drafters = {name: made[f"sources.{name}.draft"] for name in self.sources}
        return Setting(
            target=target.model_name,
            vocab_size=target.vocab_size,
            sources=_source_settings(self.sources, {name: drafter.model_name for name, drafter in drafters.items()}),
            steps=self.config["steps"],
            verify_nodes=verify_nodes,
        )


def _source_settings(sources: Mapping[str, SourceSchema], models: Mapping[str, str]) -> dict[str, SourceSetting]:
    return {
        name: SourceSetting(
            models[name], schema.width, schema.branching, schema.rank, (schema.edges or {}).get("use", "")
        )
        for name, schema in sources.items()
    }


def load(
    pipeline: str,
    *overrides: str,
    models: Mapping[str, Any] | None = None,
    tokenizer: Any = None,
    registry: str | Path | None = None,
    plugins: Iterable[str] = (),
) -> Pipeline:
    """A pipeline of the registry, ready to generate.

    Args:
        pipeline: its name, such as "treegraft" or one from your own file.
        overrides: `KEY=VALUE`, a path inside the pipeline or `models.NAME`: "steps=3", "costs={use: fixed}".
        models: by name, in place of the registry's: a path, a loaded model or (model, tokenizer), a TargetModel, or
            a Drafter (for the source that drafts with that model). Those that this pipeline does not use are ignored.
        tokenizer: in place of the target's own.
        registry: a file laid over the packaged registry; by default `./registry.yaml` where there is one.
        plugins: unpackaged ones beside those installed, by the dotted names of importable modules.

    Raises:
        ComposeError: all that is wrong with the pipeline, in one message.
        ModelError: a model cannot be loaded or served.
        PluginError: one of `plugins` cannot be loaded.
    """
    modules = [plugins] if isinstance(plugins, str) else list(plugins)
    found = load_plugins(modules) if modules else installed_plugins()
    return build(resolve(pipeline, overrides, models=models, registry=registry, plugins=found), tokenizer=tokenizer)


def resolve(
    pipeline: str,
    overrides: Iterable[str] = (),
    *,
    models: Mapping[str, Any] | None = None,
    registry: str | Path | None = None,
    plugins: Plugins | None = None,
) -> ResolvedPipeline:
    """What a pipeline of the registry is; no model is loaded. Arguments are those of `load`.

    Raises:
        ComposeError: all that is wrong with the pipeline, in one message.
    """
    models = models or {}
    paths = {name: os.fspath(model) for name, model in models.items() if isinstance(model, str | os.PathLike)}
    changes = Overrides.parse(overrides)
    written = Registry.read(registry)
    resolver = _Resolver(
        name=pipeline,
        registry=written.composed(pipeline, changes.with_paths(paths)),
        plugins=plugins or installed_plugins(),
        objects={name: model for name, model in models.items() if name not in paths},
    )
    resolved = resolver.resolve()
    for name in {**changes.models, **models}:
        if name not in written.models and name not in resolved.models:
            resolver.faults.unknown(f"models.{name}", "model", name, written.models)
        elif name in models and models[name] is None:
            resolver.faults.add(f"models.{name}", "None", "Allowed: a path, a loaded model, or no such name.")
    resolver.faults.raise_all(f"pipelines.{pipeline}")
    return resolved


def build(resolved: ResolvedPipeline, tokenizer: Any = None) -> Pipeline:
    """Load the models of a resolved pipeline and connect its parts; what needs no model comes first.

    Raises:
        ComposeError: a component refused its arguments, or the components do not fit together.
        ModelError: a model cannot be loaded or served.
    """
    by_load = sorted(resolved.parts.items(), key=lambda item: (item[1].model is not None, item[0] != "target"))
    return _connect(resolved, {path: part.make(resolved.models) for path, part in by_load}, tokenizer)


def _connect(resolved: ResolvedPipeline, made: Mapping[str, Any], tokenizer: Any) -> Pipeline:
    """A pipeline of components that are `made`, by key path."""

    def rebuild() -> Pipeline:
        again = {path: part.make_again(made[path], resolved.models) for path, part in resolved.parts.items()}
        return _connect(resolved, again, tokenizer)

    ranks = [schema.rank for schema in resolved.sources.values()]
    sources = [
        Source(
            name=name,
            index=index,
            drafter=made[f"sources.{name}.draft"],
            selector=made[f"sources.{name}.select"],
            graft_policy=made[f"sources.{name}.graft"],
            width=schema.width,
            branching=schema.branching,
            rank=schema.rank,
            rescore=schema.rescore,
            overrules=tuple(rank < schema.rank or other == index for other, rank in enumerate(ranks)),
            edge_scorer=made.get(f"sources.{name}.edges"),
        )
        for index, (name, schema) in enumerate(resolved.sources.items())
    ]
    setting = resolved.setting(made["budget"].max_verify_nodes, made)
    for path, part in resolved.parts.items():
        part.bind(made[path], setting)
    return Pipeline(
        name=resolved.name,
        sources=sources,
        **{key: made[key] for key in PIPELINE_PARTS},
        steps=resolved.config["steps"],
        calibration=resolved.config["calibration"] == "on",
        tokenizer=tokenizer,
        on_round=resolved.plugins.observer,
        rebuild=rebuild,
    )


# -- how it is found out ----------------------------------------------------------------------------------------------


@attrs.define
class _Resolver:
    """One pipeline on its way to being resolved; faults are collected, so that all of them can be shown."""

    name: str
    registry: Registry
    plugins: Plugins
    objects: Mapping[str, Any]
    parts: dict[str, Part] = attrs.field(factory=dict)
    models: dict[str, Any] = attrs.field(factory=dict)
    faults: Faults = attrs.field(factory=Faults)

    def resolve(self) -> ResolvedPipeline:
        where = f"pipelines.{self.name}"
        written = self.registry.value("pipelines", self.name, self.faults)
        config = typed(PipelineSchema, lay_over({"target": DEFAULT_TARGET}, written), where, self.faults)
        for key, kind in PIPELINE_PARTS.items():
            self.part(key, kind, config[key])
        known = self.known_sources(config["sources"])
        for name in known:
            source = config["sources"][name]
            keys = config["sources"][name] = typed(SourceSchema, source, f"{where}.sources.{name}", self.faults)
            for key, kind in SOURCE_PARTS.items():
                if key != "edges" or keys[key] is not None:
                    self.part(f"sources.{name}.{key}", kind, keys[key])
            self.check_source(name, keys)
            if keys["edges"] is None:
                del keys["edges"]
        self.check_biases(known)
        self.check_models()
        sources = {name: SourceSchema(**config["sources"][name]) for name in known}
        notes = self.try_parts(sources, config["steps"])
        return ResolvedPipeline(
            self.name, config, self.parts, sources, self.models, self.registry.files, notes, self.plugins
        )

    def known_sources(self, sources: Config) -> list[str]:
        """The names of the sources, less those that a slip in an override's path seems to have made."""
        keys = {name: set(source) if isinstance(source, dict) else set() for name, source in sources.items()}
        whole = [name for name in sources if "draft" in keys[name]]
        slips = [name for name in sources if whole and keys[name] and not keys[name] & {"draft", "select", "graft"}]
        for name in slips:
            self.faults.unknown(f"pipelines.{self.name}.sources.{name}", "source", name, whole)
        for name in RESERVED & set(sources):
            self.faults.add(
                f"pipelines.{self.name}.sources.{name}", "a name that reports give to a part of every round.",
                f"Taken: {', '.join(sorted(RESERVED))}.", "Take another name.",
            )  # fmt: skip
        return [name for name in sources if name not in slips]

    # -- components ---------------------------------------------------------------------------------------------------

    def part(self, path: str, kind: str, written: Config | None) -> None:
        """Look a component up and check its arguments."""
        where = f"pipelines.{self.name}.{path}"
        if self.faults.at(where):
            return
        allowed = f"Known {plural(kind)}: {self.plugins.describe(kind)}."
        if written is None:
            self.faults.add(where, f"no {kind} is named.", allowed, f"Write {path.rpartition('.')[2]}: {{use: NAME}}.")
            return
        use = written.get("use")
        arguments = {key: value for key, value in written.items() if key != "use"}
        given = self.objects.get(str(arguments.get("model", "target" if kind == "target" else None)))
        if kind in ("target", "drafter") and isinstance(given, KINDS[kind]):
            self.parts[path] = Part(where, kind, str(use), type(given), CALLER, arguments, given)
            return
        found = self.plugins.find(kind, use) if isinstance(use, str) else None
        if found is None:
            names = [row.name for row in self.plugins.registrations(kind)]
            hints = " ".join(filter(None, [allowed, suggest(str(use), names)]))
            failed = "".join(f"\n  Not loaded: {failure}" for failure in self.plugins.failures)
            self.faults.add(where, f"no {kind} named {use!r}." if "use" in written else "no `use`.", hints + failed)
            return
        self.parts[path] = Part(where, kind, found.name, found.cls, found.provider, arguments)
        self.check_arguments(where, found.cls, arguments)

    def check_arguments(self, where: str, cls: type[Any], arguments: Config) -> None:
        """Whether a constructor takes these arguments, and has all that it needs."""
        parameters = inspect.signature(cls).parameters
        kinds = {parameter.kind for parameter in parameters.values()}
        known = [name for name, parameter in parameters.items() if parameter.kind not in _VARIADIC]
        unknown = [] if inspect.Parameter.VAR_KEYWORD in kinds else [name for name in arguments if name not in known]
        needed = [name for name in known if parameters[name].default is inspect.Parameter.empty]
        missing = [name for name in needed if name not in arguments]
        for name in unknown:
            self.faults.unknown(f"{where}.{name}", "argument", name, known)
        if missing:
            self.faults.add(
                where, f"no {', '.join(map(repr, missing))}.", f"Arguments: {', '.join(known)}.", "Add what is missing."
            )

    def check_source(self, name: str, keys: Config) -> None:
        """Whether drafter and source suit each other."""
        where = f"pipelines.{self.name}.sources.{name}"
        drafter = self.parts.get(f"sources.{name}.draft")
        if drafter is None:
            return
        if keys["rescore"] and not drafter.says("rescores"):
            self.faults.add(f"{where}.rescore", f"the drafter {drafter.use!r} does not rescore.", "Allowed: false.")
        if keys["edges"] is not None and not drafter.says("takes_edge_scorer"):
            self.faults.add(f"{where}.edges", f"the drafter {drafter.use!r} takes no edge scorer.", "Allowed: null.")

    def check_biases(self, sources: Iterable[str]) -> None:
        """Whether drafters, budget and verifier keep the target's distribution together."""
        parts = {name: self.parts.get(f"sources.{name}.draft") for name in sources}
        drafters = {name: (repr(part.use), part.speaker) for name, part in parts.items() if part is not None}
        verifier, budget = self.parts.get("verifier"), self.parts.get("budget")
        if verifier is not None:
            limit = None if budget is None else (repr(budget.use), budget.speaker)
            for place, *fault in biases(drafters, limit, (repr(verifier.use), verifier.speaker)):
                self.faults.add(f"pipelines.{self.name}.{place}", *fault)

    def try_parts(self, sources: Mapping[str, SourceSchema], steps: int) -> dict[str, str]:
        """Make what needs no model, so that what it refuses shows beside the other faults; returns the parts' notes."""
        made: dict[str, Any] = {}
        for path, part in self.parts.items():
            if part.given is None and not self.faults.at(part.where):
                try:
                    if part.model is None:
                        made[path] = part.make({})
                    else:
                        part.check()
                except TreeGraftError as error:
                    self.faults.keep(error)
        notes: dict[str, str] = {}
        setting = Setting(
            target=self.model_name("target"),
            vocab_size=None,
            sources=_source_settings(sources, {name: self.model_name(f"sources.{name}.draft") for name in sources}),
            steps=steps,
            verify_nodes=made["budget"].max_verify_nodes if "budget" in made else None,
        )
        for path in (path for path in made if self.parts[path].kind in BOUND_KINDS):
            try:
                self.parts[path].bind(made[path], setting)
            except TreeGraftError as error:
                self.faults.keep(error)
                continue
            note = made[path].note()
            if note is not None:
                notes[path] = note
        return notes

    def model_name(self, path: str) -> str:
        """The name of a part's model as far as it is known without loading it."""
        part = self.parts.get(path)
        model = None if part is None else self.models.get(part.model or "")
        return model.name if isinstance(model, ModelSpec) else ""

    # -- models -------------------------------------------------------------------------------------------------------

    def check_models(self) -> None:
        """Find every model that a component takes."""
        owner: dict[int, str] = {}
        for part in self.parts.values():
            if part.given is not None and owner.setdefault(id(part.given), part.where) != part.where:
                self.faults.add(
                    part.where, f"the Drafter object that {owner[id(part.given)]} has already.",
                    "An object keeps the state of one source.", "Name another model here, and pass an object for each.",
                )  # fmt: skip
            if part.model is not None:
                self.models.update(self.model(part, part.model))
        for part in self.parts.values():
            self.check_pairing(part)

    def model(self, part: Part, name: Any) -> dict[str, Any]:
        """The model of a component under its name, or nothing with a fault."""
        written = self.registry.models.get(name) if isinstance(name, str) else None
        alias = re.fullmatch(r"\$\{models\.([\w-]+)\}", written) if isinstance(written, str) else None
        found = self.objects.get(name, self.objects.get(alias[1]) if alias else None)
        if isinstance(found, TargetModel | Drafter):
            self.faults.add(
                f"{part.where}.model", f"models[{name!r}] is a {type(found).__name__}, no model for a {part.kind}.",
                f"Allowed: a path, a loaded model, or a {KINDS[part.kind].__name__}.",
            )  # fmt: skip
            return {}
        if found is None and name not in self.registry.models:
            self.faults.unknown(f"{part.where}.model", "model", name, self.registry.models)
        elif found is None:
            found = model_spec(self.registry.value("models", name, self.faults), f"models.{name}", self.faults)
        return {} if found is None else {name: found}

    def check_pairing(self, part: Part) -> None:
        """Refuse an embedded drafter beside a target that it was not made for."""
        model = self.models.get(part.model or "")
        if part.kind == "target" or not (isinstance(model, ModelSpec) and model.path.startswith(DEMO)):
            return
        target = self.parts.get("target")
        if target is None or (target.given is None and target.model not in self.models):
            return  # reported elsewhere
        found = target.given if target.given is not None else self.models[target.model or ""]
        path = found.path if isinstance(found, ModelSpec | TargetModel) else ""
        path = path or f"a {type(found).__name__} object"
        if path != DEMO_TARGET:
            self.faults.add(
                f"{part.where}.model", f"{model.path}, which was made for {DEMO_TARGET}, and the target is {path}.",
                "Allowed: a model with the target's tokenizer.", f"Name it: models.{part.model}=PATH.",
            )  # fmt: skip
