"""hf_causal_lm drafts: exact log probabilities whatever was forwarded, kept, grafted or accepted before, at one forward
a node.

A `Session` plays the core's part in a request. Everything the drafter says in it is held against plain, uncached
float64 forwards over the whole path.
"""

import itertools

import numpy as np
import pytest
import torch
from hf.families import FAMILIES, middle_of
from hf.reference import last_logits
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

import treegraft
from treegraft.errors import ModelError
from treegraft.interfaces import DraftRequest, ModelSpec, Observation
from treegraft.registry import packaged_registry
from treegraft.tree import DraftTree, Expansion
from treegraft_plugins.hf.drafter import HFCausalLMDrafter
from treegraft_plugins.hf.engine import TreeEngine

VOCAB = 43
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "initializer_range": 0.5, "bos_token_id": 0, "eos_token_id": 0,
    "pad_token_id": 0, "max_position_embeddings": 512,
}  # fmt: skip
WINDOW = 6
FOREIGN, OWN = 0, 1  # source indices: another drafter of lower rank, and the one under test
OVERRULES = {FOREIGN: (True, False), OWN: (True, True)}


def build(family: str, **changes) -> torch.nn.Module:
    torch.manual_seed(7)
    if family == "llama":
        model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES | changes))
    elif family == "qwen2 windowed":
        config = Qwen2Config(**SIZES | {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1})
        model = AutoModelForCausalLM.from_config(config)
    elif family == "gemma3":
        layer_types = ["sliding_attention", "full_attention"]
        model = Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, sliding_window=WINDOW, layer_types=layer_types))
    else:
        sizes = {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 2, "initializer_range": 0.5}
        model = AutoModelForCausalLM.from_config(GPT2Config(**sizes, n_positions=16, bos_token_id=0, eos_token_id=0))
    return model.double().eval()


class Session:
    """One request as the core drives it, with every answer checked and every forwarded row counted.

    Attributes:
        tree: of the current round.
        forwarded: rows of each forward of the current round.
        seen: what happened, counted, so that a test can show that it was not empty.
    """

    def __init__(self, drafter, model, prompt, max_depth=8, vocab_size=VOCAB):
        self.drafter, self.model, self.max_depth, self.vocab_size = drafter, model, max_depth, vocab_size
        self.references: dict[tuple[int, ...], np.ndarray] = {}
        self.forwarded: list[int] = []
        self.seen = {"drafted": 0, "rescored": 0}
        self.checking = False
        model.register_forward_pre_hook(self._count, with_kwargs=True)
        self.begin(prompt)

    def _count(self, module, args, kwargs):
        if not self.checking:
            self.forwarded.append(kwargs["input_ids"].shape[-1])

    def begin(self, prompt):
        self.committed = list(prompt)
        self.drafter.start(Observation(np.array(prompt[:-1], np.int64)))
        self._new_round()

    def _new_round(self):
        self.tree = DraftTree.rooted(self.committed[-1])
        self.forwarded.clear()

    def request(self, positions=(), branching=3, max_nodes=100):
        return DraftRequest(
            self.tree, np.array(positions, np.int64), branching, max_nodes, self.max_depth, self.vocab_size,
            np.array(self.committed, np.int64), source=OWN,
        )  # fmt: skip

    def reference(self, row):
        """float64 [V]: log-softmax after the node, by a plain forward over everything up to it."""
        if self._path(row) not in self.references:
            paths = [self._path(leaf) for leaf in np.flatnonzero(self.tree.leaves())]
            length = min(max(map(len, paths)), self.drafter.max_length)
            # Padding on the right, which no token sees; what the model cannot take is not read.
            batch = torch.tensor([(path + (0,) * length)[:length] for path in paths]) % VOCAB
            self.checking = True
            with torch.inference_mode():
                log_probs = self.model(batch).logits.log_softmax(-1).numpy()
            self.checking = False
            for path, rows in zip(paths, log_probs, strict=True):
                for size in range(len(self.committed), min(len(path), length) + 1):
                    self.references[path[:size]] = rows[size - 1]
        return self.references[self._path(row)]

    def _path(self, row):
        return (*self.committed, *self.tree.token[self.tree.path(row)[1:]].tolist())

    def graft(self, **children):
        """Another source's children: `graft(row_0=[tokens])`."""
        for name, tokens in children.items():
            row = int(name.removeprefix("row_"))
            expansion = Expansion([row] * len(tokens), tokens, -0.1 * np.arange(1, len(tokens) + 1))
            self.tree = self.tree.append(expansion, FOREIGN, OVERRULES[FOREIGN])

    def rescore(self, candidates=None):
        candidates = np.arange(len(self.tree)) if candidates is None else np.array(candidates)
        result = self.drafter.rescore(self.tree, candidates, self.request())
        for row, log_prob in zip(result.rows.tolist(), result.log_prob, strict=True):
            expected = self.reference(self.tree.parent[row])[self.tree.token[row]]
            assert log_prob == pytest.approx(expected, abs=1e-9)
            self.seen["rescored"] += 1
        self.tree = self.tree.rescored(result.rows, result.log_prob, OWN, OVERRULES[OWN])
        return result

    def draft(self, positions, branching=3, max_nodes=100):
        before = [column.copy() for column in (self.tree.token, self.tree.path_score, self.tree.uid)]
        expansion = self.drafter.draft(self.request(positions, branching, max_nodes))
        after = [self.tree.token, self.tree.path_score, self.tree.uid]
        assert all(np.array_equal(*pair) for pair in zip(before, after, strict=True))
        if max_nodes >= len(positions) * branching:
            for row in positions:
                reference = self.reference(row)
                best = np.sort(np.argsort(-reference)[:branching])
                mine = expansion.anchor == row
                assert np.array_equal(np.sort(expansion.token[mine]), best)
                np.testing.assert_allclose(expansion.log_prob[mine], reference[expansion.token[mine]], atol=1e-9)
                self.seen["drafted"] += int(mine.sum())
        self.tree = self.tree.mark(np.array(positions, np.int64), OWN).append(expansion, OWN, OVERRULES[OWN])
        return expansion

    def accept(self, row=0, bonus=5):
        """The target accepts the path to `row` and emits `bonus`."""
        path = self.tree.token[self.tree.path(row)]
        self.drafter.observe(Observation(path))
        self.committed += [*path[1:].tolist(), bonus]
        self._new_round()


def session(family="llama", prompt=(3, 1, 4, 1, 5, 9, 2, 6), *, rescore_limit=None, **changes):
    model = build(family, **changes)
    return Session(HFCausalLMDrafter(model, rescore_limit=rescore_limit), model, list(prompt))


# -- exactness --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen2 windowed", "gemma3"])
@pytest.mark.parametrize(("num_prompt", "rescore_limit"), [(1, None), (4, 3), (20, 6)])
def test_every_score_is_a_plain_forwards_and_no_node_is_forwarded_twice(family, num_prompt, rescore_limit):
    """Random rounds of grafting, rescoring, drafting, accepting and idling."""
    rng = np.random.default_rng(num_prompt)
    play = session(family, rng.integers(0, VOCAB, num_prompt).tolist(), rescore_limit=rescore_limit)
    rounds = {"idle": 0, "all kept": 0, "some kept": 0, "root kept": 0}
    num_missed = num_prompt - 1  # committed tokens that the drafter has not forwarded
    for number in range(13):
        processed = random_steps(play, rng) if number % 5 != 2 else set()
        assert sum(play.forwarded) == (len(processed) + num_missed if processed else 0)
        num_missed = 0 if processed else num_missed
        known = np.array([uid in processed for uid in play.tree.uid.tolist()])
        below = play.tree.depth > 0
        pool = np.flatnonzero((known & below, ~known, ~known & (play.tree.depth == 1))[number % 3])
        row = int(rng.choice(pool)) if len(pool) else 0
        kept = [uid in processed for uid in play.tree.uid[play.tree.path(row)].tolist()]
        num_missed += kept.count(False)
        if not processed:
            rounds["idle"] += 1
        elif len(kept) > 1:
            rounds["all kept" if all(kept) else "some kept" if kept[1] else "root kept"] += 1
        play.accept(row, int(rng.integers(VOCAB)))
    assert play.seen["drafted"] > 40 and play.seen["rescored"] > 20
    assert all(rounds.values()), rounds


def random_steps(play, rng) -> set[int]:
    """Grow a tree by one to four random steps; the uids of the nodes that this takes a forward of."""
    processed: set[int] = set()
    for _ in range(rng.integers(1, 5)):
        for row in rng.integers(0, len(play.tree), rng.integers(0, 4)):
            play.graft(**{f"row_{row}": rng.choice(VOCAB, 2, replace=False).tolist()})
        pool = np.arange(len(play.tree))
        if rng.random() < 0.6:
            pool = play.rescore().processed
            processed |= set(play.tree.uid[pool].tolist())
        positions = rng.choice(pool, min(len(pool), 2), replace=False)
        positions = positions[play.tree.depth[positions] < play.max_depth].tolist()
        play.draft(positions)
        processed |= {uid for row in positions for uid in play.tree.uid[play.tree.path(row)].tolist()}
    return processed


def test_other_branch_accepted():
    play = session()
    play.draft([0])
    play.draft([1, 2, 3])
    assert play.forwarded[-1] == 3
    deepest = int(np.flatnonzero(play.tree.parent == 3)[0])
    play.accept(deepest)
    play.draft([0])
    # Root and node 3 were kept; the deepest was only proposed, so it rides along with the new root.
    assert play.forwarded == [2]
    play.draft([1, 2])


def test_rounds_without_a_call_are_caught_up_in_one_forward():
    play = session()
    play.draft([0])
    for bonus in (7, 8, 9):
        play.accept(0, bonus)
    assert play.forwarded == []
    play.draft([0])
    assert play.forwarded == [3]  # the first root was kept; 7 and 8 are caught up; 9 is the root


def test_a_long_stretch_is_caught_up_in_chunks():
    play = session()
    play.draft([0])
    play.accept(0)
    tokens = np.random.default_rng(0).integers(0, VOCAB, 150)
    play.drafter.observe(Observation(np.array([play.committed[-1], *tokens[:-1]])))
    play.committed += tokens.tolist()
    play._new_round()
    play.draft([0])
    assert play.forwarded == [64, 64, 150 - 128 + 1]
    assert play.drafter.num_rows == play.forwarded[-1]
    play.draft([1, 2])
    play.accept(1)
    play.draft([0])


def test_rejecting_everything_leaves_the_cache_exact_where_drafter_and_target_share_weights():
    """Target and drafter on one model, each with its own cache, take turns; no drafted token is accepted."""
    play = session()
    target = TreeEngine(play.model)
    target.prefill(np.array(play.committed[:-1]), HFCausalLMDrafter.wants)
    for bonus in (11, 12, 13):
        play.draft([0])
        play.draft([1, 2])
        logits, _ = target.forward(np.array(play.committed[-1:]), np.array([len(play.committed) - 1]), np.eye(1) > 0)
        np.testing.assert_allclose(logits[0].log_softmax(-1).numpy(), play.reference(0), atol=1e-9)
        target.commit(np.array([0]))
        play.accept(0, bonus)
    assert target.num_committed == len(play.committed) - 1


@pytest.mark.parametrize("family", ["llama", "qwen2 windowed"])
def test_acceptance_returns_to_full_after_every_forced_reject(family):
    """A target of the same weights accepts whole chains, save every third round, where it turns off half way."""
    play = session(family)
    for number in range(9):
        chain = [0]
        for _ in range(4):
            play.draft(chain[-1:], branching=1)
            chain.append(len(play.tree) - 1)
        chosen = [int(play.reference(row).argmax()) for row in chain]
        assert play.tree.token[chain[1:]].tolist() == chosen[:-1], "the chain is what the target would choose"
        if number % 3 == 2:
            play.accept(chain[2], bonus=(chosen[2] + 1) % VOCAB)
        else:
            play.accept(chain[-1], bonus=chosen[-1])
        engine, fresh = play.drafter._engine, TreeEngine(play.model)
        assert engine.num_committed == len(play.committed) - (1 if number % 3 == 2 else 2)
        play.checking = True
        fresh.prefill(np.array(play.committed[: engine.num_committed]), play.drafter.wants)
        play.checking = False
        for mine, expected in zip(engine.committed(), fresh.committed(), strict=True):
            for states, others in zip(mine, expected, strict=True):
                torch.testing.assert_close(states, others, rtol=0, atol=1e-9)


@pytest.mark.parametrize("family", ["qwen2_window", "mistral_window", "gemma3"])
def test_several_calls_a_round_past_a_window_of_eight(family):
    """40 tokens with trees of 10, against one uncached forward a token."""
    model = FAMILIES[family]()
    pipeline = treegraft.load(
        "treegraft_fixed", "costs={use: fixed}", "budget={use: fixed, verify_nodes: 10}",
        models={"target": model, "middle": middle_of(model)}, registry=packaged_registry(),
    )  # fmt: skip
    result = pipeline.generate([7, 41, 3, 18, 7, 41], 40)
    tokens = [7, 41, 3, 18, 7, 41]
    for _ in range(40):
        tokens.append(int(last_logits(model, tokens).argmax()))
    assert result.token_ids == tokens[6:] and result.faults == []
    assert result.source_calls["middle"] >= 2 * result.num_rounds and result.num_rounds < 30


def test_start_forgets_and_costs_nothing():
    play = session()
    play.draft([0])
    play.draft([1, 2])
    play.forwarded.clear()
    play.begin([8, 8, 8])
    play.accept(0, 4)
    assert play.forwarded == []
    play.draft([0])
    assert play.forwarded == [3, 1]
    fresh = session(prompt=(8, 8, 8, 4))
    assert np.array_equal(fresh.draft([0]).token, play.tree.token[1:])
    play.drafter.stop()
    play.begin([8, 8, 8, 4])
    play.draft([0])


def test_start_with_all_drafts_what_start_and_observe_do():
    whole = session(prompt=(3, 1, 4, 1, 5, 9))
    parts = session(prompt=(3, 1))
    parts.graft(row_0=[4])
    parts.graft(row_1=[1])
    parts.graft(row_2=[5])
    parts.accept(3, 9)
    assert parts.committed == whole.committed
    one, other = whole.draft([0]), parts.draft([0])
    assert np.array_equal(one.token, other.token)
    np.testing.assert_allclose(one.log_prob, other.log_prob, atol=1e-9)


# -- rescoring --------------------------------------------------------------------------------------------------------


def test_drafting_after_rescoring_forwards_nothing_more():
    play = session()
    play.graft(row_0=[1, 2, 3], row_1=[4, 5])
    result = play.rescore()
    assert play.forwarded == [7, 6]  # prompt, tree
    assert np.array_equal(np.sort(result.rows), np.arange(1, 6))
    assert np.array_equal(result.processed, np.arange(6))
    play.draft([0, 4])
    assert play.forwarded == [7, 6]
    assert play.drafter.num_rows == 6
    again = play.rescore()
    assert len(again.rows) == 0, "what was drafted or rescored already has this drafter's score"
    assert sum(play.forwarded) == 7 + len(play.tree)


def test_rescore_limit_takes_the_best_and_their_ancestors():
    play = session(rescore_limit=2)
    play.draft([0])
    play.graft(row_1=[10, 11], row_2=[12, 13])
    play.graft(row_4=[14])
    score = play.tree.path_score.copy()
    candidates = [row for row in range(1, len(play.tree)) if row != 4]
    best = sorted(candidates, key=lambda row: -score[row])[:2]
    play.forwarded.clear()
    result = play.rescore(candidates)
    closed = {up for row in best for up in play.tree.path(row)} - {0}
    assert play.forwarded == [len(closed)]
    assert set(result.processed.tolist()) == closed & set(candidates)
    parents = closed | {0}
    others = [row for row in range(4, len(play.tree)) if int(play.tree.parent[row]) in parents]
    assert result.rows.tolist() == others, "every node whose parent was forwarded is scored, and the drafter's own are"
    rest = play.rescore(candidates)
    assert not set(rest.rows.tolist()) & set(others)
    assert len(set(rest.processed.tolist())) == len(closed & set(candidates)) + 2


def test_nodes_at_the_depth_limit_are_scored_but_not_forwarded():
    play = session()
    play.max_depth = 1
    play.graft(row_0=[1, 2, 3])
    result = play.rescore()
    assert play.forwarded == [7, 1]
    assert result.rows.tolist() == [1, 2, 3] and result.processed.tolist() == [0]
    assert len(play.drafter.draft(play.request([1, 2]))) == 0


# -- several trees from one root --------------------------------------------------------------------------------------

STEPS = 4
SCHEDULES = list(itertools.product("fo", repeat=STEPS))  # at each step a foreign drafter or this one


def step(play, who):
    """One step, a function of the tree alone: what became of the tree, the rows scored, the rows counted."""
    pool, rescored = np.arange(len(play.tree)), []
    if who == "o":
        result = play.rescore(np.flatnonzero(~play.tree.visited_by(OWN)))
        pool, rescored = result.processed, result.rows.tolist()
    best = pool[np.lexsort((-pool, -play.tree.path_score[pool]))[:2]].tolist()
    if who == "o":
        play.draft(best, branching=2)
    else:
        for row in best:
            play.graft(**{f"row_{row}": [(3 * int(play.tree.token[row]) + add) % VOCAB for add in (2, 3)]})
    return play.tree, rescored, play.drafter.num_rows if who == "o" else 0


def play_to_the_third_round(family):
    """Two rounds behind it, of which the second missed a token."""
    play = session(family, rescore_limit=3)
    for who in "fo":
        step(play, who)
    play.accept(int(np.flatnonzero(play.tree.leaves())[-1]))
    play.accept(0, 8)
    return play


def alike(ours, theirs):
    for (tree, *counts), (other, *expected) in zip(ours, theirs, strict=True):
        assert counts == expected
        for name in ("token", "parent", "visited", "scorer"):
            assert np.array_equal(tree.nodes[name], other.nodes[name]), name
        np.testing.assert_allclose(tree.path_score, other.path_score, atol=1e-9)


@pytest.mark.parametrize("family", ["llama", "qwen2 windowed"])
def test_schedules_searched_depth_first_are_as_each_by_itself(family):
    """Trees, scores, rows counted, and what the next round finds, though most rows are forwarded only once."""
    alone, missed = {}, {}
    num_alone = 0
    for schedule in SCHEDULES:
        fresh = play_to_the_third_round(family)
        alone[schedule] = [step(fresh, who) for who in schedule]
        assert sum(rows for *_, rows in alone[schedule]) == sum(fresh.forwarded)
        num_alone += sum(fresh.forwarded)
        leaf = int(fresh.tree.depth.argmax())
        missed[schedule] = fresh.drafter.num_missed(
            np.array([*fresh.committed, *fresh.tree.token[fresh.tree.path(leaf)[1:]], 5])
        )
        fresh.accept(leaf)
        fresh.draft([0])
        assert fresh.drafter.num_rows == missed[schedule] + 1

    play, leaves = play_to_the_third_round(family), {}

    def search(taken, steps, tree):
        if len(taken) == STEPS:
            alike(steps, alone[taken])
            leaf = int(tree.depth.argmax())
            text = np.array([*play.committed, *tree.token[tree.path(leaf)[1:]], 5])
            assert play.drafter.num_missed(text) == missed[taken]
            leaves[taken] = tree, leaf, play.drafter.checkpoint()
            return
        checkpoint = play.drafter.checkpoint()
        for who in "fo":
            play.drafter.restore(checkpoint)
            play.tree = tree
            done = step(play, who)
            search((*taken, who), [*steps, done], done[0])

    assert play.drafter.num_missed(np.array(play.committed)) > 0, "there is something to catch up"
    search((), [], play.tree)
    assert len(leaves) == len(SCHEDULES) and sum(play.forwarded) < 0.6 * num_alone
    # Whichever schedule is gone on with: it is as if it had been the only one.
    chosen = SCHEDULES[-3]
    play.tree, leaf, checkpoint = leaves[chosen]
    play.drafter.restore(checkpoint)
    play.accept(leaf)
    play.draft([0])
    assert play.drafter.num_rows == missed[chosen] + 1 == sum(play.forwarded)


# -- rules and limits -------------------------------------------------------------------------------------------------


def test_nothing_asked_nothing_proposed():
    play = session(prompt=(3,))
    assert len(play.draft([])) == 0 and play.forwarded == [] and play.drafter.num_rows == 0
    assert len(play.draft([0])) == 3 and play.drafter.num_rows == 1


def test_max_nodes_keeps_the_best_by_path_score():
    play = session()
    play.draft([0])
    everything = play.drafter.draft(play.request([1, 2, 3], branching=4))
    few = play.drafter.draft(play.request([1, 2, 3], branching=4, max_nodes=5))
    score = play.tree.path_score[everything.anchor] + everything.log_prob
    kept = np.sort(np.argsort(-score)[:5])
    assert np.array_equal(few.token, everything.token[kept]) and np.array_equal(few.anchor, everything.anchor[kept])


def test_ids_beyond_the_targets_are_never_proposed_and_probabilities_are_of_the_whole_vocabulary():
    play = session()
    expansion = play.drafter.draft(DraftRequest(play.tree, np.array([0]), 60, 60, 8, 10, np.array(play.committed)))
    assert sorted(expansion.token.tolist()) == list(range(10))
    np.testing.assert_allclose(expansion.log_prob, play.reference(0)[expansion.token], atol=1e-9)


def test_tokens_the_drafter_does_not_know_are_left_alone():
    """A larger target vocabulary: others may propose, and the target may emit, what this model cannot embed."""
    play = session(vocab_size=VOCAB)
    play.graft(row_0=[VOCAB + 4, 2], row_1=[3])
    result = play.rescore()
    assert result.rows.tolist() == [2] and result.processed.tolist() == [0, 2]
    assert len(play.drafter.draft(play.request([1, 3]))) == 0
    play.draft([0, 2])
    play.accept(2, VOCAB + 1)
    assert len(play.drafter.draft(play.request([0]))) == 0
    play.graft(row_0=[2])
    assert len(play.rescore().processed) == 0 and play.forwarded == []
    play.accept(1, 5)  # the unknown token is behind the root now, and stays there
    assert len(play.drafter.draft(play.request([0]))) == 0 and play.forwarded == []


def test_the_drafters_own_context_limit_ends_its_part():
    play = session("gpt2", prompt=range(1, 14))  # the root at position 12 of 16
    assert play.drafter.max_length == 16
    play.graft(row_0=[1], row_1=[2])
    play.graft(row_2=[3], row_3=[4])
    result = play.rescore()
    assert result.processed.tolist() == [0, 1, 2, 3] and result.rows.tolist() == [1, 2, 3, 4]
    assert len(play.drafter.draft(play.request([4]))) == 0
    play.draft([3])
    play.accept(4)
    assert len(play.drafter.draft(play.request([0]))) == 0
    assert play.forwarded == []


def test_nan_never_passes_for_a_score():
    model = build("llama")
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    drafter = HFCausalLMDrafter(model, self_check=False)
    tree = DraftTree.rooted(1).append(Expansion([0], [2], [-0.1]), FOREIGN, OVERRULES[FOREIGN])
    request = DraftRequest(tree, np.array([0]), 3, 3, 4, VOCAB, np.array([1]))
    with pytest.raises(ModelError, match="NaN"):
        drafter.draft(request)
    drafter.start(Observation(np.zeros(0, np.int64)))
    with pytest.raises(ModelError, match="NaN"):
        drafter.rescore(tree, np.arange(2), request)


def test_half_precision_gives_finite_log_probabilities():
    drafter = HFCausalLMDrafter(build("llama").to(torch.bfloat16))
    expansion = drafter.draft(DraftRequest(DraftTree.rooted(1), np.array([0]), 5, 5, 4, VOCAB, np.array([1])))
    assert expansion.log_prob.dtype == np.float64 and len(expansion) == 5
    assert np.isfinite(expansion.log_prob).all() and (expansion.log_prob <= 0).all()


def test_temperature_divides_the_logits():
    model = build("llama")
    with torch.inference_mode():
        expected = (model(torch.tensor([[1, 2]])).logits[0, -1] / 0.5).log_softmax(-1).numpy()
    drafter = HFCausalLMDrafter(model, temperature=0.5)
    expansion = drafter.draft(DraftRequest(DraftTree.rooted(2), np.array([0]), 5, 5, 4, VOCAB, np.array([1, 2])))
    np.testing.assert_allclose(expansion.log_prob, expected[expansion.token], atol=1e-9)


@pytest.mark.parametrize(
    "options", [{"rescore_limit": 0}, {"rescore_limit": 1.5}, {"temperature": 0}, {"temperature": "1"}]
)
def test_options_out_of_range_are_refused(options):
    with pytest.raises((TypeError, ValueError), match=next(iter(options))):
        HFCausalLMDrafter(build("llama"), **options)


# -- vocabularies -----------------------------------------------------------------------------------------------------


class StubTarget:
    def __init__(self, vocab_size, tokenizer=None):
        self.vocab_size, self.tokenizer = vocab_size, tokenizer


def saved(folder, words, vocab_size=VOCAB):
    """A model with a tokenizer of `words`, in a folder; also that tokenizer."""
    build("llama", vocab_size=vocab_size).save_pretrained(folder)
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token=words[0])))
    tokenizer.save_pretrained(folder)
    return tokenizer


WORDS = [f"w{index}" for index in range(20)]


def test_one_tokenizer_padded_to_two_sizes_works_and_padding_is_never_proposed(tmp_path):
    tokenizer = saved(tmp_path, WORDS)
    drafter = HFCausalLMDrafter(ModelSpec(str(tmp_path)))
    drafter.bind(StubTarget(VOCAB + 21, tokenizer))
    request = DraftRequest(DraftTree.rooted(1), np.array([0]), 60, 60, 4, VOCAB + 21, np.array([1]))
    assert sorted(drafter.draft(request).token.tolist()) == list(range(len(WORDS)))


def test_a_longer_tokenizer_that_begins_alike_is_limited_to_what_both_know(tmp_path):
    saved(tmp_path / "drafter", WORDS)
    drafter = HFCausalLMDrafter(ModelSpec(str(tmp_path / "drafter")))
    drafter.bind(StubTarget(VOCAB, saved(tmp_path / "target", WORDS[:12])))
    request = DraftRequest(DraftTree.rooted(1), np.array([0]), 60, 60, 4, VOCAB, np.array([1]))
    assert len(drafter.draft(request)) == 12


def test_swapped_ids_are_refused_naming_the_first(tmp_path):
    saved(tmp_path / "drafter", WORDS)
    swapped = [*WORDS[:7], WORDS[8], WORDS[7], *WORDS[9:]]
    drafter = HFCausalLMDrafter(ModelSpec(str(tmp_path / "drafter")))
    with pytest.raises(ModelError, match="token 7 is 'w7' to the drafter and 'w8' to the target"):
        drafter.bind(StubTarget(VOCAB, saved(tmp_path / "target", swapped)))


def test_without_tokenizers_sizes_must_agree():
    drafter = HFCausalLMDrafter(build("llama"))
    drafter.bind(StubTarget(VOCAB))
    with pytest.raises(ModelError, match="43 tokens for a target of 64"):
        drafter.bind(StubTarget(64))
