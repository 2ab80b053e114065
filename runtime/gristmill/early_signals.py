"""SIGINT, SIGTERM and SIGHUP between the start of `gristmill serve` and its event loop, which then handles them itself.

A KeyboardInterrupt raised in the middle of an import or a callback may be swallowed there, and the server would start all the same.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_seen: list[int] = []


def exit_at_once() -> None:
    """Until something exists that must be cleaned up, a signal ends the process on the spot."""
    _handle(lambda number: os._exit(128 + number))


def remember() -> None:
    """From now on a signal is kept for `taken`."""
    _handle(_seen.append)


def taken() -> list[int]:
    """The signals that came since `remember`."""
    found = _seen[:]
    _seen.clear()
    return found


def handled() -> tuple[signal.Signals, ...]:
    """The signals that mean something to this process: under nohup, SIGHUP does not."""
    return tuple(number for number in NUMBERS if signal.getsignal(number) != signal.SIG_IGN)


def _handle(what: Callable[[int], object]) -> None:
    for number in handled():
        signal.signal(number, lambda received, _frame: what(received))
