"""The commands without a server: generate, chat, models and doctor, with model M on plain pipes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gristmill.cli import chat, doctor
from gristmill.cli.main import main
from gristmill.cli.sampling import argument_text
from tests.support.tiny_model import make_tiny_model

SMALL = ("--dtype=float32", "--pool-tokens=1024", "--threads=1", "--temperature=0", "--max-tokens=6")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("commands") / "M")


def run(*words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "gristmill", *words], input=stdin, capture_output=True, text=True, timeout=120)


def test_generate_prints_the_same_text_from_an_argument_and_from_stdin(model: Path) -> None:
    given = run("generate", str(model), "-p", "Name two rivers", *SMALL)
    assert given.returncode == 0 and given.stdout.endswith("\n") and len(given.stdout) > 3, given.stderr
    read = run("generate", str(model), "-p", "-", *SMALL, stdin="Name two rivers")
    assert (read.returncode, read.stdout) == (0, given.stdout)
    assert "INFO" not in given.stderr


def test_generate_prints_one_json_object_per_choice(model: Path) -> None:
    done = run("generate", str(model), "-p", "a", "--prompt=b", "-n", "2", "--json", "--seed=3", *SMALL)
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(record["prompt"], record["index"]) for record in records] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(record["usage"]["completion_tokens"] == len(record["ids"]) <= 6 for record in records)


def test_chat_answers_each_line_and_remembers_until_reset(model: Path) -> None:
    lines = ("Name two rivers", "/reset", "Name two rivers", "", "/help", "Name two rivers", "/exit", "not read")
    done = run("chat", str(model), "--system", "be brief", *SMALL, stdin="\n".join(lines))
    assert done.returncode == 0, done.stderr
    before, after = done.stdout.split(chat._HELP + "\n")
    first, second = before[: len(before) // 2], before[len(before) // 2 :]
    assert first == second and len(first) > 3  # the same question without a past
    assert after != first  # and with one


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["generate", "M"], 2, "a prompt is missing"),
        (["generate", "/nowhere", "-p", "x"], 1, "MODEL '/nowhere' does not exist"),
        (["generate", "M", "-p", "x", "--max-tokens=many"], 2, "must be a whole number, not 'many'"),
        (["generate", "M", "-p", "x", "--port=80"], 2, "unknown option --port"),
        (["generate", "M", "-p", "x", "--threads=100000"], 2, "--threads must be a whole number from 0 to 1024"),
        (["generate", "M", "-p", "x", "-n", "0"], 2, "-n must be an integer from 1 to 128, not 0"),
        (["generate", "M", "-p", "x", "--stop", ""], 2, "--stop holds an empty string"),
        (["generate", "M", "-p", "x", "--temperature=-1"], 2, "--temperature must be from 0 to 100, not -1"),
        (["generate", "M", "-p", "x", "--max-tokens=-1"], 2, "--max-tokens "),
        (["chat", "M", "--top-p=7"], 2, "--top-p must be from 0 to 1, not 7"),
        (["chat", "M", "--seed=99999999999999999999"], 2, "--seed must be an integer from"),
        (["generate", "null:0", "-p", "x", "--max-tokens=100000"], 2, "max_tokens"),
        (["generate", "M", "-p", "x", "--pool-tokens=2", "--page-size=64"], 2, "--pool-tokens 2 is less than one page: --page-size is 64"),
        (["serve", "M", "--pool-tokens=2", "--page-size=64"], 2, "--pool-tokens 2 is less than one page: --page-size is 64"),
        (["generate", "M", "-p", "\udcff\udcfe bad"], 2, "-p is not valid UTF-8 text"),
        (["chat", "M", "--system", "\udcff"], 2, "--system is not valid UTF-8 text"),
        (["chat", "--url", "ftp://x"], 2, "--url must begin with http"),
        (["chat", "--url", "http://127.0.0.1:9"], 1, "cannot reach http://127.0.0.1:9"),
        (["chat"], 2, "MODEL is missing"),
        (["doctor", "--brif"], 2, "did you mean --brief"),
    ],
)
def test_a_command_that_cannot_be_done_is_one_line(words: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == code
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error


def test_an_argument_in_utf8_is_read_whatever_the_locale() -> None:
    assert argument_text("-p", "é水".encode().decode("ascii", "surrogateescape")) == "é水" == argument_text("-p", "é水")


def test_without_max_tokens_the_context_is_the_limit(model: Path) -> None:
    small = [flag for flag in SMALL if not flag.startswith("--max-tokens")]
    prompt = "x " * 200
    done = run("generate", str(model), "-p", prompt, "--json", "--stop=never to be seen", *small, "--context-length=256")
    assert done.returncode == 0, done.stderr
    usage = json.loads(done.stdout)["usage"]
    assert usage["prompt_tokens"] + usage["completion_tokens"] <= 256
    chatting = run("chat", str(model), *small, stdin="Name two rivers")
    assert chatting.returncode == 0 and len(chatting.stdout) > 3, chatting.stderr


@pytest.mark.parametrize("redirection", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_are_no_failure(model: Path, redirection: str) -> None:
    words = f"{sys.executable} -m gristmill generate {model} -p x {' '.join(SMALL)} {redirection}"
    done = subprocess.run(["sh", "-c", words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr == ""


def test_a_full_disk_behind_standard_output_is_one_line(model: Path) -> None:
    words = f"{sys.executable} -m gristmill generate {model} -p x {' '.join(SMALL)} >/dev/full"
    done = subprocess.run(["sh", "-c", words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_output_in_an_encoding_that_lacks_characters_goes_on(model: Path) -> None:
    command = [sys.executable, "-m", "gristmill", "generate", str(model), "-p", "é水", *SMALL, "--max-tokens=40"]
    done = subprocess.run(command, capture_output=True, timeout=120, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0 and done.stdout.isascii() and not done.stderr


def test_input_that_is_not_utf8_is_one_line(model: Path) -> None:
    for words, code in ((("generate", str(model), "-p", "-", *SMALL), 2), (("chat", str(model), *SMALL), 1)):
        command = [sys.executable, "-m", "gristmill", *words]
        done = subprocess.run(command, input=b"\xff\xfe\n", capture_output=True, timeout=120)
        assert done.returncode == code and done.stderr.count(b"\n") == 1 and b"not valid UTF-8" in done.stderr, done.stderr


def test_a_reader_that_leaves_ends_generate_quietly(model: Path) -> None:
    command = [sys.executable, "-m", "gristmill", "generate", str(model), "-p", "x", "--dtype=float32", "--max-tokens=300", "--threads=1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(60) in (0, 141) and "Traceback" not in errors, errors
    process.stderr.close()


def test_models_lists_the_catalogue(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    assert "smollm2-135m" in capsys.readouterr().out


def test_doctor_gives_a_reason_on_every_line(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    findings = [line.split(None, 2) for line in lines[:-1]]
    assert all(finding[0] in ("ok", "warn", "fail") and len(finding) == 3 for finding in findings), lines
    assert code == (1 if any(finding[0] == "fail" for finding in findings) else 0)
    for what in ("python", "cores", "memory", "torch", "kernels", "sockets", "model", "hub"):
        assert any(finding[1] == what for finding in findings), what
    assert lines[-1].startswith("doctor: ")


def test_doctor_names_what_fails_and_exits_with_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> None:
        raise RuntimeError("planted\nfault")

    monkeypatch.setattr(doctor.resources, "cpu_count", broken)
    assert main(["doctor", "--brief"]) == 1
    shown = capsys.readouterr().out
    assert "fail  cores" in shown and "RuntimeError: planted" in shown and "something needed does not work" in shown


def test_doctor_finds_a_tmp_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*args: object, **kwargs: object) -> str:
        raise PermissionError(13, os.strerror(13))

    monkeypatch.setattr("tempfile.mkdtemp", refuse)
    (finding,) = doctor._sockets()
    assert finding.status == "fail" and "set TMPDIR" in finding.reason
