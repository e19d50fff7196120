"""Imports run one way, plugins use public names only, and transformers stays inside `treegraft_plugins.hf`."""

import ast
import subprocess
import sys
from pathlib import Path

import attrs
import pytest

ROOT = Path(__file__).parents[2]
CORE, PLUGINS = ROOT / "core" / "treegraft", ROOT / "plugins" / "treegraft_plugins"

LEVELS = (
    ("errors",), ("tree", "kept"), ("mask", "sampling", "statistics"), ("interfaces",), ("verify", "answers"),
    ("learn",), ("round",), ("pipeline", "audit"), ("hookspecs",), ("plugins",), ("registry",), ("schema",),
    ("compose",), ("front_door",), ("replay",), ("bench",), ("cli",),
)  # fmt: skip
LEVEL = {module: level for level, modules in enumerate(LEVELS) for module in modules}
FREE = {"testing", "__init__"}  # may import every level but the last
# Where core knows a plugin: what is transformers' own, fetched when a request needs it.
LAZY_EXEMPTIONS = {
    ("interfaces", "treegraft_plugins.hf.rules"),
    ("pipeline", "treegraft_plugins.hf.generate"),
    ("front_door", "treegraft_plugins.hf.generate"),
    ("cli", "treegraft_plugins.hf.loading"),
    ("cli", "treegraft_plugins.hf.training.corpus"),
    ("cli", "treegraft_plugins.hf.training.course"),
    ("cli", "treegraft_plugins.hf.training.loop"),
    ("cli", "treegraft_plugins.hf.dflash.training"),
    ("cli", "treegraft_plugins.hf.heads.training"),
    ("cli", "treegraft_plugins.blocktree.distil.offline"),
    ("cli", "treegraft_plugins.blocktree.distil.training"),
    ("cli", "treegraft_plugins.collection"),
    ("cli", "treegraft_plugins.saba.offline"),
    ("cli", "treegraft_plugins.schedulers.distilled"),
    ("cli", "treegraft_plugins.schedulers.distilled.fit"),
    ("cli", "treegraft_plugins.schedulers.distilled.offline"),
    ("cli", "treegraft_plugins.schedulers.distilled.report"),
    ("cli", "treegraft_plugins.schedulers.distilled.signals"),
    ("cli", "treegraft_plugins.schedulers.distilled.weights"),
    ("bench", "treegraft_plugins.hf.loading"),
    ("bench", "treegraft_plugins.hf.rivals"),
}


@attrs.frozen
class Import:
    """One imported module, and whether the import stands inside a function."""

    file: Path
    module: str
    names: tuple[str, ...]
    lazy: bool

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)} imports {self.module}{' (lazily)' if self.lazy else ''}"


def imports(folder: Path) -> list[Import]:
    found: list[Import] = []

    def visit(node: ast.AST, file: Path, lazy: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(file, alias.name, (), lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file}: a relative import"
            names = tuple(alias.name for alias in node.names)
            if node.module in ("treegraft", "treegraft_plugins"):
                found.extend(Import(file, f"{node.module}.{name}", (name,), lazy) for name in names)
            else:
                found.append(Import(file, node.module or "", names, lazy))
        inside = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            visit(child, file, inside)

    for file in sorted(folder.rglob("*.py")):
        visit(ast.parse(file.read_text()), file, False)
    return found


def core_module(file: Path) -> str:
    """`tree` of core/treegraft/tree.py, `cli` of core/treegraft/cli/run.py."""
    return file.relative_to(CORE).parts[0].removesuffix(".py")


CORE_IMPORTS, PLUGIN_IMPORTS = imports(CORE), imports(PLUGINS)


def test_every_module_of_core_has_its_level():
    modules = {core_module(file) for file in CORE.rglob("*.py")}
    assert modules <= set(LEVEL) | FREE
    assert len(modules) > 10, "the walk found core"


def test_imports_in_core_run_one_way():
    wrong = []
    for each in CORE_IMPORTS:
        if not each.module.startswith("treegraft."):
            continue
        importer, imported = core_module(each.file), each.module.split(".")[1]
        within_folder = importer == imported and importer in ("bench", "cli", "replay", "testing")
        limit = LEVEL["cli"] if importer in FREE else LEVEL[importer]
        if not within_folder and (imported not in LEVEL or LEVEL[imported] >= limit):
            wrong.append(str(each))
    assert not wrong
    assert any(each.module == "treegraft.tree" for each in CORE_IMPORTS), "the walk found imports"


def test_core_knows_no_plugin_and_no_transformers():
    wrong = [
        each
        for each in CORE_IMPORTS
        if each.module.split(".")[0] in ("treegraft_plugins", "transformers")
        and not (each.lazy and (core_module(each.file), each.module) in LAZY_EXEMPTIONS)
    ]
    assert not [str(each) for each in wrong]


def test_only_hf_imports_transformers():
    users = {each.file for each in PLUGIN_IMPORTS if each.module.split(".")[0] == "transformers"}
    assert users, "the walk found its users"
    assert not [str(file) for file in users if not file.is_relative_to(PLUGINS / "hf")]


def test_plugins_use_public_names_of_treegraft():
    wrong = [
        str(each)
        for each in PLUGIN_IMPORTS
        if each.module.split(".")[0] == "treegraft"
        and any(part.startswith("_") for part in (*each.module.split("."), *each.names))
    ]
    assert not wrong
    assert not [str(each) for each in PLUGIN_IMPORTS if each.module.startswith(("treegraft.cli", "treegraft.testing"))]


@pytest.mark.parametrize("statement", ["import treegraft", "import treegraft_plugins", "import treegraft.cli"])
def test_importing_brings_in_no_transformers(statement):
    code = f"{statement}; import sys; print([name for name in ('transformers', 'matplotlib') if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_the_front_page_names_what_there_is():
    import treegraft

    assert "load" in treegraft.__all__
    assert all(hasattr(treegraft, name) for name in treegraft.__all__)
