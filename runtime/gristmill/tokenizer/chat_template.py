"""Chat templates: Jinja as transformers runs it, and the guard that keeps control tokens in message text plain text.

The guard, in three steps:
1. Where a message string spells a control token, or could complete one together with its neighbours, a mark (a character that
   occurs nowhere in the messages) is put inside it. A harmless message is not touched.
2. The template renders the real messages, so whatever it does with them (strip, split, conditions) works as intended.
3. Control tokens found in the rendered text are the template's own; the text between them is encoded, marks removed, with
   control tokens switched off.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Unicode noncharacters: never assigned, so one of them is practically always absent from real text.
_MARKS = [chr(c) for c in range(0xFDD0, 0xFDF0)] + [chr(0x10000 * plane + 0xFFFE) for plane in range(1, 17)]


class ChatTemplateError(ValueError):
    """The template refused the messages, or failed on them. The text is fit for a client."""


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for training; it renders its body."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: jinja2.runtime.Macro) -> str:
        return caller()


class _Namespace(jinja2.utils.Namespace):
    """Refuses underscore names, which could reach interpreter internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, given = args[0], dict(*args[1:], **kwargs)
        for name in given:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"namespace attribute {name!r} starts with an underscore")


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _tojson(
    x: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None, sort_keys: bool = False
) -> str:
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=16)
def compile_template(source: str) -> jinja2.Template:
    """Compile `source` in the sandbox, with the helpers that transformers offers. Raises ChatTemplateError when it is not Jinja."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda fmt: datetime.now().strftime(fmt)
    environment.globals["namespace"] = _Namespace
    try:
        return environment.from_string(source)
    except jinja2.exceptions.TemplateError as error:
        raise ChatTemplateError(f"the model's chat template does not compile: {error}") from error


def render(source: str, variables: dict[str, Any]) -> str:
    """The text that template `source` makes. Raises ChatTemplateError with the template's own reason."""
    try:
        return compile_template(source).render(**variables)
    except ChatTemplateError:
        raise
    except jinja2.exceptions.TemplateError as error:
        raise ChatTemplateError(f"the model's chat template refused the messages: {error}") from error
    except Exception as error:  # a template may fail in any way on input that it does not expect
        raise ChatTemplateError(f"the model's chat template failed on these messages: {type(error).__name__}: {error}") from error


class Guard:
    """Marks text that spells one of `specials` (control tokens as text), see the module's docstring."""

    def __init__(self, specials: Iterable[str]) -> None:
        self._specials = sorted({s for s in specials if len(s) > 1}, key=len, reverse=True)
        rests: dict[str, list[str]] = {}
        for special in self._specials:
            rests.setdefault(special[0], []).append(re.escape(special[1:]))
        # A lookahead finds overlapping occurrences too; in front of it, one of very few characters lets the search skip ahead.
        alternatives = "|".join(f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in rests.items())
        self._inside = re.compile(alternatives) if alternatives else None
        self._longest = max(map(len, self._specials), default=0)
        self._prefixes = {s[:i] for s in self._specials for i in range(1, len(s))}
        self._suffixes = {s[i:] for s in self._specials for i in range(1, len(s))}

    def protect(self, value: Any) -> tuple[Any, str]:
        """`value` (strings, lists, dicts) with marks, and the mark; "" when nothing had to be marked."""
        if self._inside is None or not self._touches(value):
            return value, ""
        text = json.dumps(value, ensure_ascii=False)
        mark = next((m for m in _MARKS if m not in text), "")
        if not mark:
            raise ChatTemplateError("the messages contain every Unicode noncharacter; at least one must be absent")
        return self._marked(value, mark), mark

    def _touches(self, value: Any) -> bool:
        if isinstance(value, str):
            return self._mark_text(value, "x") != value
        if isinstance(value, dict):
            return any(self._touches(part) for pair in value.items() for part in pair)
        return isinstance(value, list | tuple) and any(map(self._touches, value))

    def _marked(self, value: Any, mark: str) -> Any:
        if isinstance(value, str):
            return self._mark_text(value, mark)
        if isinstance(value, dict):  # keys name fields for the template; those that spell a control token are marked as well
            return {self._mark_inside(k, mark) if isinstance(k, str) else k: self._marked(v, mark) for k, v in value.items()}
        return [self._marked(v, mark) for v in value] if isinstance(value, list | tuple) else value

    def _mark_inside(self, text: str, mark: str) -> str:
        assert self._inside is not None
        cuts = [match.end() for match in self._inside.finditer(text)]
        return mark.join(text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])) if cuts else text

    def _mark_text(self, text: str, mark: str) -> str:
        """Marks inside each spelt token, and at an end of `text` that neighbouring text could turn into one."""
        reach = range(1, min(len(text), self._longest - 1) + 1)
        opens = any(text[-n:] in self._prefixes for n in reach)
        closes = any(text[:n] in self._suffixes for n in reach)
        if not opens and text and len(text) < self._longest:
            opens = any(text in special for special in self._specials)
        marked = self._mark_inside(text, mark)
        return (mark if closes else "") + marked + (mark if opens else "")
