"""Records survive being written and read, as lines and as a table, and an interruption costs at most one."""

import json

import attrs
import pytest

from treegraft.bench import records as rec
from treegraft.bench.records import Record, Round, append_record, read_manifest, read_records, write_records
from treegraft.errors import RequestError

ROUNDS = [
    Round(3, 2, 9, 12, 2, {"small": 2}, {"small": 3, "middle": 1}, {"target": 1.25, "draft": 0.5}, {"small": 0.5}),
    Round(1, 0, 0, 0),
]
FULL = Record(
    arm="treegraft", prompt_id="82", category="writing", file="a.jsonl", temperature=0.8, max_new_tokens=4, seed=7,
    repeat=1, order=2, num_prompt_tokens=5, token_ids=[3, 1, 4, 1], num_new_tokens=4, finish_reason="length",
    prefill_ms=2.5, total_ms=9.75, rounds=ROUNDS, num_copied=2, by_depth=[[2, 1], [1, 1]],
    calibration={"small": [[0, 0.0, 0]] * 9 + [[3, 2.5, 2]]}, settings_read_back={"steps": 5, "dtype": "float32"},
    faults=[{"source": "middle", "error": "RuntimeError: no"}], costs={"target": {"1": 5.0}}, cpu_load=0.5,
    text_ok=True, problems=["something"],
)  # fmt: skip
BARE = Record(
    arm="hf_plain", prompt_id="83", category="qa", file="b.jsonl", temperature=0.0, max_new_tokens=4, seed=7, repeat=0,
    order=0, num_prompt_tokens=5, token_ids=[], num_new_tokens=0, finish_reason="length", prefill_ms=None, total_ms=1.0,
)  # fmt: skip


def test_records_read_back_as_they_were_written(tmp_path):
    with (tmp_path / rec.LINES).open("w") as file:
        append_record(file, FULL)
        append_record(file, BARE)
        assert read_records(tmp_path) == [FULL, BARE], "each is there at once"
    write_records(tmp_path, [FULL, BARE])
    (tmp_path / rec.LINES).unlink()
    assert read_records(tmp_path) == [FULL, BARE]


def test_the_table_has_a_column_for_every_field_in_a_form_to_query(tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    write_records(tmp_path, [FULL, BARE])
    table = pq.read_table(tmp_path / rec.TABLE)
    assert table.column_names == [field.name for field in attrs.fields(Record)]
    assert table["token_ids"].to_pylist() == [[3, 1, 4, 1], []]
    assert table["rounds"].to_pylist()[0][0]["accepted"] == 2
    assert json.loads(table["settings_read_back"].to_pylist()[0]) == {"steps": 5, "dtype": "float32"}


def test_a_line_cut_short_is_left_out(tmp_path):
    with (tmp_path / rec.LINES).open("w") as file:
        append_record(file, FULL)
        append_record(file, BARE)
    whole = (tmp_path / rec.LINES).read_text()
    (tmp_path / rec.LINES).write_text(whole[:-2])
    assert read_records(tmp_path) == [FULL]
    assert read_records(tmp_path / "nothing here") == []


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(RequestError, match=r"no readable manifest\.json"):
        read_manifest(tmp_path)


def test_a_missing_package_is_named_with_the_extra_that_brings_it(monkeypatch):
    monkeypatch.setattr(rec, "find_spec", lambda name: None if name == "matplotlib" else object())
    with pytest.raises(RequestError, match=r"needs the package matplotlib\n.*treegraft\[bench\]"):
        rec.require_packages()
