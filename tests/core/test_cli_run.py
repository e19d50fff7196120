"""`treegraft run`: what comes out on which stream, what a prompt can be made from, and how it ends badly."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import attrs
import click
import pytest
from click.testing import CliRunner

import treegraft
from treegraft.cli import main
from treegraft.cli.embedded import spare_threads
from treegraft.cli.report import JSON_KEYS
from treegraft.cli.run import chat_prompt, read_prompt, template_arguments, with_defaults
from treegraft.compose import resolve
from treegraft.errors import RequestError

DEMO = Path(__file__).parents[2] / "plugins" / "treegraft_plugins" / "hf" / "demo_pair"
PROMPT = "for name in sorted(names):\n    print(name)\nfor key in sorted(keys):\n"
QUICK = ("costs={use: fixed}", "budget={use: fixed, verify_nodes: 63}", "target.self_check=false")
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if thinking %}hm{% endif %}{% endif %}"
)


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TREEGRAFT_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def expected():
    """What Python gives for the prompt, 24 tokens greedy."""
    return treegraft.load("all_small", *QUICK).generate(PROMPT, max_new_tokens=24)


def run(*args, **options):
    words = [str(arg) for arg in args]
    if not any("max-new-tokens" in word for word in words):
        words += ["--max-new-tokens", "24"]
    return CliRunner().invoke(main, ["run", *words], **options)


def test_text_goes_to_stdout_and_statistics_to_stderr(expected):
    result = run("all_small", *QUICK, "--prompt", PROMPT)
    assert result.exit_code == 0
    assert result.stdout == expected.text + "\n"
    assert expected.num_rounds < 24, "nothing was accepted: the figures below would prove little"
    lines = result.stderr.splitlines()
    assert lines[0].startswith("24 tokens in ") and lines[0].endswith("ended by length")
    assert lines[1] == (
        f"{expected.num_rounds} rounds: {expected.emitted_per_round:.2f} emitted, "
        f"{expected.accepted_per_round:.2f} accepted a round"
    )
    assert lines[2] == f"calls: target {expected.target_calls}, small {expected.source_calls['small']}"
    assert lines[3].startswith("time: ") and "target" in lines[3]
    assert lines[4:] == ["lossless: yes"]


def test_json_is_one_object_on_stdout_and_nothing_else(expected):
    result = run("all_small", *QUICK, "--prompt", PROMPT, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    assert tuple(found) == JSON_KEYS
    assert found["text"] == expected.text
    assert found["token_ids"] == expected.token_ids
    assert found["num_new_tokens"] == len(expected.token_ids) == 24
    assert found["accepted_histogram"] == {str(kept): n for kept, n in expected.accepted_histogram.items()}
    assert (found["num_rounds"], found["target_calls"]) == (expected.num_rounds, expected.target_calls)
    assert set(found["latency_ms"]) == {"target", "commit", "prefill", "sources", "framework", "total"}
    assert set(found["latency_ms"]["sources"]) == set(found["source_calls"]) == {"small"}
    assert found["lossless"] is True and found["lossless_note"] is None and found["faults"] == []
    assert isinstance(found["seed"], int) and isinstance(found["tokens_per_second"], float)


def test_sampling_options_reach_the_request_and_a_seed_repeats_it():
    options = ("--temperature", "0.9", "--top-p", "0.95", "--top-k", "40", "--seed", "5")
    first = run("all_small", *QUICK, "--prompt", PROMPT, *options)
    again = run("plain", "--prompt", PROMPT, *options)
    direct = treegraft.load("plain").generate(PROMPT, 24, temperature=0.9, top_p=0.95, top_k=40, seed=5)
    assert first.stdout == again.stdout == direct.text + "\n"
    assert "seed: 5" in first.stderr.splitlines()
    other = run("plain", "--prompt", PROMPT, *options[:-1], "6")
    assert other.stdout != first.stdout


def test_stop_strings_end_the_text():
    stopped = run("all_small", *QUICK, "--prompt", PROMPT, "--stop", "no such text", "--stop", "key")
    assert stopped.stdout.endswith("key\n") and stopped.stdout.count("key") == 1
    assert "ended by stop" in stopped.stderr


# -- the prompt -------------------------------------------------------------------------------------------------------


def test_prompts_come_from_files_and_from_stdin_as_they_are(expected):
    Path("prompt.txt").write_text(PROMPT)
    from_file = run("all_small", *QUICK, "--prompt-file", "prompt.txt")
    from_stdin = run("all_small", *QUICK, "--prompt-file", "-", input=PROMPT)
    assert from_stdin.stderr.startswith("24 tokens"), from_stdin.stderr
    assert from_file.stdout == from_stdin.stdout == expected.text + "\n"
    Path("dos.txt").write_bytes(b"a\r\n b \n")
    assert read_prompt(None, "dos.txt") == "a\r\n b \n"


@pytest.mark.parametrize(
    "given",
    [
        (),
        ("--prompt", "a", "--prompt-file", "-"),
        ("--prompt", "a", "--system", "b"),
        ("--prompt", "a", "--max-new-tokens", "-1"),
    ],
)
def test_options_that_do_not_go_together_or_are_out_of_range_are_bad_use(given):
    result = run("plain", *given)
    assert result.exit_code == 2 and result.stdout == ""
    assert "Usage: " in result.stderr and "Error: " in result.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--prompt-file", "no.txt"), "RequestError: --prompt-file no.txt: No such file or directory\n  Allowed"),
        (("--prompt-file", "latin.txt"), "RequestError: --prompt-file latin.txt: not UTF-8 (at byte 3)\n  Allowed"),
        (("--prompt", ""), "RequestError: prompt: no tokens\n  Allowed"),
        (("--prompt", "caf\udce9"), "RequestError: --prompt: not UTF-8 (at character 3)\n  Allowed"),
        (("--prompt", "a", "--temperature", "-1"), "RequestError: temperature: -1.0\n  Allowed"),
        (("--prompt", "a", "--top-k", "5"), "RequestError: temperature: 0 beside top_p or top_k"),
        (("--prompt", "a", "--chat"), "RequestError: --chat: the target's tokenizer has no chat template"),
        (("--prompt", "a", "steps=0"), "ComposeError: pipelines.plain.steps: 0\n  Allowed"),
    ],
)
def test_what_cannot_be_honoured_is_refused_in_four_parts(args, message):
    Path("latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    result = run("plain", *args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(message)
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "options", [("--temperature", "-1"), ("--top-k", "5"), ("--stop", ""), ("--seed", "-1"), ("--top-p", "nan")]
)
def test_a_request_that_cannot_be_honoured_is_refused_before_any_model_is_loaded(options):
    result = run("plain", "models.target=./nowhere", "--prompt", "a", *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("RequestError: "), "not the ModelError of ./nowhere"


def test_a_model_that_cannot_be_loaded_is_a_failure():
    result = run("plain", "models.target=./nowhere", "--prompt", "a")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("ModelError: pipelines.plain.target: model './nowhere': no such folder")


# -- chat -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer():
    loaded = treegraft.load("plain", "target.self_check=false").tokenizer
    loaded.chat_template = TEMPLATE
    return loaded


def test_a_system_message_that_is_not_utf8_is_refused(tokenizer):
    with pytest.raises(RequestError, match=r"--system: not UTF-8 \(at character 0\)"):
        chat_prompt(tokenizer, "hello", "\udce9", {})


def test_chat_puts_messages_into_the_template_without_special_tokens_of_its_own(tokenizer):
    ids = chat_prompt(tokenizer, "hello", "be brief", {"thinking": True})
    assert tokenizer.decode(ids) == "<system>be brief\n<user>hello\n<assistant>hm"
    assert tokenizer.decode(chat_prompt(tokenizer, "hello", None, {})) == "<user>hello\n<assistant>"


def test_template_arguments_are_read_as_yaml():
    texts = ["enable_thinking=false", "depth=3", "name=a b", "tools=[x, y]"]
    assert template_arguments(texts) == {"enable_thinking": False, "depth": 3, "name": "a b", "tools": ["x", "y"]}


def test_a_template_argument_that_is_no_yaml_is_bad_use():
    with pytest.raises(click.UsageError, match="--template: a value that is no YAML"):
        template_arguments(["tools=["])


def test_a_template_argument_that_nothing_reads_is_refused(tokenizer):
    with pytest.raises(RequestError, match="--template thinkng: the chat template does not read it"):
        chat_prompt(tokenizer, "hello", None, {"thinkng": False})


def test_a_template_that_refuses_the_messages_is_reported(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", "{{ raise_exception('no system messages') }}")
    with pytest.raises(RequestError, match=r"--chat: the chat template refused \(no system messages\)"):
        chat_prompt(tokenizer, "hello", "be brief", {})


def test_chat_from_the_command_line(tokenizer):
    shutil.copytree(DEMO / "target", "chat_model")
    Path("chat_model/chat_template.jinja").write_text(TEMPLATE)
    args = ("--chat", "--prompt", "x = 1", "--system", "go", "--template", "thinking=true")
    result = run("plain", "models.target=./chat_model", *args)
    assert result.exit_code == 0, result.stderr
    prompt = chat_prompt(tokenizer, "x = 1", "go", {"thinking": True})
    assert result.stdout == treegraft.load("plain").generate(prompt, 24).text + "\n"


# -- models -----------------------------------------------------------------------------------------------------------


def test_dtype_and_device_hold_for_models_that_do_not_say_their_own():
    overrides = ["models.target.dtype=float64", "models.middle.device=cpu"]
    models = with_defaults(resolve("treegraft", overrides), "bfloat16", "cuda:1").models
    assert (models["target"].dtype, models["target"].device) == ("float64", "cuda:1")
    assert (models["middle"].dtype, models["middle"].device) == ("bfloat16", "cpu")
    mapped = with_defaults(resolve("plain", ["models.target.device_map=auto"]), None, "cpu").models["target"]
    assert mapped.device == "auto"
    unchanged = resolve("treegraft")
    assert with_defaults(unchanged, None, None).models == unchanged.models
    given = attrs.evolve(unchanged, models={"target": object()})
    assert with_defaults(given, "float32", "cpu").models == given.models


def test_only_embedded_models_are_kept_to_one_thread(monkeypatch):
    threads = []
    monkeypatch.setattr("torch.set_num_threads", threads.append)
    spare_threads(resolve("treegraft").models)
    assert threads == [1]
    spare_threads(resolve("plain", ["models.target=./mine"]).models)
    spare_threads(resolve("plain", models={"target": object()}).models)
    assert threads == [1]


def test_half_precision_carries_its_note():
    result = run("plain", "--prompt", "import os", "--dtype", "bfloat16", "--max-new-tokens", "2")
    assert result.exit_code == 0, result.stderr
    assert "lossless: yes (the target runs in bfloat16" in result.stderr
    noted = json.loads(run("plain", "--prompt", "a", "--dtype", "bfloat16", "--max-new-tokens", "1", "--json").stdout)
    assert "bfloat16" in noted["lossless_note"]


# -- drafters that fail -----------------------------------------------------------------------------------------------

FAULTY = """
import treegraft

class FaultyDrafter(treegraft.Drafter):
    def draft(self, request):
        raise RuntimeError("out of ideas")

@treegraft.hookimpl
def treegraft_register(register):
    register("faulty", FaultyDrafter)
"""


@pytest.fixture
def faulty(tmp_path, monkeypatch):
    Path("faulty_drafter.py").write_text(FAULTY)
    monkeypatch.syspath_prepend(tmp_path)
    yield ("all_small", *QUICK, "sources.small.draft={use: faulty}", "--plugin", "faulty_drafter", "--prompt", PROMPT)
    sys.modules.pop("faulty_drafter", None)


def test_a_failing_drafter_is_one_readable_line_and_changes_nothing(faulty, expected):
    result = run(*faulty)
    assert (result.exit_code, result.stdout) == (0, expected.text + "\n")
    assert result.stderr.count("out of ideas") == 1
    assert result.stderr.startswith("warning: sources.small: its drafter failed and is left out")


def test_a_failing_drafter_is_among_the_faults_of_the_json_object(faulty):
    result = run(*faulty, "--json")
    assert json.loads(result.stdout)["faults"] == [{"source": "small", "error": "RuntimeError: out of ideas"}]
    assert result.stderr.count("out of ideas") == 1


# -- ends -------------------------------------------------------------------------------------------------------------


def process(*args):
    # Tests that run in the background of a shell have interrupts ignored, and so would their children.
    listen = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    start = f"{listen}; from treegraft.cli import main; main()"
    command = [sys.executable, "-c", start, "run", "plain", "--prompt", "import os"]
    return subprocess.Popen([*command, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_an_interrupt_ends_the_text_without_a_traceback():
    running = process("--max-new-tokens", "2000")
    assert running.stdout.read(1), running.stderr.read()
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=60)
    assert running.returncode in (1, 130)
    assert b"Traceback" not in errors


def test_a_closed_pipe_ends_the_text_without_a_traceback():
    running = process("--max-new-tokens", "2000")
    assert running.stdout.read(1), running.stderr.read()
    running.stdout.close()
    running.wait(timeout=60)
    errors = running.stderr.read()
    running.stderr.close()
    assert running.returncode == 1
    assert b"Traceback" not in errors and b"Exception" not in errors
