"""The `gristmill` command. `--help` and `--version` load nothing but the standard library and the options."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import sys
from collections.abc import Sequence

import gristmill
from gristmill.cli.arguments import Parser
from gristmill.errors import GristmillError
from gristmill.logs import escape
from gristmill.options import suggestion

COMMANDS = {
    "serve": "serve a model over an OpenAI-compatible HTTP API",
    "generate": "complete prompts and print the text",
    "chat": "talk to a model in the terminal",
    "models": "list the models of the catalogue",
    "simulate": "predict throughput and latency from a trace of requests",
    "doctor": "say what works on this machine and why not",
}


def build_parser() -> argparse.ArgumentParser:
    """The parser of the bare command; each subcommand parses the words after its own name."""
    epilog = "commands:\n" + "\n".join(f"  {name:10}{text}" for name, text in COMMANDS.items())
    parser = Parser(
        prog="gristmill",
        description="A small LLM inference engine.",
        epilog=epilog + "\n\n`gristmill COMMAND --help` lists the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"gristmill {gristmill.__version__}")
    parser.add_argument("command", metavar="COMMAND", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. Errors a person can act on are one line on stderr."""
    words = list(sys.argv[1:] if argv is None else argv)
    _prepare_streams()
    try:
        code = _run(words)
        sys.stdout.flush()
        return code
    except GristmillError as error:
        print(f"error: {escape(str(error))}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `gristmill generate ... | head`
        _give_up_output()
        return 141
    except OSError as error:  # a full disk behind standard output, no descriptors left
        _give_up_output()
        print(f"error: {escape(str(error))}", file=sys.stderr)
        return 1


def _prepare_streams() -> None:
    """Standard streams that the caller closed become the null device; no stream stops at a character it cannot encode or decode."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, this one
    if sys.stdin is None:
        sys.stdin = os.fdopen(0, closefd=False)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "replace"), (sys.stderr, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def _give_up_output() -> None:
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or the flush at exit complains


def _run(words: Sequence[str]) -> int:
    parser = build_parser()
    if not words:
        parser.print_help()
        return 2
    if words[0].startswith("-"):
        parser.parse_args(words[:1])
        parser.error(f"unknown option {words[0]}")
    command, rest = words[0], words[1:]
    if command not in COMMANDS:
        parser.error(f"there is no command {command!r}{suggestion(command, COMMANDS)}; commands: {', '.join(COMMANDS)}")
    module = importlib.import_module(f"gristmill.cli.{command}")
    command_parser = Parser(prog=f"gristmill {command}", description=COMMANDS[command][0].upper() + COMMANDS[command][1:] + ".")
    module.add_arguments(command_parser)
    result: int = module.run(command_parser.parse_args(rest))
    return result
