"""Faults that other serving stacks have shipped, asked of the real server on model M; the numbers are the project's case list.

Cases about parsing and validation alone are in tests/runtime/server; the life of the processes is in test_process_life.py.
"""

from __future__ import annotations

import json
import math
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
import torch

from tests.support.served import Served, served
from tests.support.tiny_model import EOS_ID, VOCAB, make_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

PROMPT = "Once there was a lamp"


def post(server: Served, body: dict[str, Any], path: str = "/v1/completions") -> tuple[int, Any]:
    return server.request("POST", path, {"model": "tiny", **body})


def complete(server: Served, **body: Any) -> dict[str, Any]:
    status, answer = post(server, {"prompt": PROMPT, "temperature": 0, "max_tokens": 16, **body})
    assert status == 200, answer
    return answer


def stream(server: Served, path: str = "/v1/completions", **body: Any) -> list[dict[str, Any]]:
    """The JSON chunks of a stream that ended properly."""
    connection = server.connect()
    connection.request("POST", path, json.dumps({"model": "tiny", "stream": True, **body}), {"Content-Type": "application/json"})
    response = connection.getresponse()
    data = response.read().decode("utf-8")
    connection.close()
    assert response.status == 200, data
    lines = [line for line in data.split("\n") if line]
    assert lines[-1] == "data: [DONE]" and all(line.startswith("data: ") for line in lines), lines[-2:]
    return [json.loads(line[6:]) for line in lines[:-1]]


def joined(chunks: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"] if choice["index"] == index)


def force(token: int) -> dict[str, Any]:
    return {"logit_bias": {str(token): 100}}


@pytest.fixture(scope="module")
def oracle(tiny):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer(tiny):
    from gristmill.tokenizer.tokenizer import load_tokenizer

    return load_tokenizer(tiny)


# --- 03


@pytest.mark.parametrize("prompts", [[PROMPT], [PROMPT, "seven small stones"]], ids=["one prompt", "two prompts, echo"])
def test_03_choices_of_a_seed_repeat_and_end_apart(server, prompts):
    n = 4 if len(prompts) == 1 else 2
    body = {
        "prompt": prompts if len(prompts) > 1 else prompts[0],
        "n": n,
        "seed": 7,
        "temperature": 1,
        "max_tokens": 24,
        "logit_bias": {str(EOS_ID): 4},
        "echo": len(prompts) > 1,
    }
    first, second = complete(server, **body), complete(server, **body)
    texts = [choice["text"] for choice in first["choices"]]
    assert [choice["index"] for choice in first["choices"]] == list(range(n * len(prompts)))
    assert len(set(texts)) > 1 and texts == [choice["text"] for choice in second["choices"]]
    reasons = {choice["finish_reason"] for choice in first["choices"]}
    assert reasons <= {"stop", "length"}
    chunks = stream(server, **body, stream_options={"include_usage": True})
    assert [joined(chunks, index) for index in range(len(texts))] == texts
    assert {**chunks[-1]["usage"], "prompt_tokens_details": 0} == {**first["usage"], "prompt_tokens_details": 0}
    if len(prompts) == 1:
        alone = complete(server, prompt=PROMPT, max_tokens=1)["usage"]["prompt_tokens"]
        assert first["usage"]["prompt_tokens"] == alone
        assert "stop" in reasons and first["usage"]["completion_tokens"] < n * 24
    else:
        assert all(text.startswith(prompts[index // n]) for index, text in enumerate(texts))


# --- 06


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_06_prompt_scoring_equals_a_log_softmax(server, oracle, tokenizer, max_tokens):
    prompt = f"seven small stones {max_tokens}"
    answers = [complete(server, prompt=prompt, max_tokens=max_tokens, echo=True, logprobs=1) for _ in range(2)]
    ids = tokenizer.encode(prompt)
    with torch.inference_mode():
        logits = oracle(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    for answer in answers:
        choice = answer["choices"][0]
        values = choice["logprobs"]["token_logprobs"]
        assert choice["text"].startswith(prompt) and (max_tokens or choice["text"] == prompt)
        assert len(values) == len(ids) + max_tokens == len(choice["logprobs"]["tokens"])
        assert values[0] is None and answer["usage"]["completion_tokens"] == max_tokens
        for position in range(1, len(ids)):
            assert math.isclose(values[position], float(logits[position - 1, ids[position]]), abs_tol=1e-4), position
    assert answers[0]["choices"] == answers[1]["choices"]


# --- 08


def test_08_stop_strings_are_text(server):
    text = complete(server, max_tokens=24, ignore_eos=True)["choices"][0]["text"]
    for start, length in ((0, 1), (3, 2), (7, 3), (len(text) // 2, 4), (len(text) - 4, 3)):
        stop = text[start : start + length]
        cut = text[: text.index(stop)]
        for spelled in (stop, [stop]):
            choice = complete(server, max_tokens=24, ignore_eos=True, stop=spelled)["choices"][0]
            assert choice["text"] == cut and choice["finish_reason"] == "stop"
        assert joined(stream(server, prompt=PROMPT, temperature=0, max_tokens=24, ignore_eos=True, stop=stop)) == cut
    late, early = text[12:14], text[4:6]
    choice = complete(server, max_tokens=24, ignore_eos=True, stop=[late, early])["choices"][0]
    assert choice["text"] == text[: min(text.index(late), text.index(early))]
    server.wait_idle()


# --- 11


def test_11_broken_utf8_streams_as_valid_text(server):
    def both(seed: int) -> None:
        body = {"prompt": "x", "temperature": 1, "seed": seed, "max_tokens": 1 + seed % 12, "ignore_eos": True}
        body["logprobs"] = 1 if seed % 2 else None
        plain = complete(server, **body)["choices"][0]
        chunks = stream(server, **body)
        assert joined(chunks) == plain["text"], seed

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(both, range(40)))


# --- 14


@pytest.fixture(scope="module")
def many_eos(tmp_path_factory):
    folder = make_tiny_model(tmp_path_factory.mktemp("eos") / "tiny", eos=2, generation_eos=[2, 7], tokenizer_eos=9)
    with served(folder, "--threads=1", "--pool-tokens=2048") as running:
        yield running


@pytest.mark.parametrize("token", [2, 7, 9])
def test_14_every_eos_ends_a_request_unless_told_otherwise(many_eos, token):
    usage = complete(many_eos, **force(token))
    assert usage["choices"][0]["finish_reason"] == "stop" and usage["usage"]["completion_tokens"] == 1
    assert usage["choices"][0]["text"] == ""
    ignoring = complete(many_eos, **force(token), ignore_eos=True)
    assert ignoring["choices"][0]["finish_reason"] == "length" and ignoring["usage"]["completion_tokens"] == 16
    held = complete(many_eos, **force(token), min_tokens=3)
    assert held["choices"][0]["finish_reason"] == "stop" and held["usage"]["completion_tokens"] == 4


def test_14_the_last_id_can_be_produced(many_eos):
    answer = complete(many_eos, **force(VOCAB - 1), ignore_eos=True, logprobs=0)
    assert answer["usage"]["completion_tokens"] == 16
    assert len(set(answer["choices"][0]["logprobs"]["tokens"])) == 1


# --- 15


def test_15_ids_outside_the_vocabulary_disturb_no_neighbour(server):
    body = {"max_tokens": 200, "ignore_eos": True}
    reference = complete(server, **body)["choices"][0]["text"]
    neighbour: list[str] = []
    thread = threading.Thread(target=lambda: neighbour.append(complete(server, **body)["choices"][0]["text"]))
    thread.start()
    bad: list[tuple[str, dict[str, Any]]] = [
        ("logit_bias", {"logit_bias": {"700000": 3}}),
        ("logit_bias", {"logit_bias": {"-1": 3}}),
        ("logit_bias", {"logit_bias": {"x": 3}}),
        ("stop_token_ids", {"stop_token_ids": [700000], "min_tokens": 2}),
        *(("prompt", {"prompt": prompt}) for prompt in ([700000], [-1], [[4, -9]], [4294967296], [1.5], [True], [VOCAB])),
    ]
    for param, fields in bad:
        status, answer = post(server, {"prompt": PROMPT, "max_tokens": 4, **fields})
        assert status == 400 and answer["error"]["param"] == param, (fields, answer)
    thread.join()
    assert neighbour == [reference]
    assert complete(server, **body)["choices"][0]["text"] == reference


# --- 20 and 23


@pytest.mark.parametrize("page", [1, 16])
def test_20_a_prompt_that_is_cached_as_a_whole(tiny, page):
    with served(tiny, f"--page-size={page}", "--chunk-tokens=0", "--pool-tokens=2048", "--threads=1") as running:
        for length in (16, 32, 33, 64):
            prompt = [3 + (length * 31 + i * 7) % (VOCAB - 3) for i in range(length)]
            body = {"prompt": prompt, "max_tokens": 8, "ignore_eos": True}
            first, second = complete(running, **body), complete(running, **body)
            cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached == (length - 1) // page * page
            scored = complete(running, **body, echo=True, logprobs=1)["choices"][0]
            assert len(scored["logprobs"]["token_logprobs"]) == length + 8
            assert scored["text"].endswith(first["choices"][0]["text"]) and first["choices"] == second["choices"]
            shorter = complete(running, **{**body, "prompt": prompt[:-5]})
            assert shorter["usage"]["prompt_tokens_details"]["cached_tokens"] <= length - 6
        running.wait_idle()


@pytest.mark.parametrize("page", [16, 32])
def test_23_pages_keep_outputs_and_accounts(tiny, server, page):
    jobs = []
    for length in (1, 15, 16, 17, 31, 32, 33):
        for common in (8, 16, 24):
            own = min(common, length)
            jobs.append({"prompt": [5] * own + [10 + length + i for i in range(length - own)], "max_tokens": 8, "ignore_eos": True})
    for extra in (0, 1):  # ends exactly on a page border, and one past it
        jobs.append({"prompt": [7] * 9, "max_tokens": page - 9 + extra, "ignore_eos": True})
    want = [complete(server, **job)["choices"][0]["text"] for job in jobs]
    with served(tiny, f"--page-size={page}", "--pool-tokens=1024", "--chunk-tokens=16", "--threads=1") as running:
        for _ in range(2):
            with ThreadPoolExecutor(8) as pool:
                got = list(pool.map(lambda job: complete(running, **job)["choices"][0]["text"], jobs))
            assert got == want
        stats = running.wait_idle()
        assert stats["cached_tokens"] > 0


# --- 26


def test_26_requests_that_can_never_fit(tiny):
    with served(tiny, "--pool-tokens=256", "--threads=1") as running:
        for length in (300, 511, 512, 513, 5000):
            status, answer = post(running, {"prompt": [5] * length, "max_tokens": 1})
            assert status == 400 and answer["error"]["code"] == "context_length_exceeded", answer
            assert all(word in answer["error"]["message"] for word in (str(length), "256", "pool", "512")), answer
            assert complete(running, prompt=[5] * 5, max_tokens=2)["usage"]["completion_tokens"] == 2
        status, answer = post(running, {"prompt": [5] * 500, "max_tokens": 50})
        assert status == 400 and "context" in answer["error"]["code"]
        running.wait_idle()


def test_26_at_the_limit_and_without_max_tokens(server):
    exact = complete(server, prompt=[5] * 500, max_tokens=12, ignore_eos=True)
    assert exact["usage"]["completion_tokens"] == 12
    status, rest = post(server, {"prompt": [5] * 450, "temperature": 0, "ignore_eos": True})
    assert status == 200 and rest["choices"][0]["finish_reason"] == "length"
    assert rest["usage"]["completion_tokens"] == 512 - 450


# --- 27


def test_27_a_high_priority_starts_at_once_and_a_low_one_still_ends_as_alone(tiny, server):
    lows = [{"prompt": [20 + i] * 30, "max_tokens": 200, "ignore_eos": True} for i in range(3)]
    want = [complete(server, **low)["choices"][0]["text"] for low in lows]
    order: list[str] = []
    with served(tiny, "--max-running=3", "--pool-tokens=1024", "--threads=1") as running, ThreadPoolExecutor(3) as pool:

        def run(i: int) -> str:
            text = joined(stream(running, **lows[i], temperature=0))
            order.append(f"low {i}")
            return text

        futures = [pool.submit(run, i) for i in range(3)]
        while running.stats()["running"] < 3:
            pass
        complete(running, prompt=[50] * 10, max_tokens=20, ignore_eos=True, priority=10)
        order.append("high")
        assert [future.result() for future in futures] == want
        assert order[0] == "high", order
        assert running.wait_idle()["preemptions"] >= 1


def test_27_a_long_prompt_starts_amid_an_endless_supply_of_short_ones(tiny):
    with served(tiny, "--max-running=2", "--pool-tokens=1024", "--threads=1", "--policy=shortest-prefill") as running:
        stop, served_before = threading.Event(), []

        def supply(number: int) -> None:
            while not stop.is_set():
                complete(running, prompt=[30 + number] * 10, max_tokens=2)
                served_before.append(number)

        with ThreadPoolExecutor(6) as pool:
            futures = [pool.submit(supply, number) for number in range(6)]
            while len(served_before) < 12:
                pass
            before = len(served_before)
            complete(running, prompt=[5] * 300, max_tokens=1)
            passed = len(served_before) - before
            stop.set()
            for future in futures:
                future.result()
        assert passed < 200, f"{passed} short requests went before the long one"
        running.wait_idle()


# --- 29


def test_29_aborts_while_queued_or_half_prefilled(server):
    bodies = [{"prompt": [40 + i] * 300, "max_tokens": 6, "ignore_eos": True} for i in range(5)]
    want = [complete(server, **body)["choices"][0]["text"] for body in bodies]
    before = server.stats()["aborts"]
    g = random.Random(29)
    for round_ in range(20):
        assert server.request("POST", "/flush_cache")[0] == 200
        leaving = []
        with ThreadPoolExecutor(3) as pool:
            futures = [pool.submit(complete, server, **bodies[i]) for i in (0, 1, 3)]
            for i in (2, 4):
                connection = server.connect()
                body = {"model": "tiny", "temperature": 0, "stream": bool(round_ % 2), **bodies[i]}
                connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
                leaving.append(connection)
            for connection in leaving:
                time.sleep(g.uniform(0, 0.03))
                connection.sock.close()
                connection.close()
            assert [future.result()["choices"][0]["text"] for future in futures] == [want[0], want[1], want[3]]
        server.wait_idle()
    assert server.stats()["aborts"] > before
    for _ in range(2):
        assert server.request("POST", "/abort_request", {"rid": "nobody"}) == (200, {"aborted_choices": 0})
    with ThreadPoolExecutor(5) as pool:
        # Long enough that none can end by itself while the abort is on its way.
        futures = [pool.submit(post, server, {**body, "max_tokens": 150}) for body in bodies]
        while not server.stats()["running"]:
            pass
        aborted = server.request("POST", "/abort_request", {"abort_all": True})[1]["aborted_choices"]
        reasons = [future.result()[1]["choices"][0]["finish_reason"] for future in futures]
    assert aborted >= 1 and reasons.count("abort") == aborted, (aborted, reasons)
    server.wait_idle()


# --- 30


@pytest.mark.parametrize("body", [{}, {"stream": True}, {"n": 3}, {"prompt": ["a", "b", "c", "d"]}, {"prompt": [5] * 400}])
def test_30_nothing_runs_on_for_a_client_that_left(server, body):
    connection = server.connect()
    request = {"model": "tiny", "prompt": PROMPT, "max_tokens": 90, "ignore_eos": True, "logprobs": 5, **body}
    connection.request("POST", "/v1/completions", json.dumps(request), {"Content-Type": "application/json"})
    if body.get("stream"):
        response = connection.getresponse()
        for _ in range(3):
            response.readline()
    connection.sock.close()
    connection.close()
    server.wait_idle(4.0)


# --- 32


def test_32_nothing_follows_the_end_and_flush_empties_the_tree(server):
    for max_tokens in (1, 2, 200):
        answer = complete(server, max_tokens=max_tokens, ignore_eos=True)
        assert answer["usage"]["completion_tokens"] == max_tokens
    ended = complete(server, **force(EOS_ID), max_tokens=50, logprobs=0)
    assert ended["choices"][0]["text"] == "" and ended["usage"]["completion_tokens"] == 1
    want = [complete(server, prompt=f"{PROMPT} {i}", max_tokens=20 + i, ignore_eos=True)["choices"][0]["text"] for i in range(4)]
    stop = threading.Event()
    flushes: list[int] = []

    def flush() -> None:
        while not stop.is_set() and len(flushes) < 200:
            flushes.append(server.request("POST", "/flush_cache")[0])

    flusher = threading.Thread(target=flush)
    flusher.start()
    with ThreadPoolExecutor(4) as pool:
        for _ in range(6):
            got = list(pool.map(lambda i: complete(server, prompt=f"{PROMPT} {i}", max_tokens=20 + i, ignore_eos=True), range(4)))
            assert [answer["choices"][0]["text"] for answer in got] == want
    stop.set()
    flusher.join()
    assert flushes and set(flushes) == {200}
    assert server.request("POST", "/flush_cache")[0] == 200
    stats = server.wait_idle()
    assert stats["pool_evictable"] == 0
    assert complete(server, prompt=f"{PROMPT} 0")["usage"].get("prompt_tokens_details", {}).get("cached_tokens", 0) == 0


def test_endless_headers_end_the_connection(server):
    before = psutil.Process(server.process.pid).memory_info().rss
    connection = socket.create_connection(server.address, timeout=20)
    try:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX: ")
        for _ in range(60):
            connection.sendall(b"a" * (1 << 20))
        answer = connection.recv(4096)
    except OSError:
        answer = b""  # closed while we were still sending
    connection.close()
    assert not answer or answer.startswith(b"HTTP/1.1 400"), answer
    assert psutil.Process(server.process.pid).memory_info().rss - before < 20 << 20
    assert complete(server, max_tokens=1)["usage"]["completion_tokens"] == 1
