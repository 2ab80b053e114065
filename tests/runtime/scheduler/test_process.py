"""Process B over real sockets: from the workers' Ready to the shutdown, with peers that misbehave."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from gristmill.errors import ProtocolError
from gristmill.messages import Control, Out, Reply, Stats, Text
from tests.runtime.scheduler.rig import Rig


def test_the_smallest_rank_sets_the_limits_and_all_get_the_same_steps() -> None:
    with Rig(n_ranks=2, max_running=6) as rig:
        rig.submit("early")
        rig.ready(1, slots=300, max_reqs=9, max_context=200)
        rig.ready(0, slots=500, max_reqs=7, max_context=400)
        stats = rig.first_stats()
        assert (stats.ready, stats.pool_total, stats.max_reqs, stats.max_context) == (True, 300, 6, 200)
        assert stats.caps == {"vocab_size": 5000}
        first, second = rig.step(0), rig.step(1)
        assert first.new[0].ids.tolist() == second.new[0].ids.tolist()
        assert first.write_slots.tolist() == second.write_slots.tolist()


@pytest.mark.parametrize(
    ("ready", "sentence"), [({"page_size": 4}, "pages of 4 tokens where --page-size is 1"), ({"kind": "window"}, "has the pools window")]
)
def test_a_worker_that_does_not_fit_ends_the_engine_with_a_sentence(ready: dict[str, object], sentence: str) -> None:
    with Rig() as rig:
        rig.ready(**ready)  # type: ignore[arg-type]
        rig.join()
        assert isinstance(rig.error, ProtocolError)
        assert sentence in str(rig.error)


def test_a_result_of_the_wrong_step_is_fatal() -> None:
    with Rig() as rig:
        rig.ready()
        rig.submit("r")
        step = rig.step()
        step.step += 5
        rig.answer(step)
        rig.join()
        assert isinstance(rig.error, ProtocolError)
        assert "result of step 6 where that of step 1 was due" in str(rig.error)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_request_runs_to_its_end(overlap: bool) -> None:
    with Rig(overlap=overlap) as rig:
        rig.ready()
        rig.submit("r", max_tokens=3)
        tokens: list[int] = []
        for n in range(3):
            rig.answer(rig.step(), token=100 + n)
        out = rig.heard(Out)
        assert out.open[0].rid == "r"
        while not out.close:
            out = rig.heard(Out)
            tokens += out.tok.tolist()
        assert tokens == [100, 101, 102]
        assert out.close[0].reason == "length"


def test_what_is_no_message_of_the_servers_is_dropped() -> None:
    with Rig() as rig:
        rig.ready()
        rig.server.send(Text("r", "hello"))
        rig.server.send(Stats())
        rig.server.socket.send_multipart([b"\x80\x04\x95", b"x" * 1024])
        rig.server.socket.send(b"")
        rig.control(1, "flush")
        assert rig.heard(Reply).seq == 1
        assert rig.error is None


def test_flush_and_worker_operations_are_answered_over_the_sockets() -> None:
    with Rig() as rig:
        rig.ready()
        rig.control(1, "flush")
        assert rig.heard(Reply).result == {"freed_tokens": 0, "running": 0, "waiting": 0}
        rig.control(2, "stats")
        assert rig.heard(Reply).seq == 2
        rig.control(3, "profile", steps=2)
        message = rig.pulls[0].recv(20_000)
        assert isinstance(message, Control)
        assert (message.op, message.args) == ("profile", {"steps": 2})


def test_shutdown_before_the_workers_are_ready_ends_everything() -> None:
    with Rig() as rig:
        rig.control(5, "shutdown")
        assert rig.heard(Reply).seq == 5
        message = rig.pulls[0].recv(20_000)
        assert isinstance(message, Control)
        assert message.op == "shutdown"
        rig.join()
        assert rig.error is None


def test_shutdown_with_drain_lets_open_requests_end() -> None:
    with Rig() as rig:
        rig.ready()
        rig.submit("r", max_tokens=2)
        step = rig.step()
        rig.control(5, "shutdown", drain=True)
        rig.submit("late")
        rig.answer(step)
        rig.answer(rig.step())
        assert rig.closes(2) == {("error", "shutting_down"), ("length", None)}
        assert rig.heard(Reply).seq == 5
        rig.join()


def test_the_stop_event_ends_it_at_once_while_a_step_is_in_flight() -> None:
    with Rig() as rig:
        rig.ready()
        rig.submit("r")
        rig.step()
        rig.stop.set()
        rig.join()
        assert rig.error is None


def test_idle_costs_no_cpu_and_input_wakes_at_once() -> None:
    with Rig() as rig:
        rig.ready()
        rig.first_stats()
        assert rig.thread.ident is not None
        clock = time.pthread_getcpuclockid(rig.thread.ident)
        before = time.clock_gettime(clock)
        rig.heard(Stats)
        rig.heard(Stats)
        assert time.clock_gettime(clock) - before < 0.2, "two idle seconds cost more than 0.2 s of CPU"
        waits = []
        for n in range(8):
            start = time.monotonic()
            rig.submit(f"r{n}", max_tokens=1)
            step = rig.step()
            waits.append(time.monotonic() - start)
            rig.answer(step)
            rig.closes(1)
        assert min(waits) < 0.02, f"a request waited {min(waits):.3f} s for an idle scheduler"


def test_the_scheduler_never_imports_torch() -> None:
    code = "import sys, gristmill.scheduler.process; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
