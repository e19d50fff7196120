"""The fenced blocks of README and docs, and running them: commands in-process, YAML composed, Python executed.

A page's blocks run in order in one empty folder. A block whose first line is `# NAME.yaml`, `# NAME.py`, ... is written
to that file first; one whose first line is `# needs PACKAGE` is run where that is installed. Output is compared as far
as the page shows it: figures match any figure, runs of blanks any run, and `...` anything.

    python tests/docs/doc_blocks.py [PAGE ...]      writes what commands print today into the pages

leaves output that is elided with `...` as it is.
"""

import os
import re
import shlex
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import attrs
from click.testing import CliRunner, Result
from omegaconf import OmegaConf

from treegraft.cli import main
from treegraft.cli.options import plugins_from_here
from treegraft.compose import resolve
from treegraft.registry import Registry

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "treegraft-echo"
DEMO = ROOT / "plugins" / "treegraft_plugins" / "hf" / "demo_pair" / "target"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "how-to").glob("*.md"))]

NOT_RUN = {
    "make": "makes a virtual environment and installs into it, which .ci/run does",
    "pip": "installs from the network, which .ci/run does",
    "python": "makes the virtual environment that pip installs into",
    "pytest": "runs these tests",
}
"""First words of commands that are not run here, and why."""

STAND_INS = {"make demo": "treegraft demo --quick"}
"""Commands that are run as another one, which shows the same."""


@attrs.frozen
class Block:
    """A fenced block: where it stands, its language, its lines."""

    page: Path
    line: int
    language: str
    lines: tuple[str, ...]

    @property
    def where(self) -> str:
        """For messages."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def text(self) -> str:
        """The content."""
        return "\n".join(self.lines) + "\n"

    @property
    def file(self) -> str | None:
        """The file that its first line names, or None."""
        named = re.fullmatch(r"# ([\w-]+\.\w+)", self.lines[0]) if self.lines else None
        return named[1] if named else None

    @property
    def needs(self) -> str | None:
        """The optional package that its first line names, or None."""
        named = re.fullmatch(r"# needs ([\w.]+)", self.lines[0]) if self.lines else None
        return named[1] if named else None

    def commands(self) -> Iterator[tuple[str, list[str]]]:
        """Of a console block: each command and the lines of output shown below it."""
        command, output = None, []
        for line in self.lines:
            if line.startswith("$ "):
                if command is not None:
                    yield command, output
                command, output = line[2:], []
            else:
                output.append(line)
        if command is not None:
            yield command, output


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    found = []
    begin, language, lines = 0, "", []
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if line.startswith("```"):
            if begin:
                found.append(Block(page, begin, language, tuple(lines)))
                begin = 0
            else:
                begin, language, lines = number, line[3:].strip(), []
        elif begin:
            lines.append(line)
    assert not begin, f"{page}: the block at line {begin} has no end"
    return found


# -- what stands for what is not here ---------------------------------------------------------------------------------


def on_demo_pair(text: str) -> str:
    """Paths of models replaced by the demo pair: `models.NAME=PATH`, `{"NAME": "PATH"}`, `from_pretrained("PATH"`."""
    text = re.sub(r"\bmodels\.(\w+)(\.path)?=\S+", lambda match: f"models.{match[1]}={_stand_in(match[1])}", text)
    text = re.sub(
        r"""\.from_pretrained\((\s*)(["'])[^"']*\2""", lambda match: f".from_pretrained({match[1]}{str(DEMO)!r}", text
    )
    in_python = r"""(["'])(target|middle|small)\1: *(["'])[^"']*\3"""
    return re.sub(in_python, lambda match: f'"{match[2]}": "{_stand_in(match[2])}"', text)


def registry_on_demo_pair(text: str) -> str:
    """A registry file whose models are those of the demo pair."""
    content = OmegaConf.to_container(OmegaConf.create(text))
    assert isinstance(content, dict)
    for name, model in content.get("models", {}).items():
        path = _stand_in(name)
        # On this machine there is no choice of device, but every other option must be accepted.
        content["models"][name] = {**model, "path": path, "device": "cpu"} if isinstance(model, dict) else path
    return OmegaConf.to_yaml(OmegaConf.create(content))


def _stand_in(name: str) -> str:
    return "demo:target" if name == "target" else "demo:middle"


def install_example(folder: Path) -> Path:
    """The example plugin as pip would install it, as far as Python can tell; returns what belongs on its path."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    info = folder / f"treegraft_echo-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    points = "".join(f"{key} = {value}\n" for key, value in project["entry-points"]["treegraft"].items())
    (info / "entry_points.txt").write_text(f"[treegraft]\n{points}")
    (folder / "treegraft_echo.py").write_text((EXAMPLE / "treegraft_echo.py").read_text())
    return folder


# -- running ----------------------------------------------------------------------------------------------------------


def run_command(command: str, stand_ins: Mapping[str, str]) -> Result | None:
    """Run one command in this process; None for one that is not run."""
    words = shlex.split(on_demo_pair(stand_ins.get(command, command)), comments=True)
    if words[0] in NOT_RUN:
        return None
    assert words[0] == "treegraft", f"{command!r} is neither run nor named in NOT_RUN"
    *words, file = (*words[:-2], words[-1]) if words[-2:-1] == [">"] else (*words, None)
    result = CliRunner().invoke(main, words[1:])
    if file is not None:
        Path(file).write_text(result.stdout)
    return result


def run_console(block: Block) -> None:
    """Run the commands of a console block, and compare what they print with what the page shows."""
    for command, shown in block.commands():
        result = run_command(command, STAND_INS)
        if result is None:
            continue
        fails = any(re.match(r"\w*Error: ", line) for line in shown)
        assert (result.exit_code in (1, 2)) == fails, (
            f"{block.where}: {command!r} ended with {result.exit_code}:\n{result.output}"
        )
        assert_shown(f"{block.where}: {command!r}", shown, result.output)


def assert_shown(where: str, shown: list[str], output: str) -> None:
    """Whether `output` is what the lines `shown` promise (all of it, where they do not say `...`)."""
    wanted = "\n".join(shown).strip()
    if wanted:
        assert re.fullmatch(pattern_of(wanted), output.strip(), re.DOTALL), (
            f"{where}\n--- shown on the page\n{wanted}\n--- printed\n{output}"
        )


def pattern_of(shown: str) -> str:
    """A regular expression for `shown`: figures for figures, blanks for blanks, `...` for anything."""
    pattern = ""
    for part in re.split(r"(\s*\.\.\.\s*|\d[\d.,]*|\s+|─+)", shown):
        if "..." in part:
            pattern += ".*?"
        elif part[:1].isdigit():
            pattern += r"\d[\d.,]*"
        elif part.isspace():
            pattern += r"\s+"
        else:
            pattern += "─+" if part.startswith("─") else re.escape(part)
    return pattern


def run_yaml(block: Block, folder: Path) -> None:
    """Compose every pipeline that a registry block defines, as a user's file, with the plugins that it names."""
    text = registry_on_demo_pair(block.text)
    file = folder / (block.file or "block.yaml")
    file.write_text(text)
    registry = Registry.read(file)
    own = OmegaConf.to_container(OmegaConf.create(text)).get("pipelines", {})
    plugins = plugins_from_here(sorted(set(re.findall(r"--plugin (\w+) ", block.text))))
    for name in own:
        if name in registry.concrete():
            resolve(name, registry=file, plugins=plugins)
    if block.file is None:
        file.unlink()


# -- writing ----------------------------------------------------------------------------------------------------------


def refreshed(page: Path, folder: Path) -> str:
    """The page with today's output below each command that shows some and elides none."""
    lines = page.read_text().splitlines()
    grown = 0
    for block in blocks(page):
        if block.language == "yaml":
            run_yaml(block, folder)
        if block.language != "console":
            continue
        written: list[str] = []
        for command, shown in block.commands():
            result = run_command(command, {"make demo": "treegraft demo"})
            if result is not None and shown and not any("..." in line for line in shown):
                shown = [line.rstrip() for line in result.output.strip("\n").splitlines()]
            written += [f"$ {command}", *shown]
        begin = block.line + grown
        lines[begin : begin + len(block.lines)] = written
        grown += len(written) - len(block.lines)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    for page in [Path(name).resolve() for name in sys.argv[1:]] or PAGES:
        with tempfile.TemporaryDirectory() as work:
            sys.path.insert(0, str(install_example(Path(work, "site"))))
            os.chdir(work)
            page.write_text(refreshed(page, Path(work)))
