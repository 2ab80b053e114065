"""What `generate` and `chat` share: sampling flags, and the text that comes from a command line."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator
from typing import Any

from gristmill.errors import OptionError

_FLAGS: tuple[tuple[str, type[int] | type[float], str], ...] = (
    ("--temperature", float, "0 is greedy (default: 0.7)"),
    ("--top-p", float, "smallest set of tokens with this probability (default: 1)"),
    ("--top-k", int, "most likely tokens to choose from (default: all)"),
    ("--min-p", float, "least probability relative to the best token (default: 0)"),
    ("--seed", int, "repeat a run (default: random)"),
    ("--repetition-penalty", float, "above 1: avoid repeating tokens (default: 1)"),
)


def add_sampling(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    """Flags of one request; ranges are checked by the engine, which names what it refuses. `max_tokens` is the default."""
    group = parser.add_argument_group("sampling")
    max_tokens_help = f"most tokens to generate (default: {max_tokens}, or what the context leaves)"
    for flag, kind, text in (("--max-tokens", int, max_tokens_help), *_FLAGS):
        group.add_argument(flag, type=_number(kind, flag), metavar="INT" if kind is int else "FLOAT", help=text)
    group.set_defaults(temperature=0.7)
    group.add_argument("--stop", action="append", metavar="STR", help="end at this text, which is not shown; may be given several times")


def sampling_from(arguments: argparse.Namespace) -> dict[str, Any]:
    """The flags that were given, as keyword arguments of Engine.generate."""
    names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty", "stop")
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    if "stop" in given:
        given["stop"] = [argument_text("--stop", text) for text in given["stop"]]
    with option_errors():
        _check(given)
    return given


def _check(given: dict[str, Any]) -> None:
    """What is wrong for every model is said before one is loaded; the engine checks the rest."""
    from gristmill.tokenizer.validate import Limits, check_sampling, check_stops

    check_stops(given.get("stop", ()))
    any_model = Limits(vocab_size=1 << 31, context_length=1 << 62)
    check_sampling(any_model, 1, **{name: value for name, value in given.items() if name != "stop"})


@contextlib.contextmanager
def option_errors() -> Iterator[None]:
    """The engine's refusal of a field is, on the command line, that of the option which set it."""
    from gristmill.tokenizer.validate import RequestError

    try:
        yield
    except RequestError as error:
        flags = {flag.lstrip("-").replace("-", "_"): flag for flag in ("-n", "--max-tokens", "--stop", *(flag for flag, _, _ in _FLAGS))}
        name = error.param or ""
        if name not in flags:
            raise
        text = str(error)
        raise OptionError(flags[name] + text.removeprefix(name) if text.startswith(f"{name} ") else text) from error


def with_max_tokens(sampling: dict[str, Any], default: int, n_prompt: int, context_length: int) -> dict[str, Any]:
    """`sampling` with max_tokens: what the user asked for, else the default as far as the context allows."""
    return {"max_tokens": max(1, min(default, context_length - n_prompt)), **sampling}


def argument_text(name: str, text: str) -> str:
    """An argument as text. Bytes that the locale could not decode arrive as lone surrogates; they are UTF-8 or refused."""
    try:
        return os.fsencode(text).decode("utf-8")
    except UnicodeError:
        raise OptionError(f"{name} is not valid UTF-8 text: {text[:40]!a}") from None


def _number(kind: type[int] | type[float], flag: str) -> Any:
    """A converter whose refusal is one line in the words of the other options."""

    def convert(text: str) -> int | float:
        try:
            return kind(text)
        except ValueError:
            raise OptionError(f"{flag} must be {'a whole number' if kind is int else 'a number'}, not {text!r}") from None

    return convert
