"""What may be written under a pipeline, a source and a model, and with which types."""

from typing import Any

import attrs
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from treegraft.errors import Faults
from treegraft.interfaces import ModelSpec
from treegraft.registry import Config, one_line


@attrs.define
class PipelineSchema:
    """The keys of a pipeline (`extends` and `abstract` have done their work by then)."""

    steps: int = 5
    calibration: str = "on"
    target: dict[str, Any] = MISSING
    sources: dict[str, Any] = attrs.field(factory=dict)
    scheduler: dict[str, Any] = MISSING
    budget: dict[str, Any] = MISSING
    pruner: dict[str, Any] = MISSING
    verifier: dict[str, Any] = MISSING
    costs: dict[str, Any] = MISSING


@attrs.define
class SourceSchema:
    """The keys of an entry of a pipeline's `sources`."""

    draft: dict[str, Any] = MISSING
    select: dict[str, Any] = MISSING
    graft: dict[str, Any] = MISSING
    width: int = 10
    branching: int = 10
    rank: int = 0
    rescore: bool = False
    edges: dict[str, Any] | None = None


AT_LEAST_ONE = ("steps", "width", "branching")
_ALLOWED: dict[Any, str] = {int: "an int", bool: "true or false", str: "a string"}


def typed(schema: type[Any], written: Any, where: str, faults: Faults) -> Config:
    """The keys of a schema, as written or by default; one that is missing, and has no default, is None."""
    config = OmegaConf.structured(schema)
    known = list(config)  # `in` would leave out those without a default
    if not isinstance(written, dict):
        faults.add(where, f"{written!r}", f"Allowed: a mapping with the keys {', '.join(known)}.")
        written = {}
    for key, value in written.items():
        if key not in known:
            faults.unknown(f"{where}.{key}", "key", key, known)
            continue
        if key == "calibration" and isinstance(value, bool):  # YAML reads a bare on or off as true or false
            value = "on" if value else "off"
        try:
            OmegaConf.update(config, key, value)
        except OmegaConfBaseException as error:
            allowed = _ALLOWED.get(attrs.fields_dict(schema)[key].type, "a mapping, such as {use: NAME}")
            faults.add(f"{where}.{key}", one_line(error), f"Allowed: {'a mapping' if key == 'sources' else allowed}.")
    plain: Config = dict(OmegaConf.to_container(config))  # type: ignore[arg-type]
    for key in AT_LEAST_ONE:
        if key in plain and plain[key] < 1:
            faults.add(f"{where}.{key}", f"{plain[key]}", "Allowed: an int >= 1.")
    if plain.get("calibration", "on") not in ("on", "off"):
        faults.add(f"{where}.calibration", f"{plain['calibration']!r}", "Allowed: on, off.")
    return {key: None if value == MISSING else value for key, value in plain.items()}


def model_spec(written: Any, where: str, faults: Faults) -> ModelSpec | None:
    """A ModelSpec from a path or from a mapping of its fields; None where that has faults."""
    if written is None and faults.at(where):
        return None  # an interpolation that leads nowhere
    fields = written if isinstance(written, dict) else {"path": written}
    if isinstance(fields.get("path"), dict):  # path: ${models.other}, where the other is a mapping
        fields = fields["path"] | {key: value for key, value in fields.items() if key != "path"}
    known = attrs.fields_dict(ModelSpec)
    sound = True
    for key, value in fields.items():
        if key not in known:
            faults.unknown(f"{where}.{key}", "field", key, known)
            sound = False
            continue
        default = known[key].default
        wanted = bool if isinstance(default, bool) else str
        if not (isinstance(value, wanted) or (value is None and default is None)):
            allowed = "true or false" if wanted is bool else "a string, in quotes where YAML reads it as something else"
            faults.add(f"{where}.{key}", f"{value!r}", f"Allowed: {allowed}.")
            sound = False
    if "path" not in fields:
        faults.add(where, "no path.", "Allowed: demo:NAME, a folder, a hub id, FILE.gguf or ORG/REPO:FILE.gguf.")
        sound = False
    return ModelSpec(**fields) if sound else None
