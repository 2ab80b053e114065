"""What is refused, and how: CASES 15, 16, 17, 26 (validation) and 58."""

from __future__ import annotations

import json
import resource
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.api import check_error, join, plain, stream_chunks
from tests.support.fake_engine import FakeEngine, greedy_ids

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": MESSAGES, "max_tokens": 2, **more}


def text(**more: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": "hi", "max_tokens": 2, **more}


@pytest.fixture(autouse=True)
def alive(served: SimpleNamespace) -> Iterator[None]:
    """After each hostile request the server answers a control request as it would alone."""
    yield
    assert served.client.get("/health").status_code == 200
    tokenizer = served.engine.tokenizer
    expected = tokenizer.decode(greedy_ids(served.engine, tokenizer.encode("ok?"), 4))
    assert plain(served.client, TEXT, text(prompt="ok?", max_tokens=4, temperature=0))[0][0].text == expected


# --- CASES 15


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"700000": 3}}, "logit_bias"),
        ({"logit_bias": {"-1": 3}}, "logit_bias"),
        ({"logit_bias": {"x": 3}}, "logit_bias"),
        ({"logit_bias": {"5": 1e30}}, "logit_bias"),
        ({"logit_bias": {"600": 1}}, "logit_bias"),  # the embedding has 608 rows, the tokenizer 600 tokens
        ({"stop_token_ids": [700000], "min_tokens": 2}, "stop_token_ids"),
        ({"stop_token_ids": [600]}, "stop_token_ids"),
        ({"prompt": [700000]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [[4, -9]]}, "prompt"),
        ({"prompt": [4294967296]}, "prompt"),
        ({"prompt": [10**30]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [3, "x"]}, "prompt"),
        ({"prompt": ["x", [3]]}, "prompt"),
        ({"prompt": [[[3]]]}, "prompt"),
        ({"prompt": [None]}, "prompt"),
        ({"prompt": [600]}, "prompt"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_ids_outside_the_vocabulary_name_the_field(served: SimpleNamespace, fields: dict[str, Any], param: str, stream: bool) -> None:
    check_error(served.client.post(TEXT, json=text(stream=stream, **fields)), param=param)


# --- CASES 16


BAD_FIELDS = [
    ({"temperature": "warm"}, "temperature"),
    ({"temperature": -0.5}, "temperature"),
    ({"top_p": 1.7}, "top_p"),
    ({"top_p": -0.1}, "top_p"),
    ({"min_p": 2}, "min_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 2**40}, "top_k"),
    ({"n": 0}, "n"),
    ({"n": -1}, "n"),
    ({"n": 2.5}, "n"),
    ({"max_tokens": -3}, "max_tokens"),
    ({"max_tokens": "7"}, "max_tokens"),
    ({"stop": 5}, "stop"),
    ({"stop": [5]}, "stop[0]"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"seed": 2**70}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"min_tokens": 3}, "min_tokens"),  # max_tokens is 2
    ({"min_tokens": -1}, "min_tokens"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}, "stream": False}, "stream_options"),
    ({"stream_options": {"colour": 1}}, "stream_options.colour"),
    ({"priority": 10**9}, "priority"),
    ({"cache_salt": "s" * 257}, "cache_salt"),
    ({"cache_salt": 5}, "cache_salt"),
    ({"no_such_field": 1}, "no_such_field"),
    ({"model": None}, "model"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_FIELDS, ids=[json.dumps(fields) for fields, _ in BAD_FIELDS])
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_bad_fields_are_a_400_that_names_them(served: SimpleNamespace, path: str, fields: dict[str, Any], param: str) -> None:
    base = chat if path == CHAT else text
    for stream in (False, True):
        check_error(served.client.post(path, json={**base(stream=stream), **fields}), param=param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}]}]},
            "messages[0].content[0]",
        ),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"prompt": "x"}, "prompt"),
    ],
)
def test_bad_chat_fields(served: SimpleNamespace, fields: dict[str, Any], param: str) -> None:
    for stream in (False, True):
        check_error(served.client.post(CHAT, json=chat(stream=stream) | fields), param=param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3, "n": 2}, "best_of"),
        ({"messages": MESSAGES}, "messages"),
    ],
)
def test_bad_completion_fields(served: SimpleNamespace, fields: dict[str, Any], param: str) -> None:
    for stream in (False, True):
        check_error(served.client.post(TEXT, json=text(stream=stream) | fields), param=param)


@pytest.mark.parametrize("path", [CHAT, TEXT, "/abort_request"])
@pytest.mark.parametrize(
    "raw",
    [
        b'{"model":"m",,}',
        b"[]",
        b"",
        b"null",
        b'{"model":"m","prompt":"\xff"}',
        b'{"model":"m","temperature":NaN}',
        b'"\\ud800"',
        b"{",
        b"\x00",
    ],
)
def test_bodies_that_are_no_json_object(served: SimpleNamespace, path: str, raw: bytes) -> None:
    check_error(served.client.post(path, content=raw))


def test_unknown_routes_and_methods(served: SimpleNamespace) -> None:
    check_error(served.client.get("/v1/nothing"), 404)
    check_error(served.client.get(CHAT), 405)
    check_error(served.client.post("/v1/models"), 405)
    assert served.client.get("/health/").status_code == 404


def test_chat_without_a_template(serve: Any, tiny_model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "bare"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with serve(FakeEngine(folder)) as box:
        for stream in (False, True):
            error = check_error(box.client.post(CHAT, json=chat(stream=stream)), code="no_chat_template")
            assert "chat template" in error["message"]
        assert plain(box.client, TEXT, text())[0][0].finish == "length"


def test_a_template_that_refuses_the_messages(serve: Any, tiny_model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "strict"))
    (folder / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with serve(FakeEngine(folder)) as box:
        error = check_error(box.client.post(CHAT, json=chat()), param="messages")
        assert "roles must alternate" in error["message"]


def test_the_openai_client_sees_bad_requests(served: SimpleNamespace) -> None:
    import openai

    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0)
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as error:
            client.chat.completions.create(model="m", messages=MESSAGES, temperature=-1, stream=stream)
        assert error.value.param == "temperature" and error.value.type == "invalid_request_error"
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="x", prompt="y", stream=stream)


# --- CASES 17


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_model_that_is_not_served_is_a_404(served: SimpleNamespace, path: str) -> None:
    base = chat() if path == CHAT else text()
    for stream in (False, True):
        for name in ("no-such-model", str(served.engine.model), "M", "m "):
            error = check_error(served.client.post(path, json=base | {"model": name, "stream": stream}), 404, "model", "model_not_found")
            assert "'m'" in error["message"]
        check_error(served.client.post(path, json={k: v for k, v in base.items() if k != "model"}), 400, "model")
        check_error(served.client.post(path, json=base | {"model": ""}), 400, "model")
    models = served.client.get("/v1/models").json()
    assert [card["id"] for card in models["data"]] == ["m"] and models["object"] == "list"
    assert served.client.get("/v1/models/m").json() == models["data"][0]
    check_error(served.client.get("/v1/models/x"), 404, "model")
    assert plain(served.client, path, base)[1]["model"] == "m"


# --- CASES 26


def test_lengths_around_the_context(served: SimpleNamespace) -> None:
    def ask(n_prompt: int, max_tokens: int | None) -> Any:
        body = {"model": "m", "prompt": [5] * n_prompt, "temperature": 0}
        return served.client.post(TEXT, json=body if max_tokens is None else body | {"max_tokens": max_tokens})

    for n_prompt, max_tokens in ((512, 1), (513, 0), (5000, 1), (500, 50), (512, None), (5, 508), (5, 10**12)):
        error = check_error(ask(n_prompt, max_tokens), code="context_length_exceeded")
        assert "512" in error["message"] and str(n_prompt) in error["message"]
        if max_tokens:
            assert str(max_tokens) in error["message"]
    for n_prompt, max_tokens in ((511, 1), (512, 0), (500, 12), (5, 507)):
        answer = ask(n_prompt, max_tokens).json()
        assert answer["usage"]["completion_tokens"] == max_tokens and answer["choices"][0]["finish_reason"] == "length"
    answer = ask(400, None).json()
    assert answer["usage"]["total_tokens"] == 512 and answer["choices"][0]["finish_reason"] == "length"


def test_a_text_far_beyond_the_context_is_refused_at_once(served: SimpleNamespace) -> None:
    long = "Once there was a lamp. " * 600_000
    for path, body, param in ((TEXT, text(prompt=long), "prompt"), (CHAT, chat(messages=[{"role": "user", "content": long}]), "messages")):
        started = time.perf_counter()
        error = check_error(served.client.post(path, json=body), 400, param, "context_length_exceeded")
        assert "512" in error["message"] and time.perf_counter() - started < 2
    check_error(served.client.post(CHAT, json=chat(messages=[{"role": "user", "content": long[:3000]}])), 400, "messages")


def test_a_prompt_beyond_the_pool_is_refused(serve: Any, tiny_model: Path) -> None:
    with serve(FakeEngine(tiny_model, pool_tokens=256)) as box:
        for stream in (False, True):
            body = {"model": "m", "prompt": [5] * 300, "max_tokens": 2, "stream": stream}
            error = check_error(box.client.post(TEXT, json=body), 400, "prompt", "pool_exceeded")
            assert "256" in error["message"] and "300" in error["message"]
            check_error(box.client.post(TEXT, json=body | {"prompt": [[5], [5] * 300]}), 400, code="pool_exceeded")
        assert plain(box.client, TEXT, text())[0][0].finish == "length"


def test_what_the_engine_refuses_is_a_status_also_when_streaming(serve: Any, tiny_model: Path) -> None:
    with serve(FakeEngine(tiny_model, refused_token=50)) as box:
        for stream in (False, True):
            error = check_error(box.client.post(TEXT, json=text(prompt=[5, 50], stream=stream)), 503, code="refused_token")
            assert "waiting" in error["message"]
        check_error(box.client.post(TEXT, json=text(prompt=[[5], [5, 50]])), 503, code="refused_token")  # one prompt of two
        assert plain(box.client, TEXT, text())[0][0].finish == "length"
        assert box.engine.manager.open_requests == 0


# --- CASES 58


HUGE: list[tuple[str, Any]] = [
    ("n", lambda: text(n=10**6)),
    ("best_of", lambda: text(best_of=10**6)),
    ("stops", lambda: text(stop=["x"] * 300_000)),
    ("stop", lambda: text(stop="x" * 5_000_000)),
    ("logprobs", lambda: text(prompt=[5] * 400, logprobs=10**6, echo=True)),
    ("logprobs -1", lambda: text(prompt=[5] * 400, logprobs=-1, echo=True)),
    ("max_tokens", lambda: text(max_tokens=10**12)),
    ("prompts", lambda: text(prompt=["x"] * 100_000)),
    ("prompts of ids", lambda: text(prompt=[[5]] * 100_000)),
    ("prompts times n", lambda: text(prompt=["x"] * 200, n=100)),
    ("logit_bias", lambda: text(logit_bias={str(i % 600) + " " * (i // 600): 1 for i in range(20_000)})),
    ("stop_token_ids", lambda: text(stop_token_ids=[5] * 100_000)),
    ("messages", lambda: chat(messages=[{"role": 5, "content": "x"}] * 12_000)),
    ("many messages", lambda: chat(messages=MESSAGES * 12_000)),
    ("unknown field", lambda: {"x" * 1_000_000: 1}),
    ("model", lambda: text(model="x" * 1_000_000)),
    ("number", lambda: text(max_tokens=10**4000)),
]


@pytest.mark.parametrize(("name", "make"), HUGE, ids=[name for name, _ in HUGE])
def test_small_requests_for_big_work_are_refused_at_once(served: SimpleNamespace, name: str, make: Any) -> None:
    body = make()
    raw = json.dumps(body).encode() if name != "number" else b'{"model":"m","prompt":"x","max_tokens":1' + b"0" * 4000 + b"}"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    response = served.client.post(CHAT if "messages" in body else TEXT, content=raw)
    assert time.perf_counter() - started < 1
    check_error(response, 404 if name == "model" else 400)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10


@pytest.mark.parametrize("raw", [b'{"model":' + b"[" * 100_000, b'{"model":"m","metadata":' + b'{"a":' * 100_000], ids=["lists", "objects"])
def test_deep_json(served: SimpleNamespace, raw: bytes) -> None:
    started = time.perf_counter()
    check_error(served.client.post(TEXT, content=raw))
    assert time.perf_counter() - started < 1


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_beyond_the_limit(served: SimpleNamespace, chunked: bool) -> None:
    def parts() -> Iterator[bytes]:
        for _ in range(60):
            yield b"x" * (1 << 20)

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    headers = {} if chunked else {"content-length": str(60 << 20)}
    response = served.client.post(TEXT, content=parts(), headers=headers)
    assert time.perf_counter() - started < 2  # sending 60 MiB included
    check_error(response, 413, code="body_too_large")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10


def test_slow_connections_hold_nobody_up(served: SimpleNamespace) -> None:
    port = int(served.url.rsplit(":", 1)[1])
    sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(200)]
    try:
        for i, sock in enumerate(sockets):
            sock.sendall(f"POST {TEXT} HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{{"[: 20 + i].encode())
        started = time.perf_counter()
        assert plain(served.client, TEXT, text(max_tokens=4))[0][0].finish == "length"
        assert time.perf_counter() - started < 1
    finally:
        for sock in sockets:
            sock.close()


def test_300_streams_at_once_are_each_what_they_are_alone(served: SimpleNamespace) -> None:
    import httpx

    tokenizer = served.engine.tokenizer
    expected = {i: tokenizer.decode(greedy_ids(served.engine, tokenizer.encode(f"stream {i}"), 20)) for i in range(300)}
    results: dict[int, str] = {}

    def follow(numbers: range) -> None:
        with httpx.Client(base_url=served.url, timeout=60) as client:
            for i in numbers:
                results[i] = join(stream_chunks(client, TEXT, text(prompt=f"stream {i}", max_tokens=20, temperature=0)))[0].text

    threads = [threading.Thread(target=follow, args=(range(start, 300, 30),)) for start in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == expected
