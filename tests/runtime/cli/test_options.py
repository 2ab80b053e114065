"""The command line and the environment become Options, or one line that says what is wrong (no model, no server)."""

from __future__ import annotations

import argparse
import subprocess
import sys

import pytest

from gristmill.cli.arguments import Parser, add_options, options_from
from gristmill.cli.main import COMMANDS, main
from gristmill.errors import OptionError
from gristmill.launch_config import LaunchConfig
from gristmill.options import FIELDS, KERNELS_ENV, Options, env_name, flag, make_options


def parse(*words: str, environ: dict[str, str] | None = None) -> Options:
    parser = Parser(prog="gristmill serve")
    add_options(parser)
    return options_from(parser.parse_args(list(words)), environ or {})


@pytest.mark.parametrize("words", [["--port=31001", "M"], ["--port", "31001", "M"], ["M", "--port", "31001"], ["M", "--port=31001"]])
def test_both_spellings_of_a_value_work_before_and_after_the_model(words: list[str]) -> None:
    options = parse(*words)
    assert (options.port, options.model) == (31001, "M")


@pytest.mark.parametrize("port", ["70000", "abc", "-1", "", "3.5", "1e3", "0x10", "１２", "99999999999999999999", "1_000"])
def test_a_port_that_is_no_port_is_refused_by_the_parser_naming_it(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "M", f"--port={port}"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("error: --port must be a whole number from 0 to 65535")


def test_booleans_are_switched_off_with_no() -> None:
    assert parse("M").overlap and not parse("M", "--no-overlap").overlap and parse("M", "--no-overlap", "--overlap").overlap


@pytest.mark.parametrize(
    ("word", "meant"),
    [("--prot", "--port"), ("--no-overlapp", "--no-overlap"), ("--page_size=2", "--page-size"), ("--pool-token", "--pool-tokens")],
)
def test_a_misspelt_option_ends_with_a_suggestion(word: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", word, "4", "M"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"did you mean {meant}?" in error


@pytest.mark.parametrize("word", ["--verison", "serv"])
def test_a_misspelt_command_ends_with_a_suggestion(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word]) == 2
    assert "did you mean" in capsys.readouterr().err


def test_options_are_not_abbreviated() -> None:
    with pytest.raises(OptionError, match="unknown option --page"):
        parse("M", "--page", "4")


def test_a_missing_model_is_named() -> None:
    with pytest.raises(OptionError, match="MODEL is missing"):
        parse("--port", "80")


def _example(name: str) -> str:
    if name == "kv_events":
        return "ipc:///run/kv"
    if name == "device":
        return "cpu"
    spec = FIELDS[name]
    if spec.metadata["choices"]:
        return str(spec.metadata["choices"][-1])
    return {bool: "off", int: str(int(spec.metadata["low"] or 0) + 3), float: "0.5", str: "text"}[type(spec.default)]


@pytest.mark.parametrize("name", list(FIELDS))
def test_every_option_has_a_flag_and_a_variable_that_mean_the_same(name: str) -> None:
    text = _example(name)
    given = parse("M", environ={env_name(name): text}) if name != "model" else parse(environ={env_name(name): text})
    if name == "model":
        assert given.model == "text"
    elif type(FIELDS[name].default) is bool:
        assert getattr(given, name) is False and getattr(parse("M", "--no-" + flag(name)[2:]), name) is False
    else:
        assert (
            getattr(given, name) == getattr(parse("M", flag(name), text), name) != FIELDS[name].default
            or len(FIELDS[name].metadata["choices"]) == 1
        )


@pytest.mark.parametrize("name", list(FIELDS))
def test_an_empty_variable_counts_as_unset(name: str) -> None:
    assert parse("M", environ={env_name(name): ""}) == parse("M")


@pytest.mark.parametrize("name", [name for name, spec in FIELDS.items() if type(spec.default) is not str or spec.metadata["choices"]])
def test_a_variable_of_a_wrong_type_is_refused_by_name(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(env_name(name), "wrong!")
    assert main(["serve", "M"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and env_name(name) in error and "'wrong!'" in error


@pytest.mark.parametrize("name", list(FIELDS))
def test_a_misspelt_variable_warns(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    misspelt = env_name(name) + "X"
    assert parse("M", environ={misspelt: "1"}) == parse("M")
    error = capsys.readouterr().err
    assert error.startswith(f"warning: environment variable {misspelt} ") and f"did you mean {env_name(name)}?" in error


def test_variables_of_the_kernels_do_not_warn(capsys: pytest.CaptureFixture[str]) -> None:
    parse("M", environ={"GRISTMILL_KERNELS_ISA": "avx2", "GRISTMILL_PLATFORM": "cpu", "HOME": "/"})
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", KERNELS_ENV)
def test_a_misspelt_variable_of_the_kernels_warns(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    parse("M", environ={name: "1"})
    assert capsys.readouterr().err == ""
    parse("M", environ={name + "S": "1"})
    assert capsys.readouterr().err == f"warning: environment variable {name}S is not a variable of the kernels (did you mean {name}?)\n"


def test_the_kernels_read_no_other_variables() -> None:
    from gristmill_kernels import dispatch, loader

    assert {dispatch.IMPL_VARIABLE, dispatch.STRICT_VARIABLE, loader.ISA_VARIABLE} == set(KERNELS_ENV)


def test_the_command_line_wins_over_the_environment_and_that_over_the_default() -> None:
    environ = {"GRISTMILL_PORT": "1001", "GRISTMILL_PAGE_SIZE": "8"}
    options = parse("M", "--port", "1002", environ=environ)
    assert (options.port, options.page_size, options.max_queued) == (1002, 8, FIELDS["max_queued"].default)


def test_numbers_that_are_not_finite_are_refused() -> None:
    for text in ("nan", "inf", "-inf", "1e999"):
        with pytest.raises(OptionError, match="--drain-s must be a number"):
            parse("M", f"--drain-s={text}")


def test_python_options_are_checked_like_the_command_line() -> None:
    with pytest.raises(OptionError, match="did you mean page_size"):
        make_options("M", {"pagesize": 4})
    with pytest.raises(OptionError, match="--page-size must be a whole number"):
        make_options("M", {"page_size": "4"})
    with pytest.raises(OptionError, match="--overlap must be true or false"):
        make_options("M", {"overlap": 1})
    assert make_options("M", {"drain_s": 3}).drain_s == 3.0


def test_options_travel_to_a_child_as_json() -> None:
    options = Options(model="M", drain_s=2.5, overlap=False, trace='a"b\n')
    config = LaunchConfig(options=options, model_path="/m", eos_ids=(1, 2), endpoint_prefix="ipc:///d")
    assert LaunchConfig.from_json(config.to_json()) == config
    assert b"\n" not in config.to_json()  # it is sent as one line


@pytest.mark.parametrize(
    "words", [["--help"], ["--version"], ["serve", "--help"], ["generate", "--help"], ["chat", "--help"], ["doctor", "--help"]]
)
def test_help_needs_neither_torch_nor_the_server(words: list[str]) -> None:
    absent = ("torch", "numpy", "zmq", "uvicorn", "tokenizers", "huggingface_hub", "gristmill_kernels")
    code = f"import sys\nfor name in {absent}: sys.modules[name] = None\nfrom gristmill.cli.main import main\nmain({words!r})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert "gristmill" in run.stdout


def test_every_command_is_described_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    shown = capsys.readouterr().out
    assert all(f"  {command} " in shown for command in COMMANDS)


def test_help_texts_format(capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser(prog="p")
    add_options(parser)
    text = parser.format_help()
    assert all(flag(name) in text for name in FIELDS)
    assert isinstance(parser, argparse.ArgumentParser)
