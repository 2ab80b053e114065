"""Progress of slow start-up work, from whoever does it to whoever can show it: a bar on a terminal, one line elsewhere.

The worker calls `report`; in its own process that becomes a marked line on stderr, which the parent turns into the bar.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TextIO

log = logging.getLogger(__name__)

Sink = Callable[[str, int, int], None]  # what, bytes done, bytes in all

_MARK = "\x1eprogress "  # cannot be in a log line: control characters are escaped there
_INTERVAL_S = 0.1
_sink: Sink | None = None


def report(what: str, done: int, total: int) -> None:
    """Say that `done` of `total` bytes of `what` (such as "weights") are finished; cheap, and silent when nobody shows it."""
    if _sink is not None:
        _sink(what, done, total)


def set_sink(sink: Sink | None) -> None:
    """Choose who is told; None for nobody."""
    global _sink
    _sink = sink


class LineWriter:
    """The sink of a child process: at most ten marked lines a second on its stderr, and always the last one."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._last = 0.0

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if done < total and now - self._last < _INTERVAL_S:
            return
        self._last = now
        self._stream.write(f"{_MARK}{json.dumps([what, done, total])}\n")
        self._stream.flush()


def parse_line(line: str) -> tuple[str, int, int] | None:
    """The report in a line of a child's stderr, or None when it is an ordinary line."""
    if not line.startswith(_MARK):
        return None
    try:
        what, done, total = json.loads(line[len(_MARK) :])
    except ValueError:
        return None
    return str(what), int(done), int(total)


class View:
    """Shows reports: a rich bar while stderr is a terminal, otherwise one log line when something is complete."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._lock = threading.Lock()
        self._started: dict[str, float] = {}
        self._bar: Any = None
        self._tasks: dict[str, Any] = {}
        self._closed = False

    def __call__(self, what: str, done: int, total: int) -> None:
        with self._lock:
            if self._closed:  # a report that came late must not draw over what follows
                return
            start = self._started.setdefault(what, time.monotonic())
            if self._terminal:
                self._draw(what, done, total)
            elif done >= total:
                log.info("%s: %.1f MB in %.1f s", what, total / 1e6, time.monotonic() - start)

    def _draw(self, what: str, done: int, total: int) -> None:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
        if what not in self._tasks:
            self._tasks[what] = self._bar.add_task(what, total=total)
        self._bar.update(self._tasks[what], completed=done, total=total)
        if all(task.finished for task in self._bar.tasks):
            self._stop()

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
            self._tasks.clear()

    def close(self) -> None:
        """Take the bar off the terminal for good."""
        with self._lock:
            self._closed = True
            self._stop()
