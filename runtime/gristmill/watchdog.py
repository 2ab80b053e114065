"""Notices a process of the engine that lives and does nothing: a pure judge of what the server sees, and the dump of Python stacks.

What counts as progress: the scheduler sends Stats about once a second, whatever it does; the detokenizer passes them on and sends a
heartbeat of its own; a worker answers the steps that it was sent. Nothing is expected of a worker that has no step (no request, an
exclusive control operation, which runs while nothing is in flight) or of anybody before the model is loaded. The server's own event
loop is watched by a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

STACK_SIGNAL = signal.SIGUSR1
_STACK_LINE = re.compile(r'(Current thread|Thread) 0x[0-9a-f]+ |  File "|  <no Python frame>|  \.\.\.$')
_MOST_PERIODS = 2  # checks that come later than this were late themselves: the server was stopped, and perhaps all with it


def beat_interval_s(watchdog_s: float) -> float:
    """How often the scheduler and the detokenizer say that they live: once a second, or often enough for a small `watchdog_s`."""
    return min(1.0, watchdog_s / 4) if watchdog_s else 1.0


@dataclass(frozen=True)
class Seen:
    """What the server has heard so far. `stats` and `heartbeats` are counts; the rest is from the newest Stats."""

    ready: bool = False
    stats: int = 0
    heartbeats: int = 0
    applied_step: int = 0
    age_s: float = 0.0  # of the oldest step in flight


@dataclass(frozen=True)
class Hang:
    """A verdict: which part of the engine has made no progress, and for how long."""

    part: str
    silent_s: float

    def __str__(self) -> str:
        return f"the {self.part} hangs: it has made no progress for {self.silent_s:.0f} s"


class Watchdog:
    """`check` is to be called every `period_s`.

    Time counts only as it is watched: when the whole engine was stopped (Ctrl-Z, a suspended machine), nobody is to blame.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.period_s = beat_interval_s(limit_s)
        self._before: tuple[Seen, float] | None = None
        self._no_stats_s = self._no_heartbeat_s = self._no_result_s = 0.0

    def check(self, seen: Seen, now: float) -> Hang | None:
        """The hang that is now certain, or None."""
        before, then = self._before or (seen, now)
        self._before = (seen, now)
        if not self.limit_s or not seen.ready:
            return None
        passed = min(now - then, _MOST_PERIODS * self.period_s)
        self._no_heartbeat_s = 0.0 if seen.heartbeats != before.heartbeats else self._no_heartbeat_s + passed
        if seen.stats == before.stats:
            self._no_stats_s += passed
        else:  # the worker is judged by fresh numbers alone
            waits = seen.age_s > 0 and seen.applied_step == before.applied_step
            self._no_result_s = self._no_result_s + self._no_stats_s + passed if waits else 0.0
            self._no_stats_s = 0.0
        # stats pass through the detokenizer: while that one is silent, nothing is known of those behind it
        if self._no_heartbeat_s >= self.limit_s:
            return Hang("detokenizer", self._no_heartbeat_s)
        if self._no_stats_s >= self.limit_s and self._no_heartbeat_s < self.limit_s / 2:
            return Hang("scheduler", self._no_stats_s)
        if self._no_result_s >= self.limit_s:
            return Hang("model worker", self._no_result_s)
        return None


async def watch(seen: Callable[[], Seen], limit_s: float) -> Hang:
    """Return when something hangs; never with a limit of 0."""
    watchdog = Watchdog(limit_s)
    while True:
        await asyncio.sleep(watchdog.period_s)
        hang = watchdog.check(seen(), time.monotonic())
        if hang is not None:
            return hang


class LoopWatch:
    """A thread that notices when `loop` itself hangs, and calls `on_hang` there, once. Used as a context."""

    def __init__(self, loop: asyncio.AbstractEventLoop, limit_s: float, on_hang: Callable[[Hang], None]) -> None:
        self._loop, self._limit_s, self._on_hang = loop, limit_s, on_hang
        self._turns = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="loop-watch", daemon=True)

    def __enter__(self) -> LoopWatch:
        if self._limit_s:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()

    def _turn(self) -> None:
        self._turns += 1

    def _run(self) -> None:
        period_s = beat_interval_s(self._limit_s)
        silent_s, turns, then = 0.0, 0, time.monotonic()
        with contextlib.suppress(RuntimeError):  # the loop is closed
            while silent_s < self._limit_s:
                self._loop.call_soon_threadsafe(self._turn)
                if self._end.wait(period_s):
                    return
                now = time.monotonic()
                silent_s = 0.0 if self._turns != turns else silent_s + min(now - then, _MOST_PERIODS * period_s)
                turns, then = self._turns, now
            self._on_hang(Hang("server", silent_s))


def dump_on_signal(loop: asyncio.AbstractEventLoop | None = None, then: Callable[[], None] = lambda: None) -> None:
    """From now on STACK_SIGNAL writes the Python stack of every thread of this process to stderr, even while native code runs; after
    that `loop`, when it is alive, runs `then`."""
    faulthandler.unregister(STACK_SIGNAL)  # it keeps the handler before it, which must be that of the loop
    if loop is not None:
        loop.add_signal_handler(STACK_SIGNAL, then)
    with contextlib.suppress(ValueError, OSError):  # a stderr without a descriptor
        faulthandler.register(STACK_SIGNAL, file=sys.stderr, all_threads=True, chain=loop is not None)


def is_stack_line(line: str) -> bool:
    """Whether `line` was written by such a dump."""
    return bool(_STACK_LINE.match(line))


def own_stacks() -> list[str]:
    """The Python stacks of all threads of this process, as lines."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file=file, all_threads=True)
        file.seek(0)
        return file.read().splitlines()
