"""The wheel holds what it must and nothing else; metadata, pins and licence agree with each other."""

import re
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    pytest.importorskip("hatchling", reason="building needs the extra `dev`; .ci/run runs this with it")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (file,) = folder.glob("*.whl")
    return zipfile.ZipFile(file)


def test_the_wheel_holds_both_packages_the_registry_and_the_licence(wheel):
    names = set(wheel.namelist())
    info = f"treegraft-{PROJECT['version']}.dist-info"
    sources = {
        str(path.relative_to(folder))
        for folder in (ROOT / "core", ROOT / "plugins")
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert names == sources | {"treegraft/registry.yaml"} | {
        f"{info}/{name}"
        for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE", "licenses/NOTICE")
    }
    assert {"treegraft/py.typed", "treegraft_plugins/py.typed"} <= names
    assert wheel.read("treegraft/registry.yaml") == (ROOT / "registry.yaml").read_bytes()
    assert b"Apache License" in wheel.read(f"{info}/licenses/LICENSE")


def test_the_wheel_brings_the_demo_models_with_their_notice(wheel):
    folder = "treegraft_plugins/hf/demo_pair"
    sizes = {info.filename: info.file_size for info in wheel.infolist() if info.filename.startswith(folder)}
    assert f"{folder}/NOTICE" in sizes
    assert {f"{folder}/{name}/model.safetensors" for name in ("target", "middle")} <= set(sizes)
    assert sum(sizes.values()) <= 12 * 2**20


def test_entry_points_are_those_a_third_party_would_write():
    points = {point.group: point.value for point in metadata.distribution("treegraft").entry_points}
    assert points == {"console_scripts": "treegraft.cli:main", "treegraft": "treegraft_plugins"}


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=!~ \[]", requirement, maxsplit=1)[0] for requirement in requirements}


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_every_dependency_is_pinned_for_the_tested_set_up():
    extras = PROJECT["optional-dependencies"]
    needed = names(PROJECT["dependencies"] + extras["testing"] + extras["gguf"] + extras["device-map"] + extras["dev"])
    assert needed <= set(pins())
    assert pins()["torch"] == "2.13.0"


def test_the_licence_is_the_whole_apache_licence():
    text = (ROOT / "LICENSE").read_text()
    assert "Version 2.0, January 2004" in text and "END OF TERMS AND CONDITIONS" in text
    assert all(f"\n   {number}. " in text for number in range(1, 10))
    assert PROJECT["license"] == "Apache-2.0"
    assert "Python Software Foundation" in (ROOT / "NOTICE").read_text()
