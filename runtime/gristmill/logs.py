"""Logging of all processes: one line per event on stderr with time, level and process role, safe against text that users send."""

from __future__ import annotations

import logging
import re
import sys
import time
import unicodedata
import warnings
from typing import TextIO

# C0 and C1 controls, line separators and bidirectional overrides: all that could forge a line or hide text in a terminal
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_NAMED = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def escape(text: str) -> str:
    """`text` on one line: control characters, ANSI escapes and direction overrides as visible escapes."""
    return _UNSAFE.sub(_escape_one, text)


def _escape_one(match: re.Match[str]) -> str:
    char = match.group()
    if char in _NAMED:
        return _NAMED[char]
    return f"\\x{ord(char):02x}" if ord(char) < 256 else f"\\u{ord(char):04x}"


class LineFormatter(logging.Formatter):
    """`2026-01-31 12:00:00.123 INFO scheduler: message`; a traceback follows on the same line, its lines joined by ` | `."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self.role = role

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        if record.exc_info:
            lines = self.formatException(record.exc_info).splitlines()
            message += " | " + " | ".join(line.strip() for line in lines)
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        return f"{stamp}.{int(record.msecs):03d} {record.levelname} {self.role}: {escape(message)}"


def setup_logging(level: str, role: str) -> None:
    """Send all logging of this process to stderr, one line per event. Safe to call twice."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(role))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(getattr(logging, level.upper()))
    warnings.showwarning = _log_warning
    # chatty libraries say what they do at info; only their warnings are ours to show
    for name in ("httpx", "httpcore", "urllib3", "filelock", "huggingface_hub", "asyncio", "uvicorn"):
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))


def _log_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: TextIO | None = None, line: str | None = None
) -> None:
    logging.getLogger("warnings").warning("%s", message)


def shorten(text: str, limit: int = 200) -> str:
    """`text` for a log line: escaped, and cut to `limit` characters with the number left out."""
    text = unicodedata.normalize("NFC", text)
    return escape(text) if len(text) <= limit else f"{escape(text[:limit])}... (+{len(text) - limit} characters)"
