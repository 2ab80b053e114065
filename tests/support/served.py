"""A real `gristmill serve` process for tests: started, watched, asked, and never left behind."""

from __future__ import annotations

import http.client
import json
import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

READY_S = 90.0  # generous: the machine may be busy with other tests


class Served:
    """One server process in a session of its own; `log` is what it wrote to stderr so far."""

    def __init__(self, model: str | Path, *options: str, env: dict[str, str] | None = None) -> None:
        command = [sys.executable, "-m", "gristmill", "serve", str(model), "--port=0", "--dtype=float32", *options]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, **(env or {})},
        )
        self.url = ""
        self.out: list[str] = []
        self.log: list[str] = []
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._readers = [
            threading.Thread(target=self._read, args=(self.process.stdout, self.out, True), daemon=True),
            threading.Thread(target=self._read, args=(self.process.stderr, self.log, False), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, stream: Any, lines: list[str], announce: bool) -> None:
        for line in stream:
            lines.append(line.rstrip("\n"))
            if announce:
                self._lines.put(line)
        if announce:
            self._lines.put(None)

    def wait_ready(self, timeout_s: float = READY_S) -> Served:
        deadline = time.monotonic() + timeout_s
        while True:
            line = self._lines.get(timeout=max(0.01, deadline - time.monotonic()))
            assert line is not None, f"the server ended with {self.process.wait()} before it was ready:\n{self.text}"
            if found := re.match(r"ready: .* at (http://\S+) ", line):
                self.url = found.group(1)
                return self

    @property
    def text(self) -> str:
        return "\n".join(self.log)

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").rsplit(":", 1)
        return host.strip("[]"), int(port)

    def children(self) -> dict[str, psutil.Process]:
        """The child processes by role."""
        found = {}
        for child in psutil.Process(self.process.pid).children():
            line = child.cmdline()
            if "gristmill.launch_child" in line:
                found[line[-1]] = child
        return found

    def connect(self, timeout_s: float = 60.0) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(*self.address, timeout=timeout_s)

    def request(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        """Status and JSON (or text) of one request."""
        connection = self.connect()
        try:
            connection.request(method, path, None if body is None else json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            data = response.read().decode()
        finally:
            connection.close()
        try:
            return response.status, json.loads(data)
        except ValueError:
            return response.status, data

    def complete(self, prompt: str = "Once there was a lamp", **fields: Any) -> dict[str, Any]:
        """The first choice of a greedy completion."""
        _, models = self.request("GET", "/v1/models")
        body = {"model": models["data"][0]["id"], "prompt": prompt, "max_tokens": 8, "temperature": 0, **fields}
        status, answer = self.request("POST", "/v1/completions", body)
        assert status == 200, answer
        return answer["choices"][0]

    def stats(self) -> dict[str, Any]:
        """The scheduler's counters of this moment."""
        status, info = self.request("GET", "/server_info")
        assert status == 200, info
        return info["stats"]

    def wait_idle(self, timeout_s: float = 10.0) -> dict[str, Any]:
        """Wait until nothing runs or waits; then the pool's accounting must be whole."""
        deadline = time.monotonic() + timeout_s
        while (stats := self.stats())["running"] or stats["waiting"]:
            assert time.monotonic() < deadline, f"still busy: {stats}"
            time.sleep(0.05)
        assert stats["pool_locked"] == 0 and stats["pool_free"] + stats["pool_evictable"] == stats["pool_total"], stats
        return stats

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_s: float) -> int:
        """The exit code; all output has been read afterwards."""
        code = self.process.wait(timeout_s)
        for reader in self._readers:
            reader.join(10)
        return code

    def session(self) -> list[psutil.Process]:
        """Every live process of this server, orphans too (it has a session of its own)."""
        found = []
        for process in psutil.process_iter():
            try:
                if os.getsid(process.pid) == self.process.pid and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (ProcessLookupError, psutil.Error):
                continue
        return found

    def wait_gone(self, timeout_s: float) -> None:
        """Wait until no process of the session is left."""
        deadline = time.monotonic() + timeout_s
        while left := self.session():
            assert time.monotonic() < deadline, f"still there: {[process.cmdline() for process in left]}"
            psutil.wait_procs(left, timeout=0.1)


@contextmanager
def served(model: str | Path, *options: str, env: dict[str, str] | None = None, ready: bool = True) -> Iterator[Served]:
    """A server for the time of the block; whatever is left of it at the end is killed."""
    server = Served(model, *options, env=env)
    try:
        yield server.wait_ready() if ready else server
    finally:
        # the parent first and alone: its children then remove the sockets it leaves
        server.process.kill()
        psutil.wait_procs(server.session(), timeout=5)
        for process in server.session():
            try:
                process.kill()
            except psutil.Error:
                continue
        server.wait(30)
