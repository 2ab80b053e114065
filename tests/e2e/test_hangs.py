"""A process that lives and does nothing: it is noticed, all stacks are in the log, and the engine ends with one sentence."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.served import Served, served

pytestmark = pytest.mark.e2e

ROLES = {"scheduler": "scheduler", "detokenizer": "detokenizer", "model worker": "worker"}
STUCK_SCHEDULER = """
import sys
if sys.orig_argv[-1:] == ["scheduler"]:
    from gristmill.scheduler.scheduler import Scheduler
    def handle(self, message):
        while True:
            pass
    Scheduler.handle = handle
"""
STUCK_SERVER = """
import sys
if "serve" in sys.orig_argv:
    from gristmill.server import admin
    async def get_model(request):
        while True:
            pass
    admin.get_model = get_model
"""


class Asked:
    """An open request, and what came of it."""

    def __init__(self, server: Served, **fields: Any) -> None:
        self.server, self.fields = server, fields
        self.status, self.answer = 0, ""
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        connection = self.server.connect()
        body = {"model": "null", "prompt": "x", "max_tokens": 2000, "ignore_eos": True, **self.fields}
        connection.request("POST", "/v1/completions", json.dumps(body))
        response = connection.getresponse()
        self.status, self.answer = response.status, response.read().decode()

    def end(self) -> str:
        self.thread.join(20)
        assert not self.thread.is_alive()
        return self.answer


def null_server(ms: float, *options: str, **more: Any) -> Any:
    return served(f"null:{ms}", "--served-model-name=null", "--watchdog-s=2", "--pool-tokens=4096", *options, **more)


def check_end(server: Served, part: str, asked: list[Asked], *, stack_of: str | None = None) -> None:
    """The end that a hang of `part` brings: the sentence, the errors, the stacks of all four processes, nothing left."""
    for request in asked:
        assert f"the {part} hangs: it has made no progress for" in request.end()
    assert server.wait(10) == 1
    server.wait_gone(1.0)
    errors = [line for line in server.log if line.startswith("error: ")]
    assert len(errors) == 1, server.text
    assert re.match(rf"error: the {part} hangs: it has made no progress for \d s \(--watchdog-s 2\); the stacks", errors[0]), errors
    for name in ("server", "scheduler", "detokenizer", "model worker"):
        assert any(f"stack of the {name}:   File" in line for line in server.log), (name, server.text)
    assert stack_of is None or any(f"stack of the {part}:" in line and stack_of in line for line in server.log), server.text
    assert "Traceback" not in server.text


def watch_health(server: Served) -> list[tuple[int, Any]]:
    """Every answer of /health that differs from the one before, until the server is gone."""
    answers: list[tuple[int, Any]] = []
    while True:
        try:
            found = server.request("GET", "/health")
        except OSError:
            return answers
        if not answers or found != answers[-1]:
            answers.append(found)
        time.sleep(0.02)


def test_a_forward_that_never_returns(tmp_path: Path) -> None:
    with null_server(3_000_000) as server:
        asked = [Asked(server), Asked(server, stream=True, n=2)]
        answers = watch_health(server)
        check_end(server, "model worker", asked, stack_of="in forward")
        assert [status for status, _ in answers] == [200, 503]
        assert "the model worker hangs" in answers[1][1]["error"]["message"]
        assert {request.status for request in asked} == {503}


def test_a_scheduler_in_an_endless_loop(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(STUCK_SCHEDULER)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    with null_server(5, env={"PYTHONPATH": path}) as server:
        check_end(server, "scheduler", [Asked(server)], stack_of="in handle")


def test_a_server_in_an_endless_loop(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(STUCK_SERVER)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    with null_server(5, env={"PYTHONPATH": path}) as server:
        with pytest.raises(OSError):
            server.request("GET", "/v1/models/null")
        check_end(server, "server", [], stack_of="in get_model")


@pytest.mark.parametrize("part", list(ROLES))
def test_a_process_under_sigstop(part: str) -> None:
    with null_server(5) as server:
        port = server.address[1]
        asked = [Asked(server, stream=True, max_tokens=3000)]
        while not server.stats()["running"]:
            time.sleep(0.01)
        server.children()[ROLES[part]].send_signal(signal.SIGSTOP)
        check_end(server, part, asked)
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("127.0.0.1", port))


def test_neither_idling_nor_slow_steps_nor_a_stop_of_everything_is_a_hang() -> None:
    with null_server(900) as server:  # several steps in flight or waiting are older than --watchdog-s together
        assert server.complete(max_tokens=3, ignore_eos=True)["finish_reason"] == "length"
        everybody = [*server.children().values(), server.process]
        for process in everybody:
            process.send_signal(signal.SIGSTOP)
        time.sleep(2.5)  # longer than --watchdog-s
        for process in everybody:
            process.send_signal(signal.SIGCONT)
        time.sleep(2.5)  # idle
        assert server.request("GET", "/health")[0] == 200
        assert "hangs" not in server.text


def test_a_signal_shows_the_stacks_and_changes_nothing() -> None:
    with null_server(5) as server:
        server.signal(signal.SIGUSR1)
        deadline = time.monotonic() + 10
        wanted = [f"stack of the {name}:   File" for name in ROLES] + ['serving.py", line']
        while not all(text in server.text for text in wanted):
            assert time.monotonic() < deadline, server.text
            time.sleep(0.02)
        assert server.complete(max_tokens=3, ignore_eos=True)["finish_reason"] == "length"
