"""Floods and slow readers against all processes, with a null model: what is refused, what memory it costs, and that others do not wait."""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import psutil
import pytest

from tests.support.served import Served, served

pytestmark = pytest.mark.e2e

MIB = 1 << 20


def raw(body: dict[str, Any]) -> bytes:
    data = json.dumps({"model": "M", "prompt": "x", "ignore_eos": True, **body}).encode()
    return b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(data) + data


@contextmanager
def connected(server: Served, receive_bytes: int = 0) -> Iterator[socket.socket]:
    with socket.socket() as sock:
        if receive_bytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        sock.settimeout(30)
        sock.connect(server.address)
        yield sock


def answer_of(sock: socket.socket) -> str:
    """One whole answer: headers and body may come apart."""
    data = b""
    while (head := data.partition(b"\r\n\r\n"))[1] == b"" or len(head[2]) < int(
        head[0].lower().partition(b"content-length: ")[2].split()[0]
    ):
        more = sock.recv(65536)
        assert more, data
        data += more
    return data.decode()


def memory(server: Served) -> dict[str, int]:
    """Resident bytes by role."""
    return {role: child.memory_info().rss for role, child in {**server.children(), "server": psutil.Process(server.process.pid)}.items()}


def wait_stats(server: Served, timeout_s: float = 30.0, **wanted: int) -> dict[str, Any]:
    deadline = time.monotonic() + timeout_s
    while any((stats := server.stats())[name] != value for name, value in wanted.items()):
        assert time.monotonic() < deadline, stats
        time.sleep(0.01)
    return stats


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served("null:20", "--served-model-name=M", "--max-running=2", "--max-queued=3", "--pool-tokens=65536") as running:
        yield running


def test_a_request_is_queued_whole_or_refused_whole_and_told_when_to_come_back(server: Served) -> None:
    with connected(server) as running, connected(server) as waiting:
        running.sendall(raw({"n": 2, "max_tokens": 4000}))
        wait_stats(server, running=2)
        waiting.sendall(raw({"n": 2, "max_tokens": 4000}))
        before = wait_stats(server, running=2, waiting=2)
        for fields in ({"n": 2}, {"n": 3, "stream": True}, {"prompt": ["a", "b"], "stream": True}):
            with connected(server) as sock:
                sock.sendall(raw(fields))
                answer = answer_of(sock)
                assert answer.startswith("HTTP/1.1 503 ") and '"code":"queue_full"' in answer and "data: " not in answer
                seconds = int(answer.split("retry-after: ")[1].split("\r\n")[0])
                assert 1 <= seconds <= 60 and f"try again in {seconds} s" in answer
        after = server.stats()
        assert [after[name] for name in ("running", "waiting", "prompt_tokens")] == [
            before[name] for name in ("running", "waiting", "prompt_tokens")
        ]
        with connected(server) as fitting:
            fitting.sendall(raw({"max_tokens": 1}))
            wait_stats(server, waiting=3)
    server.wait_idle()


def flood(server: Served, n: int, size: int) -> dict[str, int]:
    """Resident bytes by role when `n` posts of `size` bytes were all answered with 503, their connections still open."""
    request = raw({"max_tokens": 4000, "user": "x" * size})
    with ExitStack() as stack, selectors.DefaultSelector() as selector:
        for _ in range(n):
            sock = stack.enter_context(connected(server))
            sock.setblocking(False)
            sock.send(request)
            selector.register(sock, selectors.EVENT_READ)
        statuses: Counter[bytes] = Counter()
        deadline = time.monotonic() + 60
        while sum(statuses.values()) < n - 5:  # the last ones may have found places in the queue
            assert time.monotonic() < deadline, statuses
            for key, _ in selector.select(1):
                statuses[key.fileobj.recv(65536)[:12]] += 1  # type: ignore[union-attr]
                selector.unregister(key.fileobj)
        assert set(statuses) == {b"HTTP/1.1 503"}
        return memory(server)


def test_a_flood_is_answered_at_once_and_costs_little_memory(server: Served) -> None:
    """A connection costs what was read from it before anybody could look at it, at most one buffer of 64 KiB, and that comes back."""
    n, size = 3000, 30_000
    before = memory(server)
    rounds = []
    for _ in range(4):  # how many are read before the first is answered differs from round to round; what does not come back adds up
        rounds.append({role: (now - before[role]) / MIB for role, now in flood(server, n, size).items()})
        assert server.stats()["waiting"] <= 3
    print(f"{n} posts of {size} bytes, four times: {rounds} MiB")
    assert all(grown["server"] < n * 64 / 1024 for grown in rounds), rounds
    assert all(grown[role] < 20 for grown in rounds for role in ("scheduler", "detokenizer")), rounds
    assert rounds[0]["scheduler"] < 10 and rounds[0]["detokenizer"] < 10, rounds
    server.wait_idle()


def test_who_never_reads_costs_bounded_memory_and_holds_up_nobody() -> None:
    with served("null:1", "--served-model-name=M", "--max-running=32", "--pool-tokens=300000") as server, connected(server, 4096) as sock:
        before = memory(server)
        sock.sendall(raw({"n": 16, "max_tokens": 4000, "stream": True}))
        slowest = 0.0
        while (stats := server.stats())["output_tokens"] < 16 * 4000:
            start = time.monotonic()
            server.complete(max_tokens=4, ignore_eos=True)
            slowest = max(slowest, time.monotonic() - start)
        server.wait_idle()
        grown = {role: (now - before[role]) / MIB for role, now in memory(server).items()}
        print(f"16 * 4000 unread tokens: {grown} MiB, the slowest other request took {slowest:.2f} s; {stats['output_tokens']} tokens")
        assert max(grown.values()) < 40 and slowest < 2
        data = b""  # and should it read after all, everything is there
        while not data.endswith(b"0\r\n\r\n"):
            data += sock.recv(MIB)
        assert data.count(b'"finish_reason":"length"') == 16 and b"data: [DONE]" in data[-100:]
