"""Too many requests, and clients that read slowly or never: what is refused, what is said, and that nobody else pays."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from gristmill.server.http_protocol import BoundedHttpProtocol
from gristmill.tokenizer import manager as manager_module
from tests.support.api import check_error, plain
from tests.support.fake_engine import FakeEngine

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LONG = {"model": "m", "prompt": "Once there was a lamp", "max_tokens": 450, "ignore_eos": True}


def post(sock: socket.socket, body: dict[str, Any], path: str = TEXT) -> None:
    raw = json.dumps(body).encode()
    sock.sendall(f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(raw)}\r\n\r\n".encode() + raw)


@contextmanager
def client(box: SimpleNamespace, receive_bytes: int = 0) -> Iterator[socket.socket]:
    """A connection; with `receive_bytes` the kernel takes no more than that for a reader who does not read."""
    with socket.socket() as sock:
        if receive_bytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        sock.settimeout(20)
        sock.connect(("127.0.0.1", int(box.url.rsplit(":", 1)[1])))
        yield sock


def answer(sock: socket.socket) -> tuple[int, dict[str, str], dict[str, Any]]:
    """Status, headers and JSON of the next response on a connection."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += sock.recv(4096)
    head, _, body = data.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines[1:])
    while len(body) < int(headers["content-length"]):
        body += sock.recv(4096)
    return int(lines[0].split()[1]), headers, json.loads(body)


# --- a full queue


@pytest.fixture(scope="module")
def full(tiny_model: Path) -> Iterator[SimpleNamespace]:
    """Two choices run, three wait, and none of them ends in the time of a test."""
    from tests.runtime.server.conftest import serving

    engine = FakeEngine(tiny_model, step_s=0.5, max_running=2, option_overrides={"max_queued": 3})
    with engine, serving(engine) as box, client(box) as first, client(box) as second:
        post(first, LONG | {"n": 2})
        engine.wait_for(lambda: engine.manager.stats.running == 2)
        post(second, LONG | {"n": 3})
        engine.wait_for(lambda: engine.manager.stats.waiting == 3)
        yield box


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"n": 3}, {"n": 2, "stream": True}, {"prompt": ["a", "b"]}])
def test_a_full_queue_is_a_503_that_says_when_to_come_back(full: SimpleNamespace, fields: dict[str, Any]) -> None:
    before = len(full.engine.submits)
    response = full.client.post(TEXT, json=LONG | fields)
    error = check_error(response, 503, code="queue_full")
    assert error["type"] == "service_unavailable_error" and "3 requests are waiting" in error["message"]
    assert 1 <= int(response.headers["retry-after"]) <= 60
    assert f"try again in {response.headers['retry-after']} s" in error["message"]
    chat = {"model": "m", "messages": [{"role": "user", "content": "x"}]} | {k: v for k, v in fields.items() if k != "prompt"}
    assert full.client.post(CHAT, json=chat).headers["retry-after"]
    assert len(full.engine.submits) == before  # the scheduler never heard of it


def test_a_full_queue_is_noticed_before_the_body_is_read(full: SimpleNamespace) -> None:
    with client(full) as sock:
        sock.sendall(f"POST {TEXT} HTTP/1.1\r\nhost: x\r\ncontent-length: 10000000\r\n\r\n".encode())
        status, headers, body = answer(sock)
        assert status == 503 and body["error"]["code"] == "queue_full" and "retry-after" in headers
        sock.sendall(b" " * 10_000_000)  # it may still come: the connection stays usable
        sock.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert answer(sock)[0] == 200


def test_those_refused_at_the_same_time_are_told_different_times(full: SimpleNamespace) -> None:
    told = [int(full.client.post(TEXT, json=LONG).headers["retry-after"]) for _ in range(30)]
    assert told == sorted(told) and told[-1] > told[0] and told[-1] <= 60


def test_the_official_client_waits_and_is_served(serve: Any, tiny_model: Path) -> None:
    import openai

    engine = FakeEngine(tiny_model, step_s=0.001, max_running=1, option_overrides={"max_queued": 1})
    with serve(engine) as box, client(box) as first, client(box) as second:
        for sock in (first, second):
            post(sock, LONG | {"max_tokens": 100})
        box.engine.wait_for(lambda: len(box.engine.submits) == 2)
        with openai.OpenAI(base_url=f"{box.url}/v1", api_key="x", max_retries=5) as waiting:
            assert waiting.completions.create(model="m", prompt="x", max_tokens=2).choices[0].finish_reason == "length"


def test_a_refusal_of_the_scheduler_alone_refuses_all_choices(serve: Any, tiny_model: Path) -> None:
    with serve(FakeEngine(tiny_model, step_s=0.2, max_running=1, option_overrides={"max_queued": 4})) as box, client(box) as sock:
        post(sock, LONG | {"n": 3})
        box.engine.wait_for(lambda: len(box.engine.submits) == 3)
        box.engine.wait_for(lambda: box.engine.manager.stats.waiting == 2)
        # as if the pool, not the request slots, held back the waiting ones: the server believes in more room than there is
        box.call(lambda: setattr(box.engine.manager.stats, "max_reqs", 100))
        for stream in (False, True):
            response = box.client.post(TEXT, json=LONG | {"n": 3, "stream": stream})
            check_error(response, 503, code="queue_full")
            assert int(response.headers["retry-after"]) >= 1
        assert box.engine.n_running == 1 and len(box.engine._waiting) == 2
        # it remembers: the same again does not even reach the scheduler, a smaller request does
        before = len(box.engine.submits)
        check_error(box.client.post(TEXT, json=LONG | {"n": 3}), 503, code="queue_full")
        assert len(box.engine.submits) == before
        with client(box) as other:
            post(other, LONG)
            box.engine.wait_for(lambda: len(box.engine._waiting) == 3)
    assert box.engine.manager.open_requests == 0


def test_a_thousand_posts_at_once_are_all_answered_and_few_reach_the_engine(serve: Any, tiny_model: Path) -> None:
    statuses: list[int] = []
    with serve(FakeEngine(tiny_model, step_s=0.5, max_running=4, option_overrides={"max_queued": 16})) as box, ExitStack() as stack:
        socks = [stack.enter_context(client(box)) for _ in range(1000)]
        for sock in socks:
            post(sock, LONG)
        box.engine.wait_for(lambda: box.engine.manager.stats.waiting == 16, 20)
        for sock in socks:
            sock.setblocking(False)

        def read() -> bool:
            for sock in socks[:]:
                try:
                    status = answer_status(sock)
                except BlockingIOError:
                    continue
                statuses.append(status)
                socks.remove(sock)
            return len(socks) == 20

        box.engine.wait_for(read, 20)
        assert set(statuses) == {503} and len(statuses) == 980
        assert len(box.engine.submits) == 20


def answer_status(sock: socket.socket) -> int:
    return int(sock.recv(4096).split()[1])


def test_bodies_that_arrive_together_are_bounded(serve: Any, tiny_model: Path) -> None:
    piece = 900_000
    with serve(FakeEngine(tiny_model, option_overrides={"max_body_bytes": 1 << 20})) as box, ExitStack() as stack:
        most = (64 << 20) // piece
        for _ in range(most):
            sock = stack.enter_context(client(box))
            sock.sendall(f"POST {TEXT} HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n".encode() + b" " * piece)
        state = box.server.config.app.state.server
        box.engine.wait_for(lambda: state.body_bytes == most * piece, 20)
        response = box.client.post(TEXT, content=b" " * piece)
        check_error(response, 503, code="too_busy")
        assert response.headers["retry-after"] == "1"
        assert plain(box.client, TEXT, LONG | {"max_tokens": 2})[0][0].finish == "length"  # a small one is still taken
        stack.close()
        box.engine.wait_for(lambda: state.body_bytes == 0)


# --- clients that do not read


def test_a_client_that_never_reads_costs_bounded_memory_and_nobody_else_waits(
    serve: Any, tiny_model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager_module, "MAX_UNREAD_BYTES", 200_000)
    with serve(FakeEngine(tiny_model, step_s=0.002)) as box, client(box, 4096) as sock:
        seen: list[int] = []
        gauge = watch_unread(box, seen)
        post(sock, LONG | {"n": 8, "stream": True, "logprobs": 20, "max_tokens": 500})  # 20 MB
        box.engine.wait_for(lambda: len(box.engine.submits) == 8)
        started = time.perf_counter()
        assert plain(box.client, TEXT, LONG | {"max_tokens": 20})[0][0].finish == "length"
        assert time.perf_counter() - started < 5
        box.engine.wait_for(lambda: len(box.engine.aborts) == 8, 20)
        box.engine.wait_for(lambda: box.engine.n_running == 0)
        gauge()
        assert box.engine.manager.open_requests == 0
        assert max(seen) < 200_000 + 1_000_000  # the bound, and what came with the message that broke it
        (line,) = [record.getMessage() for record in caplog.records if "unread" in record.getMessage()]
        assert line.startswith("aborted cmpl-") and "bytes unread" in line
        # should it read on, it gets what had left for it, and then the reason
        data = b""
        while not data.endswith(b"0\r\n\r\n"):
            data += sock.recv(1 << 16)
        assert b'"code":"slow_client"' in data[-600:] and b"data: [DONE]" in data[-600:]


def watch_unread(box: SimpleNamespace, seen: list[int]) -> Callable[[], None]:
    """Collect how much waits for readers, until the returned function is called."""
    stop = threading.Event()

    def look() -> int:
        generations = {generation for generation, _ in box.engine.manager._open.values()}
        return max((generation._unread.size_bytes for generation in generations), default=0)

    def run() -> None:
        while not stop.wait(0.005):
            seen.append(box.call(look))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def end() -> None:
        stop.set()
        thread.join(10)

    return end


def test_a_client_that_never_reads_plain_text_is_served_to_the_end(serve: Any, tiny_model: Path) -> None:
    with serve(FakeEngine(tiny_model)) as box, client(box, 4096) as sock:
        post(sock, LONG | {"n": 100, "stream": True, "max_tokens": 500})
        box.engine.wait_for(lambda: len(box.engine.submits) == 100)
        box.engine.wait_for(lambda: box.engine.n_running == 0, 30)
        data = b""
        while not data.endswith(b"0\r\n\r\n"):
            data += sock.recv(1 << 16)
        assert box.engine.aborts == [] and data.count(b'"finish_reason":"length"') == 100 and b"[DONE]" in data[-100:]


def test_a_connection_that_takes_nothing_is_closed_after_a_while(
    serve: Any, tiny_model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "gristmill.server")
    monkeypatch.setattr(BoundedHttpProtocol, "stall_s", 0.3)
    with serve(FakeEngine(tiny_model)) as box, client(box, 4096) as sock:
        post(sock, LONG | {"n": 100, "stream": True, "logprobs": 5})
        box.engine.wait_for(lambda: any("read nothing for 0.3 s" in record.getMessage() for record in caplog.records), 20)
        box.engine.wait_for(lambda: any("499" in record.getMessage() for record in caplog.records), 20)
        box.engine.wait_for(lambda: box.engine.n_running == 0 and not box.engine.manager.open_requests)
        with pytest.raises(OSError):
            while sock.recv(1 << 16):
                pass
            raise OSError  # closed in order would be right as well


def test_a_slow_but_steady_reader_is_left_alone(serve: Any, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BoundedHttpProtocol, "stall_s", 0.2)
    with serve(FakeEngine(tiny_model)) as box, client(box, 4096) as sock:
        post(sock, LONG | {"n": 4, "stream": True, "max_tokens": 400})
        data = b""
        while not data.endswith(b"0\r\n\r\n"):
            data += sock.recv(20_000)
            time.sleep(0.004)  # slower than the engine, as the test wants it
        assert b"[DONE]" in data[-100:]


def test_a_body_announced_as_too_large_is_refused_before_it_arrives(serve: Any, tiny_model: Path) -> None:
    with serve(FakeEngine(tiny_model)) as box:
        for expect in ("", "expect: 100-continue\r\n"):
            with client(box) as sock:
                started = time.perf_counter()
                sock.sendall(f"POST {TEXT} HTTP/1.1\r\nhost: x\r\n{expect}content-length: {1 << 40}\r\n\r\n".encode())
                status, headers, body = answer(sock)
                assert time.perf_counter() - started < 0.4
                assert status == 413 and headers["connection"] == "close" and body["error"]["code"] == "body_too_large"
                assert sock.recv(10) == b""  # and closed soon


def test_a_client_that_sends_too_much_without_reading_still_gets_the_answer(serve: Any, tiny_model: Path) -> None:
    with serve(FakeEngine(tiny_model, option_overrides={"max_body_bytes": 1 << 20})) as box:
        response = httpx.post(box.url + TEXT, content=b" " * (8 << 20), timeout=20)
        check_error(response, 413, code="body_too_large")
