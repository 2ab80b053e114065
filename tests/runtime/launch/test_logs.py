"""A log line cannot be forged by what users send."""

from __future__ import annotations

import io
import logging

from hypothesis import given
from hypothesis import strategies as st

from gristmill.logs import LineFormatter, escape, shorten


@given(st.text())
def test_escaped_text_is_one_printable_line(text: str) -> None:
    shown = escape(text)
    assert len(shown.splitlines()) <= 1
    assert not any(ord(char) < 32 or 127 <= ord(char) < 160 for char in shown)
    shown.encode()  # no lone surrogates


def _log(message: str, *args: object, exc_info: bool = False) -> str:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LineFormatter("server"))
    logger = logging.Logger("test", logging.DEBUG)
    logger.addHandler(handler)
    logger.warning(message, *args, exc_info=exc_info)
    return stream.getvalue()


def test_a_forged_line_and_ansi_escapes_stay_inside_their_event() -> None:
    line = _log("model %s", "x\r\n2026-01-01 ERROR forged \x1b[31mred\u2028next")
    assert line.count("\n") == 1 and line.endswith("\n")
    assert r"x\r\n2026-01-01 ERROR forged \x1b[31mred\u2028next" in line
    assert " WARNING server: model " in line


def test_a_traceback_is_one_line() -> None:
    try:
        raise ValueError("a\nb")
    except ValueError:
        line = _log("failed", exc_info=True)
    assert line.count("\n") == 1 and "ValueError: a" in line


def test_long_text_is_cut_with_its_length() -> None:
    assert shorten("a" * 300, 10) == "aaaaaaaaaa... (+290 characters)"
    assert shorten("ok") == "ok"
