"""Command-line arguments made from the Options dataclass, with one-line errors; precedence: command line, environment, default."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from gristmill.errors import OptionError
from gristmill.logs import escape
from gristmill.options import FIELDS, Options, env_name, flag, from_environment, parse_value, suggestion

GROUPS = {
    "model": "model",
    "server": "server",
    "compute": "where and how the model is computed",
    "memory": "KV memory",
    "scheduling": "scheduling",
    "operation": "operation",
}
# options that mean nothing to a command without a server
SERVER_ONLY = frozenset(name for name, spec in FIELDS.items() if spec.metadata["group"] == "server")


class Parser(argparse.ArgumentParser):
    """An argument parser that raises OptionError instead of printing its usage, and knows no abbreviations."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})
        if "formatter_class" not in kwargs:
            self.formatter_class = lambda prog: argparse.HelpFormatter(prog, max_help_position=32, width=120)

    def error(self, message: str) -> NoReturn:
        raise OptionError(message)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuses an unknown option before its value could be taken for something else."""
        words = list(sys.argv[1:] if args is None else args)
        known = [name for action in self._actions for name in action.option_strings]
        if not any(isinstance(action, argparse._SubParsersAction) for action in self._actions):
            for index, word in enumerate(words):
                if word == "--":
                    break
                name = word.split("=", 1)[0]
                if name.startswith("--") and name not in known and not self._takes_value(words[:index]):
                    raise OptionError(f"unknown option {name}{suggestion(name, known)}")
        return super().parse_known_args(words, namespace)

    def _takes_value(self, before: Sequence[str]) -> bool:
        """Whether the word after `before` is the value of an option; argparse itself then says what is wrong with it."""
        action = self._option_string_actions.get(before[-1]) if before else None
        return action is not None and action.nargs != 0


class _Value(argparse.Action):
    """Stores what parse_value makes of the text, so that a wrong value is refused in the dataclass's own words."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        setattr(namespace, self.dest, parse_value(FIELDS[self.dest], values, option_string or flag(self.dest)))


def add_options(parser: argparse.ArgumentParser, skip: frozenset[str] = frozenset(), model: bool = True) -> None:
    """Add MODEL (unless `model` is off) and every option not in `skip`, grouped. Options not given are absent from the namespace."""
    if model:
        parser.usage = f"{parser.prog} [options] MODEL"
        parser.add_argument("model", nargs="?", default=argparse.SUPPRESS, metavar="MODEL", help=FIELDS["model"].metadata["help"])
    shown = {name: spec for name, spec in FIELDS.items() if name != "model" and name not in skip}
    used = {spec.metadata["group"] for spec in shown.values()}
    groups = {key: parser.add_argument_group(title) for key, title in GROUPS.items() if key in used}
    for name, spec in shown.items():
        meta = spec.metadata
        group = groups[meta["group"]]
        default = ("on" if spec.default else "off") if type(spec.default) is bool else spec.default
        text = meta["help"] + (f" (default: {default})" if default != "" else "")
        text = text.replace("%", "%%")
        if type(spec.default) is bool:
            group.add_argument(flag(name), dest=name, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
        else:
            metavar = "{" + ",".join(map(str, meta["choices"])) + "}" if meta["choices"] else type(spec.default).__name__.upper()
            group.add_argument(flag(name), dest=name, action=_Value, default=argparse.SUPPRESS, metavar=metavar, help=text)


def options_from(
    namespace: argparse.Namespace, environ: Mapping[str, str] | None = None, skip: frozenset[str] = frozenset(), **defaults: Any
) -> Options:
    """The Options of a parsed command line and the environment; `defaults` replace the dataclass's own for this command.

    Prints a warning for each variable with our prefix that is no option.
    """
    names = [name for name in FIELDS if name not in skip]
    values, warnings = from_environment(os.environ if environ is None else environ, names)
    for warning in warnings:
        print(f"warning: {escape(warning)}", file=sys.stderr)
    given = {name: getattr(namespace, name) for name in names if hasattr(namespace, name)}
    merged = {**defaults, **values, **given}
    if not merged.get("model"):
        raise OptionError(f"MODEL is missing: a directory, a .gguf file, a catalogue name or a hub id (or set {env_name('model')})")
    return Options(**merged)
