"""README and docs are true: their blocks run, their options are the program's, their tables name every part."""

import importlib
import inspect
import json
import re
import sys
from importlib.util import find_spec

import attrs
import click
import doc_blocks
import generation_options
import pytest
from doc_blocks import EXAMPLE, PAGES, ROOT, Block, blocks, pattern_of
from transformers import GenerationConfig

from treegraft.cli import COMMANDS, main, with_debug
from treegraft.cli.bench import SUBCOMMANDS
from treegraft.cli.fit import COMMANDS as FITS
from treegraft.cli.fit import fit
from treegraft.interfaces import ModelSpec
from treegraft.plugins import installed_plugins, load_plugins
from treegraft.registry import Registry
from treegraft.schema import PipelineSchema, SourceSchema
from treegraft_plugins.hf.generation_options import GENERATION_OPTIONS

demo = importlib.import_module("treegraft.cli.demo")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """One cache of measured costs for all pages, and never the user's own."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def workplace(tmp_path, monkeypatch, cache):
    """An empty folder to run a page in, with the example plugin installed as far as Python can tell."""
    monkeypatch.setenv("TREEGRAFT_CACHE", str(cache))
    plan = attrs.evolve(demo.QUICK, max_new_tokens=24, repeats=1)  # .ci/run takes the time for all
    monkeypatch.setattr(demo, "QUICK", plan)
    monkeypatch.syspath_prepend(doc_blocks.install_example(tmp_path / "site"))
    folder = tmp_path / "page"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)  # as for a script that lies there
    installed_plugins.cache_clear()  # another test may have looked before the example was there
    yield folder
    installed_plugins.cache_clear()
    for name in ("treegraft_echo", "my_parts"):
        sys.modules.pop(name, None)
    importlib.invalidate_caches()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_of_the_page_holds(page, workplace):
    namespace: dict[str, object] = {}
    found = blocks(page)
    assert found, f"{page} has no blocks: is it read right?"
    for block in found:
        if block.language == "console":
            doc_blocks.run_console(block)
        elif block.language == "yaml":
            doc_blocks.run_yaml(block, workplace)
        elif block.language == "python" and block.file is None:
            if block.needs and find_spec(block.needs) is None:
                continue
            exec(compile(doc_blocks.on_demo_pair(block.text), block.where, "exec"), namespace)
        elif block.language == "python" and not (EXAMPLE / block.file).exists():
            (workplace / block.file).write_text(block.text)
        else:
            assert block.file or block.language == "", f"{block.where}: nothing runs a block in {block.language!r}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_lead_somewhere(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    paths = re.findall(r"`((?:tests|benchmarks|tools)/[\w./]+)`", text)
    assert links
    for found in (*(page.parent / link for link in links), *(ROOT / path for path in paths)):
        assert found.exists(), f"{page.name} points to {found}"


def test_files_of_the_example_are_shown_as_they_are():
    shown = {block.file: block for block in blocks(ROOT / "docs" / "drafters.md") if block.file}
    files = {path.name: path for path in EXAMPLE.rglob("*") if path.suffix in {".py", ".toml", ".yaml"}}
    assert set(shown) == set(files)
    for name, block in shown.items():
        assert "\n".join(block.lines[1:]).strip() == files[name].read_text().strip(), f"{block.where} is not {name}"


# -- references -------------------------------------------------------------------------------------------------------


def command_of(name):
    """`run`, `bench report`, or `fit collect`."""
    if name in COMMANDS:
        return main.get_command(click.Context(main), name)
    if name.startswith("fit "):
        return fit.get_command(click.Context(fit), name.removeprefix("fit "))
    module, attribute = SUBCOMMANDS[name.removeprefix("bench ")].split(":")
    return with_debug(getattr(importlib.import_module(module), attribute))


@pytest.mark.parametrize(
    "name", [*COMMANDS, *(f"bench {name}" for name in SUBCOMMANDS), *(f"fit {name}" for name in FITS)]
)
def test_the_command_line_reference_lists_every_option_and_no_other(name):
    text = (ROOT / "docs" / "cli.md").read_text()
    section = re.search(rf"^## treegraft {name}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    assert section, f"docs/cli.md has no section on {name}"
    options = {
        text for parameter in command_of(name).params if isinstance(parameter, click.Option) for text in parameter.opts
    }
    assert set(re.findall(r"^\| `(--[\w-]+)`", section[1], re.MULTILINE)) == options


def test_the_registry_reference_lists_every_key():
    text = (ROOT / "docs" / "registry.md").read_text()
    rows = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    for schema in (ModelSpec, PipelineSchema, SourceSchema):
        assert {field.name for field in attrs.fields(schema)} <= rows
    assert set(Registry.read().concrete()) <= rows


def test_the_registry_reference_lists_every_part_with_its_arguments_and_defaults():
    text = (ROOT / "docs" / "registry.md").read_text()
    rows = re.findall(r"^\| ([a-z ]+) \| `(\w+)` \|(.*?)\| .* \|$", text, re.MULTILINE)
    listed = {(kind, use): set(re.findall(r"`([^`]+)`", arguments)) for kind, use, arguments in rows[1:]}
    own = [row for row in load_plugins().registrations() if row.provider.name == "treegraft"]
    assert len(own) > 10
    assert listed == {(row.kind, row.name): set(map(_written, _parameters(row.cls))) for row in own}


def _parameters(cls):
    return [] if cls.__init__ is object.__init__ else list(inspect.signature(cls).parameters.values())


def _written(parameter):
    """`name`, or `name: default` as YAML has it."""
    if parameter.default is inspect.Parameter.empty:
        return parameter.name
    default = {} if parameter.default is attrs.NOTHING else parameter.default  # made anew for each object
    return f"{parameter.name}: {default if isinstance(default, str) else json.dumps(default)}"


def test_the_page_of_generation_options_is_the_table_in_the_code():
    assert generation_options.PAGE.read_text() == generation_options.page(), (
        "python tests/docs/generation_options.py writes it anew"
    )


def test_the_table_of_generation_options_is_that_of_the_installed_transformers():
    known = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert len(known) > 60
    assert set(GENERATION_OPTIONS) == known
    listed = re.findall(r"^\| `(\w+)` \|", generation_options.PAGE.read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(known), "each once"


# -- the runner itself ------------------------------------------------------------------------------------------------


def console(*lines: str) -> Block:
    return Block(ROOT / "README.md", 1, "console", lines)


def test_the_runner_notices_a_command_that_fails(workplace):
    with pytest.raises(AssertionError, match="ended with 2"):
        doc_blocks.run_console(console("$ treegraft show no_such_pipeline"))


def test_the_runner_notices_output_that_differs(workplace):
    with pytest.raises(AssertionError, match="shown on the page"):
        doc_blocks.run_console(console("$ treegraft show plain", "something else", "..."))


def test_the_runner_notices_a_command_it_does_not_know():
    with pytest.raises(AssertionError, match="NOT_RUN"):
        doc_blocks.run_console(console("$ ls"))


def test_the_runner_notices_a_pipeline_that_does_not_compose(workplace):
    with pytest.raises(ValueError, match="ngramm"):
        lines = ("pipelines:", "  bad:", "    extends: all_small", "    sources: {small: {draft: {use: ngramm}}}")
        doc_blocks.run_yaml(Block(ROOT / "README.md", 1, "yaml", lines), workplace)


@pytest.mark.parametrize(
    ("shown", "printed", "holds"),
    [
        ("12 tokens in 0.5 s", "7 tokens   in 10.25 s", True),
        ("12 tokens", "no tokens", False),
        ("a ... z", "a b c z", True),
        ("a\n...", "a", True),
        ("a", "a b", False),
        ("──────── end", "──── end", True),
    ],
)
def test_figures_and_blanks_are_matched_by_pattern(shown, printed, holds):
    assert bool(re.fullmatch(pattern_of(shown), printed, re.DOTALL)) == holds


def test_model_paths_are_replaced_by_the_demo_pair():
    assert doc_blocks.on_demo_pair("models.target=a/b models.middle=c.gguf steps=3") == (
        "models.target=demo:target models.middle=demo:middle steps=3"
    )
    assert doc_blocks.on_demo_pair("""{'target': "x/y", "middle": 'z'}""") == (
        '{"target": "demo:target", "middle": "demo:middle"}'
    )
    assert (
        doc_blocks.on_demo_pair('Auto.from_pretrained("a/b", c=1)')
        == f"Auto.from_pretrained({str(doc_blocks.DEMO)!r}, c=1)"
    )
    assert "demo:target" in doc_blocks.registry_on_demo_pair("models: {target: {path: a/b, dtype: float32}}")
