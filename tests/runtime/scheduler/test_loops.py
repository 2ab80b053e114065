"""The event loops in time: what overlaps with what, and in which order messages leave."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gristmill.messages import Out
from gristmill.scheduler.scheduler import Scheduler
from gristmill.trace import merge_traces
from gristmill.worker import process as worker_process
from tests.runtime.scheduler.rig import Rig

STEPS = 24


def cycle_ms(rig: Rig) -> float:
    """The time between two outputs when nothing else disturbs: the lower quartile over STEPS steps."""
    worker = threading.Thread(target=worker_process.run, args=(rig.config, rig.context, rig.stop), daemon=True)
    worker.start()
    rig.submit("r", max_tokens=STEPS, ignore_eos=True)
    times: list[float] = []
    out = rig.heard(Out)
    while not out.close:
        out = rig.heard(Out)
        times.append(time.monotonic())
    rig.stop.set()
    rig.join()
    worker.join(20)
    gaps = sorted((b - a) * 1000 for a, b in itertools.pairwise(times[2:]))
    return gaps[len(gaps) // 4]


@pytest.fixture
def slow_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning takes 10 ms more."""
    plan: Callable[[Scheduler], object] = Scheduler.plan

    def slow(self: Scheduler) -> object:
        time.sleep(0.010)
        return plan(self)

    monkeypatch.setattr(Scheduler, "plan", slow)


@pytest.mark.usefixtures("slow_plan")
def test_overlap_hides_planning_and_the_normal_loop_does_not() -> None:
    with Rig(own_workers=False, model_path="null:20", overlap=True) as rig:
        overlapped = cycle_ms(rig)
    with Rig(own_workers=False, model_path="null:20", overlap=False) as rig:
        normal = cycle_ms(rig)
    assert 19 < overlapped < 26, f"a 20 ms step took {overlapped:.1f} ms although planning overlaps"
    assert 29 < normal < 37, f"20 ms of work after 10 ms of planning took {normal:.1f} ms"


@pytest.mark.usefixtures("slow_plan")
def test_the_trace_shows_planning_inside_the_forward_before_it(tmp_path: Path) -> None:
    parts = tmp_path / "parts"
    parts.mkdir()
    with Rig(own_workers=False, model_path="null:20", overlap=True, trace_dir=str(parts)) as rig:
        cycle_ms(rig)
    merge_traces(parts, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = {(event["name"], event["args"]["step"]): event for event in events if "step" in event.get("args", {}) and event["ph"] == "X"}
    inside = 0
    for step in range(2, STEPS):
        plan, forward = spans["plan", step + 1], spans["forward", step]
        inside += forward["ts"] <= plan["ts"] and plan["ts"] + plan["dur"] <= forward["ts"] + forward["dur"]
        assert ("recv", step) in spans
        assert ("apply", step) in spans
    assert inside >= STEPS // 2, f"planning of the next step lay inside the forward pass only {inside} times"
