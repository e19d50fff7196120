"""Fitting edge scorers: what traces hold, what the losses are, that there is something to learn and it is learnt."""

import json
import re
from functools import cache

import attrs
import numpy as np
import pytest
import torch
from edge_world import FORKS, ChainDrafter, EmbeddedTarget

import treegraft
from treegraft.errors import RequestError
from treegraft.registry import packaged_registry
from treegraft.sampling import Scores
from treegraft.tree import DraftTree, Expansion
from treegraft_plugins.blocktree.distil.offline import EdgeFit
from treegraft_plugins.blocktree.distil.report import Judgement, best, rows
from treegraft_plugins.blocktree.distil.traces import Traces, mismatches, traced, watched_rounds
from treegraft_plugins.blocktree.distil.training import Batch, Distillation, Pupil, TowersNetwork, fit_bigram
from treegraft_plugins.blocktree.edges import CompatibilityScorer, IdentityScorer, Towers
from treegraft_plugins.collection import Text
from treegraft_plugins.costs import FixedCosts
from treegraft_plugins.fitted import read_arrays, read_header
from treegraft_plugins.hf.training.loop import Schedule

V = 7
TABLE = FORKS
LOG_PROBS = TABLE - np.log(np.exp(TABLE).sum(-1, keepdims=True))
TEXTS = [Text(f"text {number}", ("even", "odd")[number % 2], (number % V, 1)) for number in range(9)]
HELD_OUT = [Text("x", "even", (0, 2)), Text("y", "odd", (1, 2))]


def pipeline(nodes=12):
    return treegraft.load(
        "ddtree", "costs={use: fixed}", f"budget={{use: fixed, verify_nodes: {nodes}}}", "calibration=off",
        registry=packaged_registry(),
        models={"target": EmbeddedTarget(TABLE), "dflash": ChainDrafter(TABLE)},
    )  # fmt: skip


@cache
def traces():
    return Traces.joined([traced(pipeline(), text, 24, 1.0, seed=3) for text in TEXTS])


# -- traces -----------------------------------------------------------------------------------------------------------


def test_a_trace_is_what_the_target_says_under_every_drafted_parent():
    found = traces()
    tokens, log_prob = found.candidates(np.arange(len(found)))
    assert len(found) > 100 and set(found.place.tolist()) == {0, 1, 2}
    np.testing.assert_allclose(found.target_log_prob, LOG_PROBS[found.parent[:, None], tokens], atol=1e-2)
    assert np.array_equal(found.next_token, LOG_PROBS.argmax(-1)[found.parent])
    assert (np.diff(log_prob, axis=1) <= 0).all() and (np.exp(log_prob).sum(-1) < 1 + 1e-6).all()
    roots = found.place == 0
    assert roots.any() and not found.path_log_prob[roots].any() and (found.path_log_prob[~roots] < 0).all()


def test_parents_are_the_nodes_of_the_tree_that_the_pipeline_verified():
    text = TEXTS[2]
    part = traced(pipeline(), text, 9, 1.0, seed=3)
    drafting = [
        record.pruned
        for record, _ in watched_rounds(pipeline(), IdentityScorer(), text, 9, 1.0, 3)
        if len(record.pruned) > 1
    ]
    num_places = (part["log_prob"] > -1e4).any(-1).sum(-1)
    assert len(drafting) == len(num_places) > 1
    for number, tree in enumerate(drafting):
        above = tree.depth < num_places[number]
        assert part["parent"][part["anchor"] == number].tolist() == tree.token[above].tolist()
        assert part["place"][part["anchor"] == number].tolist() == tree.depth[above].tolist()
    path = np.exp(part["path_log_prob"])
    assert (path <= 1).all() and len(part["parent"]) == len(part["next_token"])


def test_texts_in_which_nothing_is_drafted_are_refused():
    with pytest.raises(RequestError, match="nothing was drafted"):
        Traces.joined([traced(pipeline(), TEXTS[0], 1, 1.0, seed=3)])


def test_an_edge_is_mismatched_where_another_parent_of_the_depth_has_the_child():
    # root 0 -> 1, 2; below 1: 3 and 4; below 2: 3, 4 and 5.
    expansion = Expansion(
        anchor=[0, 0, -1, -1, -2, -2, -2], token=[1, 2, 3, 4, 3, 4, 5], log_prob=np.full(7, -1.0)
    )  # fmt: skip
    tree = DraftTree.rooted(0).append(expansion, 0, (True,))
    said = {0: 1, 1: 3, 2: 4}  # the target's next token after each token
    logits = torch.zeros(len(tree), V)
    for row, token in enumerate(tree.token.tolist()):
        logits[row, said.get(token, 6)] = 1.0
    # Mismatched: 4 below 1 and 3 below 2. Nobody says 5; 3 below 1 and 4 below 2 are right; depth 1 does not count.
    assert mismatches(tree, Scores(logits)) == (2, 5)


# -- what is learnt ---------------------------------------------------------------------------------------------------


def test_the_table_of_pairs_orders_children_by_how_much_the_parent_speaks_for_them():
    table = fit_bigram(traces(), V, prior=1e-3)
    marginal = np.zeros(V)
    weighted = traces().weight[:, None] * np.exp(traces().target_log_prob)
    np.add.at(marginal, traces().candidates(np.arange(len(traces())))[0], weighted)
    expected = LOG_PROBS - np.log(marginal / marginal.sum())
    every = np.arange(V)
    found = table.compatibility(every[None, :], every[None, :])[0]
    for parent in range(V):
        seen = found[parent] > 2  # nats: beyond what the prior still bends
        if not seen.any():
            continue
        centred = [values[parent][seen] - values[parent][seen].mean() for values in (found, expected)]
        np.testing.assert_allclose(*centred, atol=0.3)


def test_the_losses_are_what_their_names_say():
    log_prob = torch.tensor([[0.5, 0.3, 0.2], [0.6, 0.3, 0.1]]).log()
    target = torch.tensor([[0.1, 0.6, 0.2], [0.2, 0.2, 0.1]]).log()
    batch = Batch(
        torch.zeros(2, dtype=torch.int64), torch.zeros(2, 1), torch.zeros(2, 3, 1), log_prob, target,
        next_column=torch.tensor([1, -1]), weight=torch.tensor([1.0, 3.0]),
    )  # fmt: skip
    compatibility = torch.tensor([[0.0, 1.0, -1.0], [2.0, 0.0, 0.0]])
    distribution, pairwise, edge = batch.losses(compatibility).tolist()
    scored = (log_prob.exp() * compatibility.exp()).numpy()
    scored /= scored.sum(-1, keepdims=True)
    wanted = target.exp().numpy()
    wanted /= wanted.sum(-1, keepdims=True)
    divergence, mass = (wanted * np.log(wanted / scored)).sum(-1), np.array([1.0 * 0.9, 3.0 * 0.5])
    assert distribution == pytest.approx((mass * divergence).sum() / mass.sum(), rel=1e-4)
    rivals = np.log1p(np.exp([0.0 - 1.0, -1.0 - 1.0]))
    assert pairwise == pytest.approx((0.5 * rivals[0] + 0.2 * rivals[1]) / 0.7, rel=1e-4)
    assert edge == pytest.approx(-np.log(scored[0, 1]), rel=1e-4)
    assert batch.agreement(compatibility) == 1.0 and batch.agreement(torch.zeros(2, 3)) == 0.0


def test_towers_in_training_are_the_towers_that_score():
    pupil = Pupil.of(traces(), EmbeddedTarget(TABLE))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = TowersNetwork(V, 3, 4, {})
        network.depth.data.normal_()
    batch = pupil.batch(np.arange(40))
    found = network(batch.place, batch.parent, batch.children).detach().numpy()
    towers = Towers.of(network.arrays(), EmbeddedTarget(TABLE))
    tokens, _ = traces().candidates(np.arange(40))
    for row in range(40):
        place = int(traces().place[row])
        parents, children = np.full((place + 1, 1), traces().parent[row]), np.tile(tokens[row], (place + 1, 1))
        np.testing.assert_allclose(towers.compatibility(parents, children)[place, 0], found[row], atol=2e-2)


# -- the whole --------------------------------------------------------------------------------------------------------


def fit(out, **changes) -> EdgeFit:
    return attrs.evolve(
        EdgeFit(
            pipeline=pipeline(nodes=6), texts=TEXTS, held_out=HELD_OUT,
            max_new_tokens=40, temperatures=(1.0,), seed=3, betas=(0.3, 1.0),
            distillation=Distillation(rank=8, batch=64),
            schedule=Schedule(steps=60, learning_rate=0.05, measure_every=30, save_every=20, warm_up=2),
            costs=FixedCosts(target={1: 5.0, 64: 20.0}), settings={"pipeline": "toy"}, out=out,
            progress=lambda *step: None, say=lambda line: None,
        ),
        **changes,
    )  # fmt: skip


class Stop(Exception):
    pass


def test_it_learns_what_the_target_follows_each_token_by(tmp_path):
    path = fit(tmp_path).run()
    found = {
        (row["scorer"], row["beta"]): row
        for row in json.loads((tmp_path / "report.json").read_text())
        if row["category"] == "all"
    }
    identity = found["identity", 0.0]
    for kind in ("tdes", "bigram"):
        assert found[kind, 1.0]["accepted"] > identity["accepted"] + 0.1
        assert found[kind, 1.0]["mismatch_rate"] < 0.6 * identity["mismatch_rate"]
        assert read_header(tmp_path / f"{kind}.safetensors")["beta"] > 0
    curve = [json.loads(line) for line in (tmp_path / "curve.jsonl").read_text().splitlines()]
    assert curve[-1]["distribution"] < 0.5 * curve[-1]["distribution before"]
    assert curve[-1]["agreement"] > curve[-1]["agreement before"]
    assert re.search(r"tdes: beta (0\.3|1) is the best on 2 other prompts", path.read_text())
    assert {row["category"] for row in json.loads((tmp_path / "report.json").read_text())} == {"all", "even", "odd"}


def test_weights_of_a_fit_serve_the_pipeline_that_they_were_fitted_to(tmp_path):
    fit(tmp_path).run()
    loaded = treegraft.load(
        "ddtree_tdes", "costs={use: fixed}", f"sources.dflash.edges.weights={tmp_path / 'tdes.safetensors'}",
        registry=packaged_registry(), models={"target": EmbeddedTarget(TABLE), "dflash": ChainDrafter(TABLE)},
    )  # fmt: skip
    (source,) = loaded.sources
    assert "weights tdes" in source.edge_scorer.note()
    assert not loaded.generate([1], 20).faults


def test_an_interrupted_fit_ends_where_an_uninterrupted_one_does(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    fit(whole).run()

    def stop_after(what, number):
        def progress(*step):
            if step[:2] == (what, number):
                raise Stop

        return progress

    def stop_at_half(line):
        if line.startswith("step 30/"):
            raise Stop

    for changes in (
        {"progress": stop_after("tracing (fit)", 3)}, {"say": stop_at_half}, {"progress": stop_after("reporting", 2)},
    ):  # fmt: skip
        with pytest.raises(Stop):
            fit(parts, **changes).run()
    made = sorted((parts / "traces" / "fit").glob("*.npz"))
    stamps = [path.stat().st_mtime_ns for path in made]
    fit(parts).run()
    assert stamps == [path.stat().st_mtime_ns for path in made], "nothing is made twice"
    for name in ("tdes.safetensors", "bigram.safetensors"):
        for array in read_arrays(whole / name):
            assert np.array_equal(read_arrays(whole / name)[array], read_arrays(parts / name)[array])
    assert (whole / "report.md").read_text() == (parts / "report.md").read_text()


def test_a_folder_of_another_fit_is_refused(tmp_path):
    fit(tmp_path).run()
    with pytest.raises(RequestError, match="pipeline: 'toy'; now 'other'"):
        fit(tmp_path, settings={"pipeline": "other"}).run()
    with pytest.raises(RequestError, match="other settings"):
        fit(tmp_path, distillation=Distillation(rank=9)).run()
    with pytest.raises(RequestError, match="at least two"):
        fit(tmp_path / "new", texts=TEXTS[:1]).run()


# -- the report -------------------------------------------------------------------------------------------------------


def judgement(scorer, beta, accepted):
    figures = np.array([[2, 10, 10 * accepted, 10, 100.0], [4, 10, 10 * accepted, 10, 100.0]])
    return Judgement(scorer, beta, figures)


def test_the_best_beta_has_the_greatest_accepted_length_and_zero_where_nothing_beats_the_drafter():
    judged = [judgement("identity", 0.0, 2.0), judgement("tdes", 0.2, 2.5), judgement("tdes", 0.4, 2.5),
              judgement("bigram", 0.2, 1.5)]  # fmt: skip
    assert best(judged, "tdes").beta == 0.2
    assert best(judged, "bigram").beta == 0.0


@pytest.mark.parametrize(("accepted", "beta"), [(2.49, 0.4), (2.46, 0.2)])
def test_of_betas_that_accept_about_as_much_the_one_with_the_fewest_mismatched_edges_is_best(accepted, beta):
    fewer = judgement("tdes", 0.4, accepted)
    fewer.figures[:, 0] /= 2
    judged = [judgement("identity", 0.0, 2.0), judgement("tdes", 0.2, 2.5), fewer]
    assert best(judged, "tdes").beta == beta


def test_rows_compare_with_the_identity_on_the_same_texts():
    judged = [judgement("identity", 0.0, 2.0), judgement("tdes", 0.2, 2.5)]
    found = rows(judged, ["a", "b"])
    assert [(row["category"], row["scorer"]) for row in found][:2] == [("all", "identity"), ("all", "tdes")]
    assert found[1]["accepted_ratio"]["value"] == found[1]["speed_ratio"]["value"] == pytest.approx(1.25)
    assert found[1]["mismatch_rate"] == pytest.approx(0.3) and found[1]["mismatch_change"] == pytest.approx(0.0)
    assert {row["num_texts"] for row in found if row["category"] != "all"} == {1}


def test_a_fitted_scorer_at_beta_zero_judges_as_the_identity():
    table = fit_bigram(traces(), V)
    text = TEXTS[0]
    found = [
        [done.pruned.token.tolist() for done, _ in watched_rounds(pipeline(), scorer, text, 20, 1.0, 3)]
        for scorer in (CompatibilityScorer(table, 0.0), IdentityScorer())
    ]
    assert found[0] == found[1]
