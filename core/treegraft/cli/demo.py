"""`treegraft demo`: see several drafters grow one tree, and what that brings on this machine."""

from collections import Counter
from collections.abc import Sequence

import attrs
import click
from rich.console import Console

from treegraft.cli.comparison import REFERENCE, compare, comparison_table
from treegraft.cli.drawing import TARGET, Palette, most_telling, proposers, round_tree, stream_in_colours
from treegraft.cli.embedded import spare_threads
from treegraft.cli.quiet import quiet
from treegraft.compose import build, resolve
from treegraft.pipeline import Pipeline
from treegraft.registry import packaged_registry

SHOWN = "treegraft"
ARMS = (REFERENCE, "all_small", "all_middle", SHOWN)
DRAWN = "treegraft_fixed"  # whose middle is sure to come back to a tree that has grown without it
SAME_EVERYWHERE = ("costs={use: fixed}", "budget={use: fixed, verify_nodes: 63}")  # so that the same tree is drawn
MIDDLE = "middle"

PROMPTS = (
    """    def _read_chunk(self, size):
        data = self._file.read(size)
        if len(data) < size:
            raise EOFError("file ended inside a chunk")
        return data

    def _write_chunk(self, data):
""",
    '''def split_path(path):
    """Split a path into its directory and its name."""
    i = path.rfind("/") + 1
    head, tail = path[:i], path[i:]
''',
    """class QueueTest(unittest.TestCase):

    def test_put(self):
        queue = self.make_queue()
        queue.put(1)
        self.assertEqual(queue.size(), 1)
        self.assertFalse(queue.empty())

    def test_get(self):
""",
    '''def parse_header(line):
    """Split a header line into its name and its value.

    Raise ValueError if there is no colon in the line.
    """
''',
)


@attrs.frozen
class Plan:
    """How much is run: the completion that is shown, and the comparison."""

    shown_tokens: int
    num_prompts: int
    max_new_tokens: int
    repeats: int
    max_seconds: float


FULL = Plan(shown_tokens=64, num_prompts=4, max_new_tokens=128, repeats=5, max_seconds=120)
QUICK = Plan(shown_tokens=64, num_prompts=2, max_new_tokens=64, repeats=3, max_seconds=25)


def load_pipelines(overrides: Sequence[str]) -> dict[str, Pipeline]:
    """The pipelines of the demo, as treegraft ships them; they share the weights of their models."""
    changes = {**dict.fromkeys(ARMS, overrides), DRAWN: (*overrides, *SAME_EVERYWHERE)}
    resolved = [resolve(name, own, registry=packaged_registry()) for name, own in changes.items()]
    spare_threads(resolved[-1].models)
    return {pipeline.name: build(pipeline) for pipeline in resolved}


def show_completion(console: Console, pipeline: Pipeline, max_new_tokens: int) -> None:
    """Stream a completion in colours, and say who proposed how many of its tokens."""
    palette = Palette.of(pipeline.sources)
    records = stream_in_colours(console, pipeline, PROMPTS[0], max_new_tokens)
    counts = Counter(palette.name(source) for record in records for source in proposers(record))
    console.print()
    console.print("Proposed by:", palette.legend({name: counts[name] for name in [*palette.names.values(), TARGET]}))


def show_tree(console: Console, pipeline: Pipeline, max_new_tokens: int) -> None:
    """Draw the round of the same completion whose tree shows most."""
    records = list(pipeline.rounds(PROMPTS[0], max_new_tokens))
    record = most_telling(records)
    console.print(round_tree(record, records.index(record) + 1, pipeline))


@click.command()
@click.option("--quick", is_flag=True, help="Fewer and shorter runs: within 60 s on two cores.")
@click.argument("overrides", nargs=-1, metavar="[models.NAME=PATH]...")
def demo(quick: bool, overrides: tuple[str, ...]) -> None:
    """Show several drafters growing one tree, and what that brings.

    On the embedded models or on your own: a completion streamed in the colours of who proposed each token, one
    draft tree with what was rescored, pruned and accepted, and a comparison of plain decoding, each drafter alone,
    and both on one tree. Registry files of your own are ignored.

    \b
    treegraft demo --quick
    treegraft demo models.target=PATH models.middle=PATH
    """
    for text in overrides:
        if not text.startswith("models."):
            raise click.UsageError(f"{text}: only models can be changed here; `treegraft run` takes any KEY=VALUE.")
    plan = QUICK if quick else FULL
    console = Console(highlight=False)
    with quiet():
        pipelines = load_pipelines(overrides)
        console.rule(f"A completion by {SHOWN}")
        show_completion(console, pipelines[SHOWN], plan.shown_tokens)
        console.rule(f"A draft tree of {DRAWN}")
        show_tree(console, pipelines[DRAWN], plan.shown_tokens)
        console.rule("The same text, faster")
        with console.status("each pipeline in turn ..."):
            arms = compare(
                {name: pipelines[name] for name in ARMS}, PROMPTS[: plan.num_prompts], plan.max_new_tokens,
                plan.repeats, plan.max_seconds,
            )  # fmt: skip
    console.print(comparison_table(arms, MIDDLE))
    different = [name for name, arm in arms.items() if not arm.same_as(arms[REFERENCE])]
    if different:
        note = pipelines[REFERENCE].target.lossless_note
        click.echo(
            f"The text of {', '.join(different)} differs from {REFERENCE}'s" + (f" ({note})." if note else "."),
            err=True,
        )
        click.get_current_context().exit(1)
