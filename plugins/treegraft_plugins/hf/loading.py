"""Loading a causal LM and its tokenizer from whatever a registry file may name."""

import contextlib
import hashlib
import importlib.util
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import attrs
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from treegraft.errors import ModelError, suggest
from treegraft.interfaces import ModelSpec
from treegraft_plugins.hf.probe import ATTENTION

_DEMO_FOLDER = Path(__file__).parent / "demo_pair"
_DTYPES = ("float32", "float16", "bfloat16", "float64")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
_ALLOWED = "Allowed: a folder, a hub id, FILE.gguf, ORG/REPO:FILE.gguf, demo:target, demo:middle."
_ALLOWED_NETWORK = "Allowed: a folder or a hub id with config.json and whole safetensors, or demo:NAME."
_DIGESTED = 1 << 16  # bytes at either end of a file
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")

Loadable = ModelSpec | PreTrainedModel | tuple[PreTrainedModel, Any]
"""What a `model` argument may be: what to load, a loaded model, or one with its tokenizer."""

Network = TypeVar("Network", bound=PreTrainedModel)

_loaded: "WeakValueDictionary[tuple[ModelSpec, _Place], PreTrainedModel]" = WeakValueDictionary()


@attrs.frozen
class _Place:
    """Where a checkpoint lies: a folder or hub id, and the GGUF file in it if it is one."""

    name: str
    gguf_file: str | None = None

    @property
    def options(self) -> dict[str, Any]:
        """What `from_pretrained` needs beside the name."""
        return {} if self.gguf_file is None else {"gguf_file": self.gguf_file}


def load_causal_lm(model: Loadable) -> tuple[PreTrainedModel, Any]:
    """The model and its tokenizer (None where there is none); the same spec shares its weights while they live.

    A loaded model is handed back as it is, and so is a pair of one and its tokenizer.

    Raises:
        ModelError: there is no such model, or it cannot be loaded as asked.
    """
    if isinstance(model, PreTrainedModel):
        return model, None
    if isinstance(model, tuple) and len(model) == 2 and isinstance(model[0], PreTrainedModel):
        return model
    if not isinstance(model, ModelSpec):
        raise ModelError(
            "model", f"a {type(model).__name__}",
            "Allowed: what a registry file names, a loaded model, or (loaded model, tokenizer).",
        )  # fmt: skip
    place = _place(model.path)
    key = (model, place)
    loaded = _loaded.get(key)
    if loaded is None:
        loaded = _loaded[key] = _load_model(model, place)
    return loaded, _load_tokenizer(model, place)


def model_name(model: Loadable) -> str:
    """What a model is called, as `ModelSpec.name` calls it, also where it was loaded by somebody else."""
    if isinstance(model, ModelSpec):
        return model.name
    loaded = model[0] if isinstance(model, tuple) else model
    path = Path(loaded.name_or_path)
    return f"demo:{path.name}" if path.parent == _DEMO_FOLDER else path.name


def checkpoint_digest(spec: ModelSpec) -> str | None:
    """Tells checkpoints on this machine apart by their files, wherever they lie; None of anything else.

    Of each file its name, its size, and how it begins and ends: training changes all weights, also the last ones.
    """
    try:
        place = _place(spec.path)
    except ModelError:
        return None  # what a plugin's own loader reads, or nothing
    folder = Path(place.name)
    if not folder.is_dir():
        return None
    names = ("config.json", "*.safetensors", "*.bin") if place.gguf_file is None else (place.gguf_file,)
    digest = hashlib.sha256()
    for path in sorted(path for name in names for path in folder.glob(name)):
        with path.open("rb") as file:
            begin, size = file.read(_DIGESTED), path.stat().st_size
            file.seek(max(0, size - _DIGESTED))
            digest.update(f"{path.name} {size}".encode() + begin + file.read())
    return digest.hexdigest()[:16]


def load_network(
    spec: ModelSpec, network: type[Network], configuration: Callable[[dict[str, Any], str], PreTrainedConfig]
) -> Network:
    """A drafter's network from a folder or a hub id, from safetensors alone; every weight must be there and no other.

    Args:
        spec: what to load.
        network: its class.
        configuration: called with the content of config.json and what to name in an error.

    Raises:
        ModelError: there is no such checkpoint, or it is none of this network.
    """
    where, place = _where(spec.path), _place(spec.path)
    unread = [name for name in ("device_map", "attn_implementation") if getattr(spec, name) is not None]
    if unread or place.gguf_file is not None:
        found = "a GGUF file" if place.gguf_file is not None else unread[0]
        raise ModelError(where, f"{found}, for a drafter's network", "Allowed: path, dtype, device, revision.")
    device = _device(spec)
    hub_options = _hub_options(spec)
    with _wrapped(spec, _ALLOWED_NETWORK), without_progress_bars():
        settings, _ = PreTrainedConfig.get_config_dict(place.name, **hub_options)
        config = configuration(settings, where)
        model, report = network.from_pretrained(
            place.name, config=config, dtype=_dtype(spec, device), use_safetensors=True, output_loading_info=True,
            ignore_mismatched_sizes=True, **hub_options,
        )  # fmt: skip
    for kind in ("missing", "unexpected", "mismatched"):
        if report[f"{kind}_keys"]:
            found = f"{kind} weights: {_few(report[f'{kind}_keys'])}"
            raise ModelError(where, found, f"Allowed: those of {network.__name__}.")
    return model.to(device).eval()


def _few(keys: Iterable[Any]) -> str:
    """The first names among transformers' report of weights."""
    return ", ".join(sorted(key if isinstance(key, str) else str(key[0]) for key in keys)[:3])


def _place(path: str) -> _Place:
    """Find the checkpoint that `path` names."""
    if path.startswith("demo:"):
        return _demo(path)
    local = Path(path).expanduser()
    if path.endswith(".gguf"):
        if local.is_file():
            return _Place(str(local.parent.resolve()), local.name)
        repository, colon, file = path.partition(":")
        if colon and _HUB_ID.fullmatch(repository):
            return _Place(repository, file)
        raise ModelError(_where(path), "no such file", _ALLOWED, _near_miss(local))
    if local.is_dir():
        if not (local / "config.json").is_file():
            raise ModelError(_where(path), "a folder without config.json", "Allowed: what save_pretrained() writes.")
        return _Place(str(local.resolve()))
    if not _HUB_ID.fullmatch(path) or local.exists():
        raise ModelError(_where(path), "no such folder", _ALLOWED, _near_miss(local))
    return _Place(path)


def _demo(path: str) -> _Place:
    known = {f"demo:{folder.name}": folder for folder in sorted(_DEMO_FOLDER.iterdir()) if folder.is_dir()}
    if path not in known:
        raise ModelError(_where(path), "no such embedded model", f"Known: {', '.join(known)}.", suggest(path, known))
    return _Place(str(known[path]))


def _where(path: str) -> str:
    return f"model {path!r}"


def _near_miss(path: Path) -> str | None:
    """What in the same folder resembles it, or None."""
    entries = path.parent.iterdir() if path.parent.is_dir() and not path.exists() else ()
    return suggest(str(path), (str(entry) for entry in entries))


def _load_model(spec: ModelSpec, place: _Place) -> PreTrainedModel:
    device = _device(spec)
    _require_packages(spec, place)
    options: dict[str, Any] = {"dtype": _dtype(spec, device), **_hub_options(spec), **place.options}
    if spec.device_map is not None:
        options["device_map"] = spec.device_map
    if spec.attn_implementation is not None:
        if spec.attn_implementation not in ATTENTION:
            raise ModelError(
                _where(spec.path), f"attn_implementation {spec.attn_implementation!r} cannot express a tree mask",
                f"Allowed: {', '.join(ATTENTION)}.", suggest(spec.attn_implementation, ATTENTION),
            )  # fmt: skip
        options["attn_implementation"] = spec.attn_implementation
    with _wrapped(spec), without_progress_bars():
        model, report = AutoModelForCausalLM.from_pretrained(place.name, output_loading_info=True, **options)
    if report["missing_keys"]:  # transformers has filled them with random numbers
        made_as, loaded_as = model.config.architectures or [], type(model).__name__
        raise ModelError(
            _where(spec.path), f"no whole {loaded_as}: it lacks {_few(report['missing_keys'])}",
            "Allowed: a causal LM with all its weights.",
            None if not made_as or loaded_as in made_as else
            f"It was saved as {', '.join(made_as)}; block drafters go by models.dflash and models.heads.",
        )  # fmt: skip
    return model if spec.device_map is not None else model.to(device)


def _load_tokenizer(spec: ModelSpec, place: _Place) -> Any:
    folder = Path(place.name)
    if place.gguf_file is None and folder.is_dir() and not any((folder / file).exists() for file in _TOKENIZER_FILES):
        return None
    with _wrapped(spec), without_progress_bars():
        return AutoTokenizer.from_pretrained(place.name, **_hub_options(spec), **place.options)


def _hub_options(spec: ModelSpec) -> dict[str, Any]:
    revision = {} if spec.revision is None else {"revision": spec.revision}
    return {"trust_remote_code": spec.trust_remote_code, **revision}


def _device(spec: ModelSpec) -> torch.device:
    """The device asked for; with "auto", an accelerator where there is one."""
    if spec.device_map is not None and spec.device != "auto":
        raise ModelError(_where(spec.path), f"device {spec.device!r} beside device_map", "Allowed: one of the two.")
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if spec.device == "auto":
        return accelerator if accelerator is not None and spec.device_map != "cpu" else torch.device("cpu")
    present = ["cpu", *([accelerator.type] if accelerator is not None else [])]
    try:
        device = torch.device(spec.device)
    except RuntimeError:
        device = None
    if device is None or device.type not in present:
        raise ModelError(_where(spec.path), f"no device {spec.device!r} here", f"Present: {', '.join(present)}.")
    return device


def _dtype(spec: ModelSpec, device: torch.device) -> torch.dtype | str:
    if spec.dtype == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    if spec.dtype not in _DTYPES:
        known = f"Allowed: auto, {', '.join(_DTYPES)}."
        raise ModelError(_where(spec.path), f"no dtype {spec.dtype!r}", known, suggest(spec.dtype, _DTYPES))
    return getattr(torch, spec.dtype)


def _require_packages(spec: ModelSpec, place: _Place) -> None:
    needs = {"device-map": ("accelerate",) if spec.device_map else (), "gguf": ("gguf",) if place.gguf_file else ()}
    for extra, packages in needs.items():
        missing = [package for package in packages if importlib.util.find_spec(package) is None]
        if missing:
            action = f'Install the extra: pip install "treegraft[{extra}]".'
            raise ModelError(_where(spec.path), f"it needs the package {missing[0]}", None, action)


@contextlib.contextmanager
def _wrapped(spec: ModelSpec, allowed: str = _ALLOWED) -> Iterator[None]:
    """Errors of transformers' loaders as a ModelError that says which model."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:  # a damaged file raises whatever its reader raises
        found = str(error).strip().split("\n")[0] or type(error).__name__
        raise ModelError(_where(spec.path), found, allowed, _near_miss(Path(spec.path))) from error


@contextlib.contextmanager
def without_progress_bars() -> Iterator[None]:
    """transformers' progress bars switched off: stderr belongs to the caller (the one of GGUF files has no switch)."""
    if not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()
