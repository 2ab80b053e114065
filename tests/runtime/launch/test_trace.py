"""Trace parts of several processes become one file that trace viewers read, whatever happened to the processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gristmill.trace import NULL_TRACER, Tracer, merge_traces, open_tracer


def _merge(folder: Path) -> list[dict]:
    count = merge_traces(folder, folder / "out.json")
    trace = json.loads((folder / "out.json").read_text())
    events = [event for event in trace["traceEvents"] if event["ph"] != "M"]
    assert len(events) == count
    return trace["traceEvents"]


def test_processes_and_threads_keep_their_names_and_clock(tmp_path: Path) -> None:
    worker = Tracer(tmp_path, "worker 0")
    worker.complete("forward", 10.0, 10.5, step=1)
    scheduler = Tracer(tmp_path, "scheduler")
    scheduler.complete("plan", 10.1, 10.2, step=2)

    def other() -> None:
        with scheduler.span("apply", step=0):
            pass

    thread = threading.Thread(target=other, name="applier")
    thread.start()
    thread.join()
    worker.close()
    scheduler.close()
    events = _merge(tmp_path)
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert list(names.values()) == [f"scheduler (pid {os.getpid()})", f"worker 0 (pid {os.getpid()})"]
    assert "applier" in {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    forward = next(event for event in events if event["name"] == "forward")
    plan = next(event for event in events if event["name"] == "plan")
    assert (forward["ts"], forward["dur"], forward["args"]) == (0.0, 500000.0, {"step": 1})
    assert plan["ts"] == pytest.approx(100000.0) and plan["pid"] != forward["pid"]


def test_a_killed_process_costs_only_its_last_moments(tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom gristmill.trace import Tracer\n"
        "tracer = Tracer(sys.argv[1], 'worker')\ntracer.complete('early', 1.0, 2.0)\ntracer.flush()\n"
        "tracer.complete('late', 2.0, 3.0)\nprint('x', flush=True)\ntime.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    part = next(tmp_path.glob("part-*.jsonl"))
    part.write_bytes(part.read_bytes() + b'{"name":"half')
    other = Tracer(tmp_path, "scheduler")
    other.instant("drained")
    other.close()
    assert {event["name"] for event in _merge(tmp_path) if event["ph"] != "M"} == {"early", "drained"}


def test_two_tracers_of_one_process_do_not_share_a_part(tmp_path: Path) -> None:
    tracers = [Tracer(tmp_path, "a/b") for _ in range(2)]
    for tracer in tracers:
        tracer.counter("tokens", free=3)
        tracer.close()
        tracer.instant("after the end is ignored")
        tracer.close()
    assert len([event for event in _merge(tmp_path) if event["ph"] == "C"]) == 2


def test_an_empty_folder_gives_an_empty_trace(tmp_path: Path) -> None:
    assert _merge(tmp_path) == []


def test_tracing_off_writes_nothing() -> None:
    assert open_tracer("", "x") is NULL_TRACER
    with NULL_TRACER.span("plan", step=1):
        NULL_TRACER.complete("x", 0, 1)
    assert not NULL_TRACER.enabled
