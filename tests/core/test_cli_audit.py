"""`treegraft audit`: what it takes, what it says, and its exit status."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import treegraft
from treegraft.cli import main

PROMPT = "for name in sorted(names):\n    print(name)\nfor key in sorted(keys):\n"
QUICK = ("all_small", "costs={use: fixed}", "budget={use: fixed, verify_nodes: 63}", "target.self_check=false")
SIZE = ("--max-new-tokens", "12")


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def expected():
    return treegraft.load("plain", "target.self_check=false").generate(PROMPT, max_new_tokens=12)


def command(name, *args, **options):
    words = [name, *QUICK, "--prompt", PROMPT, *SIZE, *map(str, args)]
    return CliRunner().invoke(main, words, **options)


def planted(expected):
    """The text up to index 5, where a token is wrong."""
    ids = list(expected.token_ids[:6])
    ids[5] += 1
    Path("out.json").write_text(json.dumps({"token_ids": ids}))
    return ids


def test_text_of_a_pipeline_passes():
    result = command("audit")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == "12 tokens, 0 not the arg-max (tolerance 0.001)\n"


def test_what_run_printed_can_be_audited_through_a_pipe():
    printed = command("run", "--json").stdout
    result = command("audit", "--json-file", "-", input=printed)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith("12 tokens, 0 not the arg-max")


def test_a_printed_output_says_what_it_was_sampled_under():
    printed = command("run", "--json", "--temperature", "0.8", "--top-k", "20", "--seed", "5").stdout
    assert json.loads(printed)["sampling"] == {"max_new_tokens": 12, "temperature": 0.8, "top_p": 1.0, "top_k": 20}
    result = command("audit", "--json-file", "-", input=printed)
    assert (result.exit_code, result.stdout) == (0, "12 tokens, 0 not the seed's draw (tolerance 0.001)\n")
    asked = command("audit", "--json-file", "-", "--temperature", "0", input=printed)
    assert asked.exit_code == 1 and "not the arg-max" in asked.stdout, "what is said on the command line counts"


@pytest.mark.parametrize("sampling", ["[]", '{"temperatur": 1}', '{"temperature": -1}', '{"temperature": "warm"}'])
def test_what_it_was_sampled_under_is_checked(sampling):
    Path("out.json").write_text(f'{{"token_ids": [5], "seed": 1, "sampling": {sampling}}}')
    result = command("audit", "--json-file", "out.json")
    assert result.exit_code == 2 and "Not foreseen" not in result.stderr


def test_a_wrong_token_is_listed_and_fails(expected):
    wrong = planted(expected)
    result = command("audit", "--json-file", "out.json")
    assert (result.exit_code, result.stderr) == (1, "")
    header, row, summary = result.stdout.splitlines()
    assert header.split() == ["index", "token", "arg-max", "gap", "(nats)"]
    assert row.startswith("5 ") and row.endswith("  above the tolerance")
    assert f"({wrong[5]})" in row and f"({expected.token_ids[5]})" in row
    assert summary.startswith("6 tokens, 1 not the arg-max; largest gap ")


def test_json_says_the_same_and_a_tolerance_decides(expected):
    wrong = planted(expected)
    found = json.loads(command("audit", "--json-file", "out.json", "--json").stdout)
    assert (found["num_new_tokens"], found["num_different"]) == (6, 1)
    assert (found["token_ids"], found["tolerance"], found["passed"]) == (wrong, 1e-3, False)
    (row,) = found["differences"]
    assert (row["index"], row["token_id"], row["expected_id"]) == (5, wrong[5], expected.token_ids[5])
    assert row["gap"] == found["largest_gap"] > 1e-3
    result = command("audit", "--json-file", "out.json", "--tolerance", row["gap"] + 1)
    assert result.exit_code == 0
    assert result.stdout.splitlines()[1].endswith("  rounding")


@pytest.mark.parametrize("tolerance", ["nan", "inf", "-1"])
def test_a_tolerance_is_a_finite_number(tolerance):
    result = command("audit", "--json-file", "out.json", "--tolerance", tolerance)
    assert result.exit_code == 2 and "--tolerance" in result.stderr


@pytest.mark.parametrize(("sampling", "tolerance"), [((), 0.5), (("--temperature", "0.8", "--seed", "5"), 0.625)])
def test_text_decoded_in_half_precision_is_audited_in_float32_with_a_wider_tolerance(sampling, tolerance):
    result = command("audit", *sampling, "--dtype", "bfloat16", "--json")
    found = json.loads(result.stdout)
    assert (result.exit_code, found["tolerance"]) == (0, tolerance)
    assert found["passed"] and found["num_new_tokens"] == 12


def test_sampled_text_is_audited_draw_by_draw():
    sampling = ("--temperature", "0.9", "--top-k", "40")
    printed = command("run", *sampling, "--seed", "5", "--json").stdout
    Path("sampled.json").write_text(printed)
    passed = command("audit", *sampling, "--json-file", "sampled.json")
    assert (passed.exit_code, passed.stdout) == (0, "12 tokens, 0 not the seed's draw (tolerance 0.001)\n")
    failed = command("audit", *sampling, "--json-file", "sampled.json", "--seed", "6")
    assert failed.exit_code == 1 and "gap (nats)" in failed.stdout
    Path("unseeded.json").write_text(json.dumps({"token_ids": json.loads(printed)["token_ids"]}))
    refused = command("audit", *sampling, "--json-file", "unseeded.json")
    assert refused.exit_code == 2 and refused.stderr.startswith("RequestError: --seed: none, and none in the file")


def test_text_that_a_verifier_drew_for_itself_is_audited_at_temperature_0_only():
    drawn = ["dflash_sampled", "--prompt", PROMPT, *SIZE]
    refused = CliRunner().invoke(main, ["audit", *drawn, "--temperature", "0.8", "--seed", "5"])
    assert refused.exit_code == 2 and not refused.stdout
    assert refused.stderr.startswith("RequestError: pipelines.dflash_sampled.verifier: block: sampled text that is not")
    printed = CliRunner().invoke(main, ["run", *drawn, "--temperature", "0.8", "--json"]).stdout
    for name in ("dflash_sampled", "plain"):  # whichever pipeline is named, the file says what it is
        refused = CliRunner().invoke(main, ["audit", name, *drawn[1:], "--json-file", "-"], input=printed)
        assert refused.exit_code == 2 and refused.stderr.startswith(
            "RequestError: --json-file: sampled text that is not"
        )
    plain = command("run", "--temperature", "0.8", "--json").stdout
    assert CliRunner().invoke(main, ["audit", *drawn, "--json-file", "-"], input=plain).exit_code == 0
    assert CliRunner().invoke(main, ["audit", *drawn]).exit_code == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "RequestError: --json-file out.json: not JSON"),
        ("[1, 2]", "RequestError: --json-file out.json: no list of token_ids"),
        ('{"token_ids": ["a"]}', "RequestError: --json-file out.json: no list of token_ids"),
        ('{"token_ids": [1], "seed": "x"}', "RequestError: --json-file out.json: seed 'x'"),
        ('{"token_ids": [1], "repeats_plain": "no"}', "RequestError: --json-file out.json: repeats_plain 'no'"),
        ('{"token_ids": [99999]}', "RequestError: audit: the token 99999"),
        (None, "RequestError: --json-file out.json: No such file"),
    ],
)
def test_a_file_that_holds_no_output_is_bad_use(content, message):
    if content is not None:
        Path("out.json").write_text(content)
    result = command("audit", "--json-file", "out.json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(message)


def test_two_files_cannot_both_be_the_standard_input():
    result = CliRunner().invoke(main, ["audit", "plain", "--prompt-file", "-", "--json-file", "-"], input="a")
    assert result.exit_code == 2 and "cannot both" in result.stderr
