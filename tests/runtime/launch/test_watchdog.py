"""When a part of the engine counts as hung and when not: the judge alone, with a clock of its own, then the threads of an Engine."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable

import pytest

from gristmill import Engine
from gristmill.errors import GristmillError
from gristmill.messages import Step
from gristmill.watchdog import Hang, Seen, Watchdog, beat_interval_s, is_stack_line, own_stacks
from gristmill.worker.null import NullRunner


class Life:
    """An engine as its server sees it, second by second; a change to `step` is progress of the worker."""

    def __init__(self, limit_s: float = 300.0) -> None:
        self.watchdog = Watchdog(limit_s)
        self.seen = Seen()
        self.now = 1000.0

    def run(self, seconds: float, *, stats: bool = True, heartbeats: bool = True, working: bool = False) -> Hang | None:
        """The first verdict within `seconds`; `working`: the oldest step is as old as the time since this began."""
        start = self.now
        while self.now < start + seconds:
            self.now += self.watchdog.period_s
            seen = self.seen
            self.seen = dataclasses.replace(
                seen,
                stats=seen.stats + stats,
                heartbeats=seen.heartbeats + heartbeats,
                age_s=(self.now - start if working else 0.0) if stats else seen.age_s,
            )
            if hang := self.watchdog.check(self.seen, self.now):
                return hang
        return None

    def ready(self) -> Life:
        self.seen = dataclasses.replace(self.seen, ready=True)
        assert self.run(5) is None
        return self


def test_nothing_counts_while_the_model_loads() -> None:
    life = Life()
    assert life.run(5000, stats=False) is None  # the scheduler says nothing before the worker is ready
    assert life.ready().run(10_000) is None  # and an idle engine may be idle for ever


@pytest.mark.parametrize(
    ("part", "silence"),
    [
        ("scheduler", {"stats": False}),
        ("detokenizer", {"stats": False, "heartbeats": False}),
        ("model worker", {"working": True}),
    ],
)
@pytest.mark.parametrize("limit_s", [2.0, 300.0])
def test_who_is_silent_for_the_limit_hangs(part: str, silence: dict[str, bool], limit_s: float) -> None:
    life = Life(limit_s).ready()
    before = life.now
    hang = life.run(10 * limit_s, **silence)
    assert hang is not None and hang.part == part and limit_s <= hang.silent_s <= limit_s + 1
    assert limit_s <= life.now - before <= limit_s + 2 * life.watchdog.period_s
    assert str(hang) == f"the {part} hangs: it has made no progress for {hang.silent_s:.0f} s"


def test_a_limit_of_0_never_trips() -> None:
    assert Life(0.0).ready().run(100_000, stats=False, heartbeats=False) is None


def test_long_steps_are_no_hang_as_long_as_each_ends() -> None:
    life = Life().ready()
    for step in range(10):
        life.seen = dataclasses.replace(life.seen, applied_step=step + 1)
        assert life.run(295, working=True) is None


def test_an_exclusive_operation_of_the_workers_is_not_counted() -> None:
    life = Life().ready()
    assert life.run(290, working=True) is None
    assert life.run(5000) is None  # nothing is in flight while it runs
    assert life.run(290, working=True) is None


def test_a_scheduler_that_recovers_is_forgiven_and_the_worker_is_judged_by_fresh_numbers() -> None:
    life = Life().ready()
    assert life.run(100, working=True) is None
    assert life.run(290, stats=False) is None  # the step in flight looks old in the last numbers, but who knows
    life.seen = dataclasses.replace(life.seen, applied_step=7)
    assert life.run(290, working=True) is None


@pytest.mark.parametrize("limit_s", [2.0, 300.0])
def test_the_time_in_which_everything_was_stopped_is_nobodys_fault(limit_s: float) -> None:
    life = Life(limit_s).ready()
    assert life.run(limit_s / 4, working=True) is None
    life.now += 100_000  # Ctrl-Z, then fg the next day
    assert life.watchdog.check(life.seen, life.now) is None
    life.seen = dataclasses.replace(life.seen, applied_step=3)
    assert life.run(10) is None


def test_small_limits_have_short_intervals() -> None:
    assert [beat_interval_s(limit) for limit in (300.0, 4.0, 1.0, 0.0)] == [1.0, 1.0, 0.25, 1.0]


def test_stack_lines_are_known_and_log_lines_are_not() -> None:
    lines = [line for line in own_stacks() if line]  # a blank one stands between two threads
    assert len(lines) > 3 and [line for line in lines if not is_stack_line(line)] == []
    assert any("test_watchdog.py" in line for line in lines)
    for line in ("2026-01-31 12:00:00.123 INFO scheduler: message", "error: x", "Traceback (most recent call last):", ""):
        assert not is_stack_line(line)


# --- the engine in one process


def engine(**options: object) -> Engine:
    return Engine("null:0:300", **{"watchdog_s": 1.0, "pool_tokens": 512, **options})


def test_an_engine_whose_forward_never_returns_raises(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    release = threading.Event()
    original: Callable[..., object] = NullRunner.forward

    def forward(self: NullRunner, step: Step) -> object:
        if step.step > 1:
            release.wait(60)
        return original(self, step)

    monkeypatch.setattr(NullRunner, "forward", forward)
    with engine() as running:
        start = time.monotonic()
        with pytest.raises(GristmillError, match=r"the model worker hangs: it has made no progress for \d s"):
            running.generate("x", max_tokens=10, ignore_eos=True)
        for call in (lambda: running.generate("x"), lambda: list(running.stream("x")), running.flush, lambda: running.stats):
            with pytest.raises(GristmillError, match="the model worker hangs"):
                call()
        assert time.monotonic() - start < 10
        start = time.monotonic()
        running.close()
        assert time.monotonic() - start < 5
    release.set()
    stacks = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert any("in forward" in line for line in stacks)


def test_an_engine_whose_scheduler_hangs_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    from gristmill.scheduler.scheduler import Scheduler

    release = threading.Event()
    original = Scheduler.handle

    def handle(self: Scheduler, message: object) -> None:
        release.wait(60)
        original(self, message)  # type: ignore[arg-type]

    monkeypatch.setattr(Scheduler, "handle", handle)
    with engine() as running:
        with pytest.raises(GristmillError, match="the scheduler hangs"):
            running.generate("x")
        release.set()
