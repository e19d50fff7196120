"""Edge scorers: what the normalised form promises, tables against naive loops, and which weights they take."""

import numpy as np
import pytest
from edge_world import FORKS, ChainDrafter, EmbeddedTarget, save_pairs, save_towers, setting
from exactness.toy_block import TableBlockDrafter
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import treegraft
from treegraft.compose import resolve
from treegraft.errors import ComposeError, ModelError
from treegraft.registry import packaged_registry
from treegraft.testing import MarkovTarget, markov_table
from treegraft_plugins.blocktree import best_first, edges
from treegraft_plugins.blocktree.edges import BigramScorer, IdentityScorer, TDESScorer, mass_preserving

PLACES, WIDTH = 3, 4
LOG_PROBS = arrays(np.float64, (PLACES, WIDTH), elements=st.floats(-40.0, 3.0)).map(
    lambda logits: logits - np.log(np.exp(logits).sum(-1, keepdims=True) + 0.1)  # some mass lies elsewhere
)
COMPATIBILITIES = arrays(np.float32, (PLACES, WIDTH, WIDTH), elements=st.floats(-30.0, 30.0, width=32))
BETAS = st.sampled_from([0.0, 0.2, 1.0, 3.0])


# -- the normalised form ----------------------------------------------------------------------------------------------


@given(LOG_PROBS, COMPATIBILITIES, BETAS)
def test_edges_are_log_probabilities_and_every_parent_keeps_the_drafters_mass(log_prob, compatibility, beta):
    scores = mass_preserving(log_prob, compatibility, beta)
    assert scores.dtype == np.float64 and np.isfinite(scores).all() and (scores <= 0).all()
    np.testing.assert_allclose(np.exp(scores).sum(-1), np.exp(log_prob).sum(-1)[:, None].repeat(WIDTH, 1), rtol=1e-5)


@given(LOG_PROBS, COMPATIBILITIES, BETAS, st.integers(0, WIDTH - 1), st.floats(-20.0, 20.0))
def test_a_constant_added_to_a_parents_row_changes_nothing(log_prob, compatibility, beta, parent, constant):
    moved = compatibility.astype(np.float64)
    moved[:, parent] += constant
    before = mass_preserving(log_prob, compatibility.astype(np.float64), beta)
    np.testing.assert_allclose(mass_preserving(log_prob, moved, beta), before, atol=1e-5)


@given(LOG_PROBS, COMPATIBILITIES)
def test_beta_zero_is_the_identity(log_prob, compatibility):
    expected = IdentityScorer().score(np.zeros((PLACES, WIDTH), int), np.zeros((PLACES, WIDTH), int), log_prob)
    np.testing.assert_allclose(mass_preserving(log_prob, compatibility, 0.0), expected, atol=1e-9)


@given(LOG_PROBS, COMPATIBILITIES, BETAS)
def test_it_is_the_formula_written_out(log_prob, compatibility, beta):
    scores = mass_preserving(log_prob, compatibility, beta)
    for place in range(PLACES):
        drafted = np.exp(log_prob[place])
        for parent in range(WIDTH):
            factor = np.exp(beta * compatibility[place, parent].astype(np.float64))
            expected = np.log(drafted * factor) - np.log(drafted @ factor) + np.log(drafted.sum())
            np.testing.assert_allclose(scores[place, parent], expected, atol=1e-4)


@given(LOG_PROBS, COMPATIBILITIES, st.integers(1, 20), st.integers(0, 20))
def test_trees_under_scored_edges_are_nested(log_prob, compatibility, budget, more):
    scores = mass_preserving(log_prob, compatibility, 1.0)
    small, large = (best_first(log_prob, size, scores) for size in (budget, budget + more))
    assert np.array_equal(small.score, large.score[: len(small)])


# -- the tables -------------------------------------------------------------------------------------------------------


def bound(scorer, target=None):
    scorer.bind(setting(), "block")
    scorer.meet(target or EmbeddedTarget(markov_table(7)))
    return scorer


@pytest.fixture
def batch():
    """parents, children, log_prob of three places, one deeper than the weights' own."""
    rng = np.random.default_rng(1)
    children = np.array([rng.permutation(7)[:4] for _ in range(3)])
    parents = np.concatenate([np.full((1, 4), 6), children[:-1]])
    return parents, children, np.log(rng.dirichlet(np.ones(5), 3)[:, :4])


def test_towers_in_one_call_equal_a_naive_loop(tmp_path, batch):
    arrays = save_towers(tmp_path / "t.safetensors")
    scorer = bound(TDESScorer(str(tmp_path / "t.safetensors"), beta=0.7))
    parents, children, log_prob = batch
    embedded = np.eye(7) * np.sqrt(7)
    rows = np.zeros((3, 4, 4))
    for place in range(3):
        gamma = arrays["depth"][min(place, 1), 0]
        for p, parent in enumerate(parents[place]):
            for c, child in enumerate(children[place]):
                up, down = arrays["parent"] @ embedded[parent], arrays["child"] @ embedded[child]
                rows[place, p, c] = sum(up * gamma * down) / np.sqrt(3)
    np.testing.assert_allclose(scorer.score(*batch), mass_preserving(log_prob, rows, 0.7), atol=1e-4)


def test_pairs_in_one_call_equal_a_naive_loop(tmp_path, batch):
    known = {(6, 1): 2.0, (6, 3): 0.5, (2, 2): 1.0, (0, 6): 3.0, (5, 0): 0.25}
    save_pairs(tmp_path / "b.safetensors", known)
    scorer = bound(BigramScorer(str(tmp_path / "b.safetensors"), beta=1.5))
    parents, children, log_prob = batch
    rows = np.array(
        [[[known.get((p, c), 0.0) for c in children[d].tolist()] for p in parents[d].tolist()] for d in range(3)]
    )
    assert (rows > 0).any()
    np.testing.assert_allclose(scorer.score(*batch), mass_preserving(log_prob, rows, 1.5), atol=1e-6)


def test_a_table_without_pairs_leaves_everything_as_it_is(tmp_path, batch):
    save_pairs(tmp_path / "b.safetensors", {})
    scorer = bound(BigramScorer(str(tmp_path / "b.safetensors")))
    np.testing.assert_allclose(scorer.score(*batch), IdentityScorer().score(*batch), atol=1e-6)


def test_beta_is_the_fits_unless_the_pipeline_says_otherwise(tmp_path, batch):
    save_towers(tmp_path / "t.safetensors", beta=0.4)
    file = str(tmp_path / "t.safetensors")
    own, same, other = (bound(TDESScorer(file, beta)).score(*batch) for beta in (None, 0.4, 0.8))
    assert np.array_equal(own, same) and not np.allclose(own, other)


# -- which weights ----------------------------------------------------------------------------------------------------

SAVED = {"tdes": (TDESScorer, save_towers), "bigram": (BigramScorer, lambda path: save_pairs(path, {(1, 2): 1.0}))}
OTHER = {
    "drafter": {"sources": {"block": treegraft.interfaces.SourceSetting("another", 1, 32, 0)}},
    "target": {"target": "another"},
    "vocabulary": {"vocab_size": 9},
}


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """A folder in the place of what ships."""
    monkeypatch.setattr(edges, "SHELF", edges.Shelf("weights", tmp_path, "treegraft fit edges"))
    return tmp_path


@pytest.mark.parametrize("kind", SAVED)
@pytest.mark.parametrize("what", OTHER)
def test_weights_of_another_drafter_target_or_vocabulary_are_refused_and_passed_by(shipped, kind, what):
    scorer, save = SAVED[kind]
    save(shipped / "mine.safetensors")
    for weights in ("mine", str(shipped / "mine.safetensors")):
        with pytest.raises(ComposeError, match=rf"fitted for {what} .*, not (.|\n)*treegraft fit edges"):
            scorer(weights).bind(setting(**OTHER[what]), "block")
    auto = scorer()
    auto.bind(setting(**OTHER[what]), "block")
    assert auto.note().startswith("the drafter's own probabilities, because no weights that ship fit (mine are fitted")


@pytest.mark.parametrize("kind", SAVED)
def test_auto_takes_what_ships_for_the_pair_and_else_says_what_makes_some(shipped, kind, batch):
    scorer, save = SAVED[kind]
    auto = bound(scorer())
    assert auto.note().endswith("no weights that ship fit; treegraft fit edges makes some")
    assert np.array_equal(auto.score(*batch), IdentityScorer().score(*batch))
    save(shipped / "mine.safetensors")
    other, _ = SAVED["bigram" if kind == "tdes" else "tdes"]
    assert bound(scorer()).note() == "weights mine, beta 0.2"
    assert "mine are of " in bound(other()).note()


def test_weights_that_are_none_are_refused(tmp_path):
    (tmp_path / "text.safetensors").write_text("nothing")
    for name in ("text.safetensors", "missing"):
        with pytest.raises(ComposeError, match=r"no fitted weights(.|\n)*Allowed: auto"):
            TDESScorer(str(tmp_path / name)).bind(setting(), "block")


def test_towers_need_the_embeddings_that_they_project(tmp_path):
    save_towers(tmp_path / "t.safetensors", width=5)
    with pytest.raises(ModelError, match="width 5, and the target's are of width 7"):
        bound(TDESScorer(str(tmp_path / "t.safetensors")))
    with pytest.raises(ModelError, match="lends no embedding"):
        bound(TDESScorer(str(tmp_path / "t.safetensors")), MarkovTarget(markov_table(7)))


# -- in a pipeline ----------------------------------------------------------------------------------------------------


def test_a_pipeline_binds_its_scorer_and_drafts_by_its_scores(tmp_path):
    pairs = {(p, c): float(FORKS[p, c]) for p in range(7) for c in range(7)}
    save_pairs(tmp_path / "b.safetensors", pairs, target="", drafter="")

    def accepted(use):
        pipeline = treegraft.load(
            "ddtree", "costs={use: fixed}", "budget={use: fixed, verify_nodes: 6}", "calibration=off",
            f"sources.dflash.edges={{use: {use}}}", registry=packaged_registry(),
            models={"target": EmbeddedTarget(FORKS), "dflash": ChainDrafter(FORKS)},
        )  # fmt: skip
        result = pipeline.generate([0], 60, 1.0, seed=4)
        assert not result.faults
        return result.accepted_per_round

    weights = f"weights: {tmp_path / 'b.safetensors'}"
    assert accepted(f"bigram, {weights}, beta: 1.0") > accepted("identity") + 0.1
    assert accepted(f"bigram, {weights}, beta: 0") == accepted("identity")


def test_the_quick_toy_drafter_says_what_the_enumerating_one_says():
    table = markov_table(7, order=1, seed=2)
    np.testing.assert_allclose(ChainDrafter(table).marginals([3, 5]), TableBlockDrafter(table).marginals([3, 5]))


def test_a_pipelines_notes_say_what_its_scorer_does():
    resolved = resolve("ddtree", ["sources.dflash.edges={use: tdes}"], registry=packaged_registry())
    assert resolved.notes["sources.dflash.edges"].startswith(("weights ", "the drafter's own probabilities, because"))


def test_a_pipeline_with_weights_of_another_drafter_is_refused_by_name(tmp_path):
    save_towers(tmp_path / "t.safetensors")
    with pytest.raises(ComposeError, match=r"sources\.dflash\.edges: weights: .*fitted for target 'target'"):
        resolve(
            "ddtree", [f"sources.dflash.edges={{use: tdes, weights: {tmp_path / 't.safetensors'}}}"],
            registry=packaged_registry(),
        )  # fmt: skip
