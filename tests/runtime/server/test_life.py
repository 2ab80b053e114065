"""Clients that leave, engines that load, fail and drain, and what the server says about itself: CASES 30 and the routes around it."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tests.support.api import check_error, join, plain, stream_chunks
from tests.support.fake_engine import FakeEngine

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LONG = {"model": "m", "prompt": "Once there was a lamp", "max_tokens": 450, "ignore_eos": True}


@pytest.fixture(scope="module")
def slow(tiny_model: Path) -> Iterator[SimpleNamespace]:
    """Ten milliseconds a step: a request of 450 tokens takes longer than any test."""
    from tests.runtime.server.conftest import serving

    with FakeEngine(tiny_model, step_s=0.01) as engine, serving(engine) as box:
        yield box


@contextmanager
def connection(box: SimpleNamespace, path: str, body: dict[str, Any]) -> Iterator[socket.socket]:
    """A request of which the answer can be read in pieces, and left."""
    raw = json.dumps(body).encode()
    with socket.create_connection(("127.0.0.1", int(box.url.rsplit(":", 1)[1])), timeout=10) as sock:
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
        sock.sendall(head.encode() + raw)
        yield sock


def read_until(sock: socket.socket, mark: bytes, count: int = 1) -> bytes:
    data = b""
    while data.count(mark) < count:
        data += sock.recv(4096)
    return data


@pytest.mark.parametrize(
    ("case", "fields", "chunks"),
    [
        ("stream closed after 3 chunks", {"stream": True}, 3),
        ("plain", {}, 0),
        ("three choices", {"n": 3}, 0),
        ("three streamed choices", {"n": 3, "stream": True}, 2),
        ("four prompts", {"prompt": ["a", "b", "c", "d"]}, 0),
    ],
)
def test_when_the_client_leaves_its_work_ends(
    slow: SimpleNamespace, case: str, fields: dict[str, Any], chunks: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gristmill.server.app")
    before, n_aborts = len(slow.engine.submits), len(slow.engine.aborts)
    with connection(slow, TEXT, LONG | fields) as sock:
        slow.engine.wait_for(lambda: slow.engine.n_running)
        if chunks:
            assert b"200 OK" in read_until(sock, b"data: ", chunks)
    slow.engine.wait_for(lambda: not slow.engine.n_running)
    assert slow.engine.manager.open_requests == 0
    n = len(slow.engine.submits) - before
    assert [abort.reason for abort in slow.engine.aborts[n_aborts:]] == ["client"] * n
    slow.engine.wait_for(lambda: caplog.records)
    (record,) = caplog.records
    assert " 499 " in record.getMessage() and "finish=client gone" in record.getMessage()


def test_a_client_that_leaves_before_the_first_token(serve: Any, tiny_model: Path) -> None:
    with serve(FakeEngine(tiny_model, step_s=1.0)) as box:
        for stream in (False, True):
            before = len(box.engine.submits)
            with connection(box, TEXT, LONG | {"stream": stream}):
                box.engine.wait_for(lambda n=before: len(box.engine.submits) > n)
            box.engine.wait_for(lambda: not box.engine.n_running)
            assert box.engine.manager.open_requests == 0


def test_a_client_that_leaves_inside_its_body(slow: SimpleNamespace) -> None:
    with socket.create_connection(("127.0.0.1", int(slow.url.rsplit(":", 1)[1]))) as sock:
        sock.sendall(f"POST {TEXT} HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{{".encode())
    assert slow.client.get("/health").status_code == 200


def test_a_slow_reader_of_one_stream_does_not_stop_the_others(slow: SimpleNamespace) -> None:
    with connection(slow, TEXT, LONG | {"stream": True, "logprobs": 20}) as sock:
        read_until(sock, b"data: ")
        started = time.perf_counter()
        assert plain(slow.client, TEXT, LONG | {"max_tokens": 5})[0][0].finish == "length"
        assert time.perf_counter() - started < 1
    slow.engine.wait_for(lambda: not slow.engine.n_running)


# --- aborting by id


@pytest.mark.parametrize("stream", [False, True])
def test_the_abort_route_ends_a_request_with_what_there_is(slow: SimpleNamespace, stream: bool) -> None:
    answer: list[httpx.Response] = []
    before = len(slow.engine.submits)
    thread = threading.Thread(target=lambda: answer.append(httpx.post(slow.url + TEXT, json=LONG | {"n": 2, "stream": stream}, timeout=30)))
    thread.start()
    slow.engine.wait_for(lambda: len(slow.engine.submits) >= before + 2)
    request_id = slow.engine.submits[-1].rid.rsplit("-", 1)[0]
    assert slow.client.post("/abort_request", json={"rid": request_id}).json() == {"aborted_choices": 2}
    thread.join(10)
    assert answer[0].status_code == 200
    if stream:
        assert answer[0].text.count('"finish_reason":"abort"') == 2
    else:
        assert [choice["finish_reason"] for choice in answer[0].json()["choices"]] == ["abort", "abort"]
    assert slow.client.post("/abort_request", json={"rid": request_id}).json() == {"aborted_choices": 0}
    assert slow.client.post("/abort_request", json={"rid": "unknown"}).json() == {"aborted_choices": 0}
    check_error(slow.client.post("/abort_request", json={}), param="rid")


def test_abort_all(slow: SimpleNamespace) -> None:
    threads = [threading.Thread(target=lambda: httpx.post(slow.url + TEXT, json=LONG, timeout=30)) for _ in range(3)]
    for thread in threads:
        thread.start()
    slow.engine.wait_for(lambda: slow.engine.n_running == 3)
    assert slow.client.post("/abort_request", json={"abort_all": True}).json() == {"aborted_choices": 3}
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


# --- loading, failing, ending


def test_health_is_503_until_the_engine_is_ready(serve: Any, tiny_model: Path) -> None:
    with serve(FakeEngine(tiny_model, ready=False)) as box:
        for stream in (False, True):
            check_error(box.client.get("/health"), 503, code="loading")
            check_error(box.client.post(TEXT, json=LONG | {"stream": stream}), 503)
        assert box.client.get("/v1/models").status_code == 200
        box.engine.say_ready()
        box.engine.wait_for(lambda: box.client.get("/health").status_code == 200)
        assert plain(box.client, TEXT, LONG | {"max_tokens": 2})[0][0].finish == "length"


def test_when_the_engine_dies_open_requests_get_the_reason(serve: Any, tiny_model: Path) -> None:
    with serve(FakeEngine(tiny_model, step_s=0.01)) as box:
        answers: dict[bool, httpx.Response] = {}

        def ask(stream: bool) -> None:
            answers[stream] = httpx.post(box.url + TEXT, json=LONG | {"stream": stream}, timeout=30)

        threads = [threading.Thread(target=ask, args=(stream,)) for stream in (False, True)]
        for thread in threads:
            thread.start()
        box.engine.wait_for(lambda: len(box.engine.submits) == 2)
        with connection(box, TEXT, LONG | {"stream": True}) as sock:
            read_until(sock, b"data: ")
            box.call(lambda: box.engine.manager.fail_all("the model worker was killed by SIGKILL"))
            tail = read_until(sock, b"[DONE]")
            assert b'"error":{"message":"the model worker was killed by SIGKILL"' in tail
        for thread in threads:
            thread.join(10)
        assert check_error(answers[False], 503, code="engine_unavailable")["message"] == "the model worker was killed by SIGKILL"
        assert "killed by SIGKILL" in answers[True].text
        check_error(box.client.get("/health"), 503)
        check_error(box.client.post(TEXT, json=LONG), 503)
        check_error(box.client.post("/flush_cache"), 503)


def test_flush_cache(slow: SimpleNamespace) -> None:
    assert slow.client.post("/flush_cache").json()["success"] is True
    with connection(slow, TEXT, LONG):
        slow.engine.wait_for(lambda: slow.engine.n_running)
        check_error(slow.client.post("/flush_cache"), 409)
    slow.engine.wait_for(lambda: not slow.engine.n_running)


# --- what the server tells


def test_metrics_follow_the_engine_and_the_requests(serve: Any, tiny_model: Path) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    with serve(FakeEngine(tiny_model)) as box:
        plain(box.client, TEXT, LONG | {"max_tokens": 5})
        stream_chunks(box.client, CHAT, {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 5})
        box.client.post(TEXT, json={"model": "x", "prompt": "y"})
        box.client.get("/no/such/route")
        response = box.client.get("/metrics")
        samples = {
            (sample.name, *sample.labels.values()): sample.value
            for family in text_string_to_metric_families(response.text)
            for sample in family.samples
        }
        assert samples[("gristmill_ready",)] == 1 and samples[("gristmill_pool_tokens",)] == 1 << 20
        for name in ("gristmill_time_to_first_token_seconds", "gristmill_time_per_output_token_seconds", "gristmill_request_seconds"):
            assert samples[(f"{name}_count",)] == 2
        assert samples[("gristmill_http_requests_total", TEXT, "200")] == 1
        assert samples[("gristmill_http_requests_total", TEXT, "404")] == 1
        assert samples[("gristmill_http_requests_total", "other", "404")] == 1
        for name in ("running", "waiting"):
            assert samples[(f"gristmill_requests_{name}",)] == 0
        for name in ("cached_tokens", "retractions", "output_tokens"):
            assert (f"gristmill_{name}_total",) in samples


def test_server_info_names_no_path(slow: SimpleNamespace) -> None:
    response = slow.client.get("/server_info")
    info = response.json()
    assert info["model"] == "m" and info["context_length"] == 512 and info["vocab_size"] == 600 and info["eos_ids"] == [2, 7, 9]
    assert {"running", "waiting", "pool_free", "pool_evictable", "pool_locked", "pool_total"} <= set(info["stats"])
    assert info["options"]["page_size"] == 1
    assert str(slow.engine.model) not in response.text
    assert not {"model", "trace", "kv_events"} & set(info["options"])


def test_one_log_line_per_request_with_control_characters_escaped(served: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gristmill")
    plain(served.client, TEXT, LONG | {"max_tokens": 3})
    served.client.get("/x%0d%0a2026-01-01%20ERROR%20forged%1b[31m")
    served.client.post(TEXT, json={"model": "m\r\nforged\x1b[0m", "prompt": "x"}, headers={"x-request-id": "a\tb"})
    served.client.get("/health")
    served.client.get("/metrics")
    served.engine.wait_for(lambda: len(caplog.records) >= 3)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 3
    assert lines[0].startswith(f"POST {TEXT} 200 cmpl-") and "output=3 finish=length first=" in lines[0] and "total=" in lines[0]
    assert lines[1].startswith("GET /x\\r\\n2026-01-01 ERROR forged\\x1b[31m 404")
    assert all(char.isprintable() for line in lines for char in line)


def test_the_id_of_a_request_is_in_header_body_and_every_chunk(served: SimpleNamespace) -> None:
    response = served.client.post(TEXT, json=LONG | {"max_tokens": 2})
    assert response.headers["x-request-id"] == response.json()["id"]
    chunks = stream_chunks(served.client, TEXT, LONG | {"max_tokens": 2})
    assert {chunk["id"] for chunk in chunks} != {response.json()["id"]}
    join(chunks)


# --- the official client


def test_the_openai_client(served: SimpleNamespace) -> None:
    import openai

    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0)
    assert [model.id for model in client.models.list()] == ["m"]
    messages: Any = [{"role": "user", "content": "Name two rivers."}]
    answer = client.chat.completions.create(model="m", messages=messages, n=2, max_tokens=8, seed=3, logprobs=True, top_logprobs=2)
    assert [choice.index for choice in answer.choices] == [0, 1] and answer.usage is not None and answer.usage.completion_tokens == 16
    assert answer.choices[0].logprobs is not None and len(answer.choices[0].logprobs.content or []) == 8
    stream = client.chat.completions.create(
        model="m", messages=messages, n=2, max_tokens=8, seed=3, stream=True, stream_options={"include_usage": True}
    )
    texts, usage = ["", ""], None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in answer.choices]
    assert usage is not None and usage.completion_tokens == 16 and usage.prompt_tokens_details is not None
    completion = client.completions.create(model="m", prompt=["a", "b"], max_tokens=4, echo=True, logprobs=1)
    assert completion.choices[0].text.startswith("a") and completion.choices[1].logprobs is not None
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="m", messages=messages, tools=[{"type": "function", "function": {"name": "f"}}])


def test_the_async_openai_client_and_closing_its_stream(slow: SimpleNamespace) -> None:
    import asyncio

    import openai

    async def main() -> int:
        async with openai.AsyncOpenAI(base_url=f"{slow.url}/v1", api_key="x", max_retries=0) as client:
            stream = await client.completions.create(model="m", prompt="x", max_tokens=450, stream=True, extra_body={"ignore_eos": True})
            n = 0
            async for _ in stream:
                n += 1
                if n == 3:
                    break
            await stream.close()
        return n

    assert asyncio.run(main()) == 3
    slow.engine.wait_for(lambda: not slow.engine.n_running)
