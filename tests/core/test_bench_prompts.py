"""Benchmark prompts: our form and Spec-Bench's, which of them are taken, and errors that name the line."""

import json
from collections import Counter

import pytest

from treegraft.bench.prompts import MT_BENCH, Prompt, read_prompts, task_of
from treegraft.errors import RequestError

OURS = {"id": "a/b.py:3", "category": "library", "turns": ["def f(\u2028"]}
SPEC_BENCH = {"question_id": 81, "category": "writing", "turns": ["Compose ...", "Rewrite ..."], "reference": ["x"]}


def written(path, *rows):
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row, ensure_ascii=False)) + "\n" for row in rows)
    )
    return path


def test_both_forms_are_read_and_categories_kept(tmp_path):
    path = written(tmp_path / "mixed.jsonl", OURS, "", SPEC_BENCH)
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert read_prompts(path) == [
        Prompt("a/b.py:3", "library", ("def f(\u2028",), str(path)),
        Prompt("81", "writing", ("Compose ...", "Rewrite ..."), str(path)),
    ]


def test_the_first_so_many_are_taken(tmp_path):
    rows = [SPEC_BENCH | {"question_id": number} for number in range(5)]
    path = written(tmp_path / "five.jsonl", *rows)
    assert [prompt.id for prompt in read_prompts(path, limit=2)] == ["0", "1"]
    assert len(read_prompts(path, limit=9)) == 5


def test_tasks_take_turns_and_mt_bench_is_one_whose_categories_do(tmp_path):
    categories = ["writing"] * 3 + ["math"] * 3 + ["qa"] * 3
    rows = [{"id": number, "category": name, "turns": ["x"]} for number, name in enumerate(categories)]
    path = written(tmp_path / "tasks.jsonl", *rows)
    chosen = read_prompts(path, per_task=3)
    assert [prompt.id for prompt in chosen] == ["0", "6", "3", "7", "1", "8"]
    assert Counter(prompt.task for prompt in chosen) == {"mt_bench": 3, "qa": 3}
    assert [prompt.id for prompt in read_prompts(path, limit=4, per_task=2)] == ["0", "3"]
    assert {task_of(category) for category in MT_BENCH} == {"mt_bench"} and task_of("rag") == "rag"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "a list"),
        ({"category": "c", "turns": ["x"]}, "no 'id'"),
        ({"id": 1, "categry": "c", "turns": ["x"]}, r"no 'category'\n.*Did you mean 'categry'"),
        ({"id": 1, "category": "c", "turns": "x"}, "turns 'x'"),
        ({"id": 1, "category": "c", "turns": []}, "turns"),
        ({"id": 1, "category": "c", "turns": ["x", ""]}, "none of them empty"),
        ({"id": 1, "category": 3, "turns": ["x"]}, "category 3"),
        ({"id": None, "category": "c", "turns": ["x"]}, "id None"),
        (OURS, "a second time"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(tmp_path, row, message):
    path = written(tmp_path / "bad.jsonl", OURS, row)
    with pytest.raises(RequestError, match=message) as caught:
        read_prompts(path)
    assert str(caught.value).startswith(f"{path}:2: ")


def test_files_that_cannot_be_read_are_refused(tmp_path):
    written(tmp_path / "prompts.jsonl", OURS)
    with pytest.raises(RequestError, match=r"No such file.*\n.*Did you mean '.*prompts\.jsonl'"):
        read_prompts(tmp_path / "prompt.jsonl")
    (tmp_path / "latin.jsonl").write_bytes(b"\xe9")
    with pytest.raises(RequestError, match="not UTF-8"):
        read_prompts(tmp_path / "latin.jsonl")
    with pytest.raises(RequestError, match="no prompts"):
        read_prompts(written(tmp_path / "empty.jsonl", ""))
