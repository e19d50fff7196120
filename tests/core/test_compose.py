"""registry.yaml -> Pipeline: inheritance, overrides, interpolation, and every fault said at once."""

import textwrap
from pathlib import Path

import attrs
import pytest
import toy_plugin
from hypothesis import assume, given
from hypothesis import strategies as st
from omegaconf import OmegaConf

import treegraft
from treegraft.compose import build, resolve
from treegraft.errors import ComposeError, ModelError
from treegraft.interfaces import ModelSpec
from treegraft.plugins import Failure, Plugins, Provider
from treegraft.registry import Overrides, Registry, lay_over, packaged_registry
from treegraft.testing import MarkovTarget, TableDrafter


@pytest.fixture
def plugins():
    loaded = Plugins()
    loaded.add(toy_plugin, Provider("toys", "1.0"))
    loaded.freeze()
    toy_plugin.MADE.clear()
    return loaded


@pytest.fixture
def compose(tmp_path, plugins):
    """`compose("mine", "steps=3", own="mine: {extends: two}")`: resolve, on top of the toy registry."""

    def call(name, *overrides, own="", models=None, plugins=plugins):
        file = tmp_path / "registry.yaml"
        file.write_text(toy_plugin.REGISTRY + textwrap.indent(textwrap.dedent(own), "  "))
        return resolve(name, overrides, models=models, registry=file, plugins=plugins)

    return call


def arguments(resolved, path):
    return resolved.parts[path].arguments


# -- inheritance ------------------------------------------------------------------------------------------------------


def test_extends_merges_deeply_and_in_order(compose):
    resolved = compose("mine", own="mine: {extends: two, steps: 2, sources: {middle: {width: 6}}}")
    assert resolved.config["steps"] == 2
    assert list(resolved.sources) == ["small", "middle"]
    assert (resolved.sources["small"].width, resolved.sources["middle"].width) == (4, 6)
    assert (resolved.sources["middle"].rank, resolved.sources["middle"].rescore) == (1, True)
    assert resolved.sources["small"].branching == 10, "a default"
    assert arguments(resolved, "budget") == {"verify_nodes": 9}


def test_a_component_that_restates_use_replaces_and_one_that_does_not_is_merged(compose):
    restated = compose("mine", own="mine: {extends: two, sources: {middle: {draft: {use: toy_model, model: other}}}}")
    assert arguments(restated, "sources.middle.draft") == {"model": "other"}
    merged = compose("mine", own="mine: {extends: two, sources: {middle: {draft: {rescore_limit: 5}}}}")
    assert arguments(merged, "sources.middle.draft") == {"model": "middle", "rescore_limit": 5}


def test_lists_replace(compose):
    assert arguments(compose("two", "scheduler.pattern=[small]"), "scheduler") == {"pattern": ["small"]}


def test_abstract_is_not_inherited_and_not_run(compose):
    assert compose("one").name == "one"
    with pytest.raises(ComposeError, match=r"pipelines\.toys: abstract[\s\S]*`extends: toys`") as caught:
        compose("toys")
    assert "one, two" in str(caught.value)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ("mine: {extends: twoo}", r"pipelines\.mine\.extends: no pipeline named 'twoo'[\s\S]*Did you mean 'two'"),
        ("mine: {extends: yours}\nyours: {extends: mine}", r"yours\.extends: a circle: mine -> yours -> mine"),
        ("mine: {extends: mine}", "a circle: mine -> mine"),
        ("mine: [one]", r"pipelines\.mine: \['one'\]\n  Allowed: a mapping"),
        ("mine: {extends: [one, two]}", r"mine\.extends: \['one', 'two'\]\n  Allowed: the name of one pipeline"),
        ("mine: {extends: {one: 1}}", r"mine\.extends: \{'one': 1\}\n  Allowed: the name of one pipeline"),
        ("mine: {extends: 3}", r"mine\.extends: 3\n  Allowed: the name of one pipeline"),
    ],
)
def test_faulty_inheritance_is_refused(compose, own, message):
    with pytest.raises(ComposeError, match=message):
        compose("mine", own=own)


def test_an_unknown_pipeline_is_refused_with_what_there_is(compose):
    with pytest.raises(ComposeError, match=r"no pipeline named 'tow'.[\s\S]*treegraft,.*two. Did you mean 'two'"):
        compose("tow")


components = st.recursive(
    st.integers(0, 3) | st.lists(st.integers(0, 3), max_size=2),
    lambda below: (
        st.dictionaries(st.sampled_from("abc"), below, max_size=3)
        | st.builds(lambda use, rest: {"use": use, **rest}, st.sampled_from("xy"), st.dictionaries(st.just("a"), below))
    ),
    max_leaves=8,
)
mappings = st.dictionaries(st.sampled_from("abc"), components, max_size=3)


def kinds_agree(*layers):
    """Whether no key is a mapping in one layer and something else in another: what replaces has an order."""
    for key in {key for layer in layers for key in layer}:
        values = [layer[key] for layer in layers if key in layer]
        if len({isinstance(value, dict) for value in values}) > 1:
            return False
        if isinstance(values[0], dict) and not kinds_agree(*values):
            return False
    return True


@given(mappings, mappings, mappings)
def test_laying_over_goes_level_by_level_in_any_grouping(first, second, third):
    assume(kinds_agree(first, second, third))
    assert lay_over(first, {}) == lay_over({}, first) == first
    assert lay_over(lay_over(first, second), third) == lay_over(first, lay_over(second, third))


# -- overrides --------------------------------------------------------------------------------------------------------


def test_overrides_are_paths_inside_the_pipeline(compose):
    resolved = compose("two", "steps=5", "sources.middle.draft.rescore_limit=16", "costs={use: toy, target: 2.5}")
    assert resolved.config["steps"] == 5
    assert arguments(resolved, "sources.middle.draft") == {"model": "middle", "rescore_limit": 16}
    assert arguments(resolved, "costs") == {"target": 2.5}


def test_overrides_of_one_component_are_honoured_together_in_any_order(compose):
    for overrides in (["costs.target=2.5", "costs.use=toy"], ["costs.use=toy", "costs.target=2.5"]):
        assert arguments(compose("two", *overrides), "costs") == {"target": 2.5}
    for overrides in (["models.middle=here", "models.middle.dtype=float32"],) * 2:
        assert compose("two", *overrides).models["middle"] == ModelSpec("here", dtype="float32")
        overrides.reverse()


def test_a_model_override_replaces_the_path_and_what_belonged_to_it(compose):
    assert compose("one", "models.target=here").models["target"] == ModelSpec("here")
    assert compose("one", "models.target.dtype=float16").models["target"] == ModelSpec("toy:target", "float16")
    assert compose("two", "models.middle.dtype=float16").models["middle"] == ModelSpec("toy:middle", "float16")


def test_an_override_may_bring_a_model_of_its_own(compose):
    resolved = compose("two", "models.mine=there", "sources.middle.draft.model=mine")
    assert resolved.models["mine"] == ModelSpec("there")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("stepz=3", r"pipelines\.two\.stepz: no key named 'stepz'[\s\S]*Did you mean 'steps'"),
        ("sources.middle.widht=3", r"sources\.middle\.widht: no key[\s\S]*Did you mean 'width'"),
        ("sources.middle.draft.limit=3", r"draft\.limit: no argument named 'limit'[\s\S]*rescore_limit"),
        ("sources.midle.width=3", r"pipelines\.two\.sources\.midle: no source named[\s\S]*Did you mean 'middle'"),
        ("models.midle=x", r"models\.midle: no model named 'midle'[\s\S]*Did you mean 'middle'"),
        ("models.middle.dtpye=x", r"models\.middle\.dtpye: no field[\s\S]*Did you mean 'dtype'"),
        ("steps", "override 'steps': no KEY=VALUE"),
        ("=3", "override '=3': no KEY=VALUE"),
        ("sources..width=3", "no KEY=VALUE"),
        ("budget={use: [", "cannot be read"),
        ("extends=one", "settled in the file"),
        ("abstract=false", "settled in the file"),
        ("models=x", "override 'models=x'"),
        (
            "steps=2.5",
            r"pipelines\.two\.steps: Value '2\.5' of type 'float' could not be converted to Integer\n  Allowed: an int",
        ),
        ("steps=true", r"steps: Value 'True' of type 'bool'"),
        ("steps=0", r"steps: 0\n  Allowed: an int >= 1"),
        ("sources.small.width=0", r"width: 0\n  Allowed: an int >= 1"),
        ("budget=toy", r"pipelines\.two\.budget: Cannot assign str .*\n  Allowed: a mapping, such as \{use: NAME\}"),
        ("budget={verify_nodes: -1}", r"pipelines\.two\.budget: ValueError: .*verify_nodes.*-1"),
        ("calibration=maybe", "Allowed: on, off"),
    ],
)
def test_faulty_overrides_are_refused(compose, override, message):
    with pytest.raises(ComposeError, match=message):
        compose("two", override)


@pytest.mark.parametrize(
    ("written", "read"),
    [("on", "on"), ("off", "off"), ("true", "on"), ("false", "off"), ("'on'", "on"), ("'off'", "off")],
)
def test_calibration_may_be_written_as_yaml_reads_it(compose, written, read):
    assert compose("two", f"calibration={written}").config["calibration"] == read
    assert compose("mine", own=f"mine:\n  extends: two\n  calibration: {written}").config["calibration"] == read
    assert compose("two").config["calibration"] == "on"


# -- interpolation ----------------------------------------------------------------------------------------------------


def test_interpolations_see_overrides_and_the_environment(compose, monkeypatch):
    own = "mine: {extends: two, steps: '${oc.env:TOY_STEPS,4}', sources: {middle: {draft: {model: other}}}}"
    assert compose("mine", own=own).config["steps"] == 4
    monkeypatch.setenv("TOY_STEPS", "2")
    resolved = compose("mine", "models.middle=there", "models.middle.dtype=float16", own=own)
    assert resolved.config["steps"] == 2
    assert resolved.models == {
        "target": ModelSpec("toy:target", "float64"),
        "other": ModelSpec("there", "float16"),
    }
    resolved = compose("mine", "models.middle.dtype=float16", "models.other.device=cpu", own=own)
    assert resolved.models["other"] == ModelSpec("toy:middle", "float16", "cpu")


def test_an_interpolation_that_leads_nowhere_is_a_fault_at_its_place(compose, monkeypatch):
    monkeypatch.delenv("NOPE", raising=False)
    with pytest.raises(ComposeError) as caught:
        compose("two", "steps=${oc.env:NOPE}", "scheduler.pattern=[small,'${models.nope}']", "models.middle=${nope}")
    text = str(caught.value)
    assert "3 faults" in text
    assert "pipelines.two.steps: KeyError raised while resolving interpolation" in text and "NOPE" in text
    assert "pipelines.two.scheduler.pattern[1]: Interpolation key 'models.nope' not found" in text
    assert "models.middle.path: Interpolation key 'nope' not found" in text
    assert text.count("Allowed: ${models.NAME}, ${oc.env:NAME,DEFAULT}") == 3


@pytest.mark.parametrize("written", ["${models.nope}", "${oc.env:NOPE}", "${models.target}", "${nonsense:1}"])
def test_a_model_that_leads_nowhere_is_one_fault(plugins, tmp_path, monkeypatch, written):
    monkeypatch.delenv("NOPE", raising=False)
    own = tmp_path / "own.yaml"
    content = OmegaConf.to_container(OmegaConf.create(toy_plugin.REGISTRY))
    content["models"]["target"] = written
    own.write_text(OmegaConf.to_yaml(content))
    with pytest.raises(ComposeError, match=r"^models\.target: .*\n  Allowed: \$\{models\.NAME\}"):
        resolve("one", registry=own, plugins=plugins)


def test_an_interpolation_that_is_none_is_refused(compose):
    with pytest.raises(ComposeError, match=r"override 'steps=\$\{a': a value that cannot be read \(.*'\$\{a'"):
        compose("two", "steps=${a")
    with pytest.raises(ComposeError, match=r"registry\.yaml: pipelines\.other\.steps: cannot be read \(.*'\$\{a'"):
        compose("two", own="other: {steps: '${a'}")
    with pytest.raises(ComposeError, match=r"models\.target\.path: .*'\$\{a'"):
        compose("two", models={"target": "${a"})


def test_what_a_pipeline_does_not_use_is_not_even_read(compose):
    resolved = compose("one", "models.middle=${nope}", own="broken: {extends: nothing, steps: '${nope}'}")
    assert set(resolved.models) == {"target"}


# -- components -------------------------------------------------------------------------------------------------------


def test_a_part_knows_its_class_and_who_provides_it(compose):
    part = compose("two").parts["sources.middle.draft"]
    assert (part.use, part.cls, str(part.provider)) == ("toy_model", toy_plugin.ToyDrafter, "toys 1.0")
    assert part.where == "pipelines.two.sources.middle.draft"


def test_a_missing_name_is_refused_with_known_ones_a_suggestion_and_what_failed_to_load(compose, plugins):
    plugins.failures.append(Failure(Provider("treegraft-medusa", "0.2"), ImportError("No module named 'bitsandbytes'")))
    with pytest.raises(ComposeError) as caught:
        compose("two", "sources.middle.draft={use: toy_modle, model: middle}")
    assert str(caught.value) == textwrap.dedent("""\
        pipelines.two.sources.middle.draft: no drafter named 'toy_modle'.
          Known drafters: toy_block, toy_lookup, toy_model, toy_sampler (toys 1.0). Did you mean 'toy_model'?
          Not loaded: treegraft-medusa 0.2 (ImportError: No module named 'bitsandbytes')""")


def test_use_is_never_a_path_to_code(compose):
    with pytest.raises(ComposeError, match=r"no drafter named 'toy_plugin\.ToyDrafter'"):
        compose("two", "sources.middle.draft={use: toy_plugin.ToyDrafter, model: middle}")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sources.small.draft={use: toy_lookup, max_m: 3}", r"max_m: no argument[\s\S]*Did you mean 'max_n'"),
        ("sources.middle.draft={use: toy_model}", r"draft: no 'model'\.\n  Arguments: max_length, model,"),
        ("scheduler={use: toy}", r"scheduler: no 'pattern'\."),
        ("sources.small.draft.max_n=0", r"pipelines\.two\.sources\.small\.draft: ValueError: 'max_n' must be >= 1: 0"),
        ("sources.small.draft.max_n=many", r"sources\.small\.draft: TypeError"),
        ("scheduler.pattern=[midle]", r"pipelines\.two\.scheduler: pattern: no source named 'midle'"),
        ("budget={verify_nodes: 3, use: 5}", r"budget: no budget named 5"),
        ("pruner={limit: 3, use: null}", r"pruner: no pruner named None"),
    ],
)
def test_faulty_components_are_refused(compose, override, message):
    with pytest.raises(ComposeError, match=message):
        compose("two", override)


def test_all_faults_are_shown_together(compose):
    with pytest.raises(ComposeError) as caught:
        compose(
            "mine",
            own="""
            mine:
              extends: two
              stepz: 3
              pruner: {use: top}
              budget: {verify_nodes: -1}
              scheduler: {pattern: [nobody]}
              sources:
                small: {draft: {max_m: 3}, rescore: true, width: wide}
                middle: {draft: {use: toy_model, model: nothing}}
            """,
        )
    text = str(caught.value)
    assert text.startswith("pipelines.mine: 8 faults\n  pipelines.mine.stepz: ")
    for place in ("stepz", "pruner", "budget", "scheduler: pattern"):
        assert f"\n  pipelines.mine.{place}: " in text, place
    for place in ("small.draft.max_m", "small.width", "small.rescore", "middle.draft.model"):
        assert f"\n  pipelines.mine.sources.{place}: " in text, place


def test_a_pipeline_that_names_nothing_is_told_what_it_lacks(compose):
    with pytest.raises(ComposeError) as caught:
        compose("mine", own="mine: {sources: {only: {}}}", models={"target": MarkovTarget(toy_plugin.TABLE)})
    text = str(caught.value)
    for part in (
        "scheduler",
        "budget",
        "pruner",
        "verifier",
        "costs",
        *(f"sources.only.{k}" for k in ("draft", "select", "graft")),
    ):
        assert f"pipelines.mine.{part}: no " in text, part
    assert "Write costs: {use: NAME}." in text
    assert "edges" not in text


def test_what_does_not_suit_each_other_is_refused(compose):
    with pytest.raises(ComposeError, match=r"sources\.small\.rescore: the drafter 'toy_lookup' does not rescore"):
        compose("two", "sources.small.rescore=true")
    with pytest.raises(ComposeError, match=r"sources\.small\.edges: the drafter 'toy_lookup' takes no edge scorer"):
        compose("two", "sources.small.edges={use: toy}")
    with pytest.raises(ComposeError, match=r"'toy_sampler' makes sampled proposals.*'toy_match' would not keep"):
        compose("two", "sources.small.draft={use: toy_sampler}")


DRAWN = """
drawn:
  extends: one
  sources: {small: {draft: {use: toy_sampler}}}
  verifier: {use: toy_block_verifier}
  budget: {use: toy_whole}
"""


def test_sampled_proposals_ask_for_a_verifier_a_budget_and_to_be_alone(compose):
    """Each by name and with its reason; what suits them is accepted."""
    assert compose("drawn", own=DRAWN).lossless and not compose("drawn", own=DRAWN).repeats_plain
    other = "sources.other={draft: {use: toy_sampler}, select: {use: toy}, graft: {use: toy}}"
    for override, message in {
        "verifier={use: toy_match}": r"small\.draft: 'toy_sampler' makes sampled.*'toy_match' would not",
        "sources.small.draft={use: toy_lookup}": r"'toy_lookup' makes deterministic.*'toy_block_verifier' would not",
        "budget={use: toy}": r"drawn\.budget: 'toy' leaves out nodes by their scores.*would bias.*budget=\{use: fixed",
        other: r"drawn\.sources: 2 of them, and 'toy_sampler'.*without bias",
    }.items():
        with pytest.raises(ComposeError, match=f"(?s){message}"):
            compose("drawn", override, own=DRAWN)
    for part in ("verifier={use: toy_match}", "budget={use: toy}"):  # both are said at once
        with pytest.raises(ComposeError, match=r"[23] faults"):
            compose("drawn", part, other, own=DRAWN)


def test_what_does_suit_is_accepted(compose):
    resolved = compose("two", "sources.small={draft: {use: toy_block}, edges: {use: toy}}")
    assert resolved.parts["sources.small.edges"].cls is toy_plugin.ToyEdges
    assert compose("two").lossless
    lossy = compose("two", "sources.small.draft={use: toy_sampler}", "verifier={use: toy}")
    assert not lossy.lossless


# -- models -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("83", r"models\.middle\.path: 83\n  Allowed: a string, in quotes"),
        ("{path: x, revision: 0123}", r"models\.middle\.revision: 83\n  Allowed: a string, in quotes"),
        ("{path: x, trust_remote_code: 'yes'}", r"trust_remote_code: 'yes'\n  Allowed: true or false"),
        ("{path: null}", r"models\.middle\.path: None"),
        ("null", r"models\.middle\.path: None"),
        ("[a, b]", r"models\.middle\.path: \['a', 'b'\]"),
    ],
)
def test_faulty_models_are_refused(compose, written, message):
    with pytest.raises(ComposeError, match=message):
        compose("two", f"models.middle={written}")


def test_a_model_without_a_path_is_refused(compose):
    with pytest.raises(ComposeError, match=r"models\.extra: no path"):
        compose("two", "models.extra.dtype=float32", "sources.middle.draft.model=extra")


def test_an_unknown_model_is_refused_where_it_is_named(compose):
    with pytest.raises(ComposeError, match=r"middle\.draft\.model: no model named 'midle'[\s\S]*Did you mean 'middle'"):
        compose("two", "sources.middle.draft.model=midle")
    with pytest.raises(ComposeError, match=r"middle\.draft\.model: no model named 3"):
        compose("two", "sources.middle.draft.model=3")


def test_the_caller_may_give_paths_and_models_in_place_of_the_registrys(compose):
    loaded = object()
    resolved = compose("two", models={"target": Path("here"), "middle": loaded, "other": object()})
    assert resolved.models == {"target": ModelSpec("here"), "middle": loaded}
    # The other is written as `${models.middle}`.
    resolved = compose("two", "sources.middle.draft.model=other", models={"middle": loaded})
    assert resolved.models["other"] is loaded


@pytest.mark.parametrize(
    ("override", "found"),
    [
        ("temperature=.nan", r"temperature: got nan; allowed: a finite number"),
        ("rescore_limit=-1", r"rescore_limit: got -1; allowed: an int >= 1"),
        ("vocabulary=foo", r"'vocabulary' must be in"),
        ("self_check=3", r"self_check: got 3; allowed: true or false"),
    ],
)
def test_what_a_part_with_a_model_refuses_shows_before_the_model_is_loaded(override, found):
    key = "sources.middle.draft"
    with pytest.raises(ComposeError, match=rf"pipelines\.treegraft\.{key}: .*{found}"):
        resolve("treegraft", [f"{key}.{override}", "models.middle=/nowhere"], registry=packaged_registry())
    with pytest.raises(ComposeError, match=r"2 faults[\s\S]*stepz[\s\S]*got nan"):
        resolve("treegraft", ["stepz=3", f"{key}.temperature=.nan"], registry=packaged_registry())


@attrs.define(eq=False)
class Comparing(treegraft.Drafter):
    """Whose validator reads another field."""

    model: object
    least: int = 1
    most: int = attrs.field(default=2)

    @most.validator
    def _at_least(self, field, value):
        if value < self.least:
            raise ValueError("most below least")

    def draft(self, request):
        return treegraft.Expansion.empty()


def test_a_validator_that_reads_other_fields_waits_until_the_part_is_made(compose):
    loaded = Plugins()
    loaded.add(toy_plugin, Provider("toys", "1.0"))
    comparing = type("module", (), {"treegraft_register": staticmethod(treegraft.hookimpl(_registers))})
    loaded.add(comparing, Provider("comparing"))
    overrides = ("sources.middle.draft={use: comparing, model: middle, most: 0}", "sources.middle.rescore=false")
    resolved = compose("two", *overrides, plugins=loaded)
    with pytest.raises(ModelError, match="most below least"):
        resolved.parts["sources.middle.draft"].make({"middle": object()})


def _registers(register):
    register("comparing", Comparing)


@pytest.mark.parametrize("plugins", ["loaded_by_name", ["loaded_by_name"]])
def test_load_takes_unpackaged_plugins_by_name(plugins, tmp_path, monkeypatch):
    (tmp_path / "loaded_by_name.py").write_text(Path(toy_plugin.__file__).read_text())
    (tmp_path / "registry.yaml").write_text(toy_plugin.REGISTRY)
    monkeypatch.syspath_prepend(tmp_path)
    target = MarkovTarget(toy_plugin.TABLE)
    options = {"models": {"target": target}, "registry": tmp_path / "registry.yaml"}
    pipeline = treegraft.load("one", plugins=plugins, **options)
    assert type(pipeline.sources[0].drafter).__module__ == "loaded_by_name"
    with pytest.raises(treegraft.PluginError, match="'nowhere': cannot be imported"):
        treegraft.load("one", plugins=["nowhere"], **options)


def test_models_that_the_registry_does_not_know_are_refused(compose):
    with pytest.raises(ComposeError, match=r"models\.taget: no model named 'taget'[\s\S]*Did you mean 'target'"):
        compose("two", models={"taget": object()})
    with pytest.raises(ComposeError, match=r"models\.target: None"):
        compose("two", models={"target": None})


@pytest.mark.parametrize("name", ["target", "prefill", "framework"])
def test_a_source_is_not_named_as_reports_name_other_things(compose, name):
    source = "{draft: {use: ngram}, select: {use: newest}, graft: {use: non_destructive}}"
    with pytest.raises(ComposeError, match=rf"sources\.{name}: a name that reports give"):
        compose("two", f"sources.{name}={source}")


def test_the_caller_may_give_a_target_and_drafters_themselves(compose):
    target, drafter = MarkovTarget(toy_plugin.TABLE), TableDrafter(toy_plugin.TABLE)
    resolved = compose("two", models={"target": target, "middle": drafter})
    assert resolved.models == {}, "nothing is left to load"
    assert str(resolved.parts["target"].provider) == "the caller"
    pipeline = build(resolved)
    assert pipeline.target is target
    assert pipeline.sources[1].drafter is drafter
    assert toy_plugin.MADE == []


def test_objects_in_the_wrong_place_are_refused(compose):
    target, drafter = MarkovTarget(toy_plugin.TABLE), TableDrafter(toy_plugin.TABLE)
    with pytest.raises(ComposeError, match=r"target\.model: models\['target'\] is a TableDrafter, no model for"):
        compose("two", models={"target": drafter})
    with pytest.raises(ComposeError, match=r"draft\.model: models\['middle'\] is a MarkovTarget[\s\S]*or a Drafter"):
        compose("two", models={"middle": target})
    with pytest.raises(ComposeError, match=r"rescore: the drafter 'toy_model' does not rescore"):
        compose("two", models={"middle": toy_plugin.ToyLookup()})
    second = "sources.small={draft: {use: toy_model, model: middle}}"
    with pytest.raises(ComposeError, match=r"middle\.draft: the Drafter object that .*sources\.small\.draft has"):
        compose("two", second, models={"middle": drafter})


DEMO = "models={target: demo:target, middle: demo:middle}"


def test_the_embedded_drafter_goes_with_the_embedded_target_only(compose):
    assert compose("two", DEMO).models["middle"] == ModelSpec("demo:middle")
    assert compose("two", DEMO, "models.target.dtype=float32").models["target"].path == "demo:target"
    refusal = r"two\.sources\.middle\.draft\.model: demo:middle, .*the target is {}\.[\s\S]*models\.middle=PATH"
    with pytest.raises(ComposeError, match=refusal.format("mine")):
        compose("two", DEMO, "models.target=mine")
    with pytest.raises(ComposeError, match=refusal.format("mine")):
        compose("two", DEMO, models={"target": "mine"})
    with pytest.raises(ComposeError, match=refusal.format("a MarkovTarget object")):
        compose("two", DEMO, models={"target": MarkovTarget(toy_plugin.TABLE)})
    with pytest.raises(ComposeError, match=refusal.format("a dict object")):
        compose("two", DEMO, models={"target": {}})
    assert compose("two", DEMO, "models.target=mine", "models.middle=yours").models["middle"].path == "yours"
    assert compose("one", DEMO, "models.target=mine").models == {"target": ModelSpec("mine")}


def test_the_environment_drops_the_embedded_drafter_too(plugins, monkeypatch, tmp_path):
    own = tmp_path / "own.yaml"
    own.write_text(
        OmegaConf.to_yaml({"pipelines": OmegaConf.to_container(OmegaConf.create(toy_plugin.REGISTRY))["pipelines"]})
    )
    assert resolve("two", registry=own, plugins=plugins).models["middle"].path == "demo:middle"
    monkeypatch.setenv("TREEGRAFT_TARGET", "mine")
    with pytest.raises(ComposeError, match=r"demo:middle, .*the target is mine\.[\s\S]*models\.middle=PATH"):
        resolve("two", registry=own, plugins=plugins)
    monkeypatch.setenv("TREEGRAFT_MIDDLE", "yours")
    assert resolve("two", registry=own, plugins=plugins).models["middle"].path == "yours"


# -- building ---------------------------------------------------------------------------------------------------------


def test_resolving_loads_nothing_and_building_loads_the_target_first(compose):
    resolved = compose("two")
    assert toy_plugin.MADE == []
    build(resolved)
    assert [
        ("ToyTarget", ModelSpec("toy:target", "float64")), ("ToyDrafter", ModelSpec("toy:middle")),
    ] == toy_plugin.MADE  # fmt: skip


def test_sources_are_numbered_as_written_and_overrule_lower_ranks_and_themselves(compose):
    third = "sources.third={draft: {use: toy_lookup}, select: {use: toy}, graft: {use: toy}, rank: 1, branching: 2}"
    pipeline = build(compose("two", third))
    assert [(s.name, s.index, s.rank, s.width, s.branching) for s in pipeline.sources] == [
        ("small", 0, 0, 4, 10), ("middle", 1, 1, 10, 10), ("third", 2, 1, 10, 2),
    ]  # fmt: skip
    assert [s.overrules for s in pipeline.sources] == [(True, False, False), (True, True, False), (True, False, True)]
    assert pipeline.sources[0].drafter.max_n == 3
    assert pipeline.sources[1].rescore and not pipeline.sources[0].rescore


def test_a_composed_pipeline_generates(compose):
    pipeline = build(compose("two", "calibration=off"))
    assert not pipeline.calibration
    generation = pipeline.generate([1, 2, 3], max_new_tokens=12)
    assert len(generation.token_ids) == 12
    assert generation.source_calls["middle"] > 0 < generation.source_calls["small"]
    assert generation.accepted_per_round > 1, "the toy middle drafts what the toy target says"


def test_a_model_that_cannot_be_loaded_is_told_with_the_place(compose):
    resolved = compose("two", "models.target=broken")
    with pytest.raises(ModelError, match=r"pipelines\.two\.target: OSError: cannot read broken"):
        build(resolved)


def test_rounds_are_observed_where_a_plugin_asks(compose):
    loaded, seen = Plugins(), []
    loaded.add(toy_plugin, Provider("toys", "1.0"))
    assert build(compose("one", plugins=loaded)).on_round is None

    class Watcher:
        @treegraft.hookimpl
        def treegraft_round_finished(self, record):
            seen.append(record)

    loaded.add(Watcher(), Provider("watcher"))
    generation = build(compose("one", plugins=loaded)).generate([1], max_new_tokens=4)
    assert len(seen) == generation.num_rounds > 0


# -- files ------------------------------------------------------------------------------------------------------------


def test_a_users_file_is_laid_over_the_packaged_registry(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Registry.read().files == (packaged_registry(),)
    own = Path("registry.yaml")
    own.write_text("pipelines: {mine: {extends: treegraft, steps: 2}, base: {costs: {use: fixed}}}")
    registry = Registry.read()
    assert registry.files == (packaged_registry(), own)
    mine = registry.composed("mine", Overrides()).pipelines["mine"]
    assert (mine["steps"], mine["costs"], mine["scheduler"]) == (2, {"use": "fixed"}, {"use": "distilled"})
    other = tmp_path / "other.yaml"
    other.write_text("models: {target: mine}")
    assert Registry.read(other).files == (packaged_registry(), other), "a named file takes the place of ./registry.yaml"
    assert Registry.read(packaged_registry()).files == (packaged_registry(),), "no other then"
    monkeypatch.chdir(packaged_registry().parent)
    assert Registry.read().files == (packaged_registry(),), "never laid over itself"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("pipelines: {a: [", r"own\.yaml: cannot be read"),
        ("pipelines: {a: 1, a: 2}", "duplicate key a"),
        ("pipeline: {}", r"own\.yaml: unknown section 'pipeline'[\s\S]*Did you mean 'pipelines'"),
        ("[a, b]", r"own\.yaml"),
        ("models: [a]", r"own\.yaml: models: not a mapping"),
        ("pipelines: {1: {}}", r"own\.yaml: pipelines: not a mapping of names"),
        ("pipelines: ", r"own\.yaml: pipelines: not a mapping"),
    ],
)
def test_faulty_files_are_refused(tmp_path, content, message):
    own = tmp_path / "own.yaml"
    own.write_text(content)
    with pytest.raises(ComposeError, match=message):
        Registry.read(own)


def test_a_missing_file_is_refused_and_an_empty_one_is_not(tmp_path):
    with pytest.raises(ComposeError, match=r"nowhere\.yaml: no such file"):
        Registry.read(tmp_path / "nowhere.yaml")
    empty = tmp_path / "empty.yaml"
    empty.write_text("")
    assert Registry.read(empty).pipelines == Registry.read(packaged_registry()).pipelines


def test_load_takes_it_all(tmp_path, plugins, monkeypatch):
    own = tmp_path / "own.yaml"
    own.write_text(toy_plugin.REGISTRY)
    monkeypatch.setattr("treegraft.compose.installed_plugins", lambda: plugins)
    tokenizer = object()
    pipeline = treegraft.load("two", "steps=2", models={"middle": "there"}, tokenizer=tokenizer, registry=own)
    assert pipeline.name == "two" and pipeline.tokenizer is tokenizer
    assert toy_plugin.MADE[1] == ("ToyDrafter", ModelSpec("there"))


def test_values_are_frozen(compose):
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        compose("one").name = "two"
