"""Registry files as they are written: named pipelines, inheritance, overrides, interpolation. No class is looked up.

The registry that comes with treegraft is always read; the user's own file is laid over it, then overrides, all by the
same rules (`lay_over`).
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # what OmegaConf's loader raises

from treegraft.errors import ComposeError, Faults, suggest

Config = dict[str, Any]
FILE_NAME = "registry.yaml"
SECTIONS = ("models", "pipelines")


def packaged_registry() -> Path:
    """The registry that comes with treegraft: beside this module in a wheel, beside `core` in a source tree."""
    here = Path(__file__).parent
    # Never the copy that an editable install may keep from the day it was made.
    return here.parent.parent / FILE_NAME if here.parent.name == "core" else here / FILE_NAME


def lay_over(base: Any, over: Any) -> Any:
    """`over` on top of `base`: mappings merge, everything else (lists too) replaces.

    A component that states its `use` replaces the one below it whole: arguments of one class mean nothing to another.
    """
    if not (isinstance(base, dict) and isinstance(over, dict)) or isinstance(over.get("use"), str):
        return over
    return base | {key: lay_over(base[key], value) if key in base else value for key, value in over.items()}


def _lay_over_models(base: Config, over: Config) -> Config:
    """The same for models, where `path` is what `use` is to a component and a string is short for `{path: ...}`."""
    merged = dict(base)
    for name, model in over.items():
        below = base.get(name)
        if isinstance(model, dict) and "path" not in model and below is not None:
            merged[name] = (below if isinstance(below, dict) else {"path": below}) | model
        else:
            merged[name] = model
    return merged


@attrs.frozen
class Overrides:
    """`KEY=VALUE` overrides taken together; their order matters only where one key is given twice (the last counts).

    Attributes:
        pipeline: what to lay over the pipeline.
        models: what to lay over the models.
    """

    pipeline: Config = attrs.field(factory=dict)
    models: Config = attrs.field(factory=dict)

    @classmethod
    def parse(cls, texts: Iterable[str]) -> "Overrides":
        """From `steps=3`, `sources.middle.width=4`, `costs={use: fixed}`, `models.target=PATH`, ...

        Raises:
            ComposeError: a text that is no `KEY=VALUE`, or one that changes what a pipeline inherits from.
        """
        gathered: Config = {}
        for text in texts:
            if not isinstance(text, str):
                raise _bad_override(text, "no string")
            key, equals, value = text.partition("=")
            path = key.strip().split(".")
            if not equals or not all(path):
                raise _bad_override(text, "no KEY=VALUE")
            if path[0] in ("extends", "abstract"):
                raise _bad_override(text, f"{path[0]!r} is settled in the file")
            content = _read_value(text, value)
            for part in reversed(path):
                content = {part: content}
            gathered = _gather(gathered, _spelled_out(content))
        models = gathered.pop("models", {})
        if not isinstance(models, dict):
            raise _bad_override(f"models={models}", "not the name of a model")
        return cls(gathered, models)

    def with_paths(self, paths: Mapping[str, str]) -> "Overrides":
        """The same, and `models.NAME=PATH` for each of `paths`."""
        return Overrides(self.pipeline, _gather(self.models, {name: {"path": path} for name, path in paths.items()}))


def _read_value(text: str, value: str) -> Any:
    try:
        return OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value}"]))["value"]  # type: ignore[index,call-overload]
    except (YAMLError, OmegaConfBaseException) as error:
        raise _bad_override(text, f"a value that cannot be read ({one_line(error)})") from error


def _spelled_out(override: Config) -> Config:
    """`models.NAME=PATH` as `models.NAME.path=PATH`, so that it can stand beside `models.NAME.dtype=...`."""
    models = override.get("models")
    if not isinstance(models, dict):
        return override
    return {"models": {name: {"path": model} if isinstance(model, str) else model for name, model in models.items()}}


def _gather(first: Any, second: Any) -> Any:
    """Plain deep merge, in which stating `use` drops nothing that another override asks for."""
    if not (isinstance(first, dict) and isinstance(second, dict)):
        return second
    return first | {key: _gather(first[key], value) if key in first else value for key, value in second.items()}


def _bad_override(text: object, found: str) -> ComposeError:
    return ComposeError(
        f"override {text!r}", found,
        "Allowed: a path inside the pipeline (steps=3, sources.middle.width=4, costs={use: fixed}) "
        "or models.NAME=PATH, models.NAME.FIELD=VALUE.",
    )  # fmt: skip


@attrs.frozen
class Registry:
    """Models and pipelines of all files taken together, interpolations not yet resolved.

    Attributes:
        models: name -> a path, or a mapping of `ModelSpec`'s fields.
        pipelines: name -> what is written under it.
        files: the files that took part, in order.
    """

    models: Config = attrs.field(factory=dict)
    pipelines: Config = attrs.field(factory=dict)
    files: tuple[Path, ...] = ()

    @classmethod
    def read(cls, path: str | Path | None = None) -> "Registry":
        """The packaged registry with the file at `path` laid over it, by default `./registry.yaml` if there is one.

        Raises:
            ComposeError: a file that is missing, no YAML, or no registry.
        """
        packaged = packaged_registry()
        own = Path(FILE_NAME if path is None else path)
        registry = cls()._with_file(packaged)
        if own.is_file():
            return registry if own.samefile(packaged) else registry._with_file(own)
        if path is not None:
            found = "not a file" if own.exists() else "no such file"
            raise ComposeError(str(path), found, "Allowed: a registry file (YAML with models and pipelines).")
        return registry

    def _with_file(self, path: Path) -> "Registry":
        content = _read_yaml(path)
        return Registry(
            models=_lay_over_models(self.models, content["models"]),
            pipelines=lay_over(self.pipelines, content["pipelines"]),
            files=(*self.files, path),
        )

    def concrete(self) -> list[str]:
        """Names of the pipelines that can be run."""
        return [name for name, body in self.pipelines.items() if not (isinstance(body, dict) and body.get("abstract"))]

    def composed(self, name: str, overrides: Overrides) -> "Registry":
        """The same registry, with the pipeline `name` merged with its ancestors, and overrides laid over.

        Raises:
            ComposeError: a pipeline that is unknown or abstract, or whose ancestors are unknown or go in a circle.
        """
        pipeline = self._inherited(name)
        if pipeline.pop("abstract", False):
            raise ComposeError(
                f"pipelines.{name}", "abstract: it is there to be extended",
                f"Pipelines to run: {', '.join(self.concrete())}.", f"Write one of your own with `extends: {name}`.",
            )  # fmt: skip
        return attrs.evolve(
            self,
            models=_lay_over_models(self.models, overrides.models),
            pipelines=self.pipelines | {name: lay_over(pipeline, overrides.pipeline)},
        )

    def _inherited(self, name: str) -> Config:
        """The pipeline merged with its ancestors; `abstract` is its own, `extends` is done with."""
        chain: list[str] = []
        merged: Config = {}
        where: str = "pipeline"
        current: Any = name
        while current is not None:
            if not isinstance(current, str):
                raise ComposeError(where, f"{current!r}", "Allowed: the name of one pipeline.")
            if current in chain:
                raise ComposeError(
                    where, f"a circle: {' -> '.join([*chain, current])}", "Allowed: one parent, never one's own heir."
                )
            if current not in self.pipelines:
                known = list(self.pipelines) if chain else self.concrete()
                raise ComposeError(
                    where, f"no pipeline named {current!r}.", f"Known pipelines: {', '.join(known)}.",
                    suggest(str(current), known),
                )  # fmt: skip
            body = self.pipelines[current]
            if not isinstance(body, dict):
                raise ComposeError(f"pipelines.{current}", f"{body!r}", "Allowed: a mapping of a pipeline's keys.")
            own = ("extends",) if not chain else ("extends", "abstract")
            merged = lay_over({key: value for key, value in body.items() if key not in own}, merged)
            chain.append(current)
            where, current = f"pipelines.{current}.extends", body.get("extends")
        return merged

    def value(self, section: str, name: str, faults: Faults) -> Any:
        """`models` or `pipelines` `name`, interpolations resolved; None, with a fault, for one that cannot be.

        Raises:
            ComposeError: an interpolation anywhere that cannot even be parsed.
        """
        try:
            root = OmegaConf.create({"models": self.models, "pipelines": self.pipelines})
        except OmegaConfBaseException as error:
            raise ComposeError(str(error.full_key), one_line(error)) from error
        return _resolved(root[section], name, f"{section}.{name}", faults)


def _resolved(parent: DictConfig | ListConfig, key: Any, where: str, faults: Faults) -> Any:
    try:
        node = parent[key]
    except OmegaConfBaseException as error:
        faults.add(where, one_line(error), "Allowed: ${models.NAME}, ${oc.env:NAME,DEFAULT}, or the text itself.")
        return None
    if isinstance(node, DictConfig):
        names: list[Any] = list(node)
        return {name: _resolved(node, name, f"{where}.{name}", faults) for name in names}
    if isinstance(node, ListConfig):
        return [_resolved(node, index, f"{where}[{index}]", faults) for index in range(len(node))]
    return node


def _read_yaml(path: Path) -> Config:
    """The two sections of a registry file."""
    where = str(path)
    try:
        content = OmegaConf.to_container(OmegaConf.load(path))
    except (OSError, UnicodeDecodeError, YAMLError, OmegaConfBaseException) as error:
        key = getattr(error, "full_key", None)
        found = f"cannot be read ({one_line(error)})"
        raise ComposeError(
            f"{where}: {key}" if key else where, found, "Allowed: YAML with models and pipelines."
        ) from error
    sections = content if isinstance(content, dict) else {"": content}
    for name, section in sections.items():
        if name not in SECTIONS:
            raise ComposeError(
                where, f"unknown section {name!r}.", f"Sections: {', '.join(SECTIONS)}.", suggest(str(name), SECTIONS)
            )
        if not isinstance(section, dict) or not all(isinstance(key, str) for key in section):
            raise ComposeError(f"{where}: {name}", "not a mapping of names", "Allowed: NAME: ... below it, one a line.")
    return {section: sections.get(section, {}) for section in SECTIONS}


def one_line(error: Exception) -> str:
    """An error of YAML or OmegaConf without the lines that say again where it is."""
    lines = [line.strip() for line in str(error).splitlines()]
    return " ".join(line for line in lines if not line.startswith(("full_key:", "object_type=", "reference_type=")))
