"""Calling an OpenAI-style server in tests: strict reading of streams and error objects, whatever engine is behind it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass
class Joined:
    """What the chunks of one choice add up to."""

    text: str = ""
    finish: str | None = None
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    raw: list[bytes] = field(default_factory=list)
    n_finish: int = 0
    role: str | None = None


def stream_chunks(client: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """All chunks before [DONE] of a stream; each line is checked: UTF-8, JSON, a blank line after it, nothing after the end."""
    with client.stream("POST", path, json={**body, "stream": True}) as response:
        raw = b"".join(response.iter_bytes())
        assert response.status_code == 200, raw
        assert response.headers["content-type"].startswith("text/event-stream")
    events = raw.decode("utf-8", errors="strict").split("\n\n")
    assert events.pop() == ""
    assert events.pop() == "data: [DONE]"
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events]


def join(chunks: list[dict[str, Any]]) -> dict[int, Joined]:
    """Per choice index, what a client that follows the stream ends up with."""
    choices: dict[int, Joined] = {}
    assert len({chunk["id"] for chunk in chunks}) == 1
    for chunk in chunks:
        for choice in chunk["choices"]:
            joined = choices.setdefault(choice["index"], Joined())
            assert joined.finish is None, "a chunk came after the finish reason"
            add(joined, choice)
    return choices


def add(joined: Joined, choice: dict[str, Any]) -> None:
    """Add one choice of a chunk, or a whole choice of a plain answer."""
    message = choice.get("delta", choice.get("message", {}))
    joined.role = message.get("role", joined.role)
    joined.text += message.get("content") or choice.get("text", "")
    if choice["finish_reason"] is not None:
        joined.finish = choice["finish_reason"]
        joined.n_finish += 1
    logprobs = choice.get("logprobs")
    if logprobs and "content" in logprobs:
        joined.tokens += [entry["token"] for entry in logprobs["content"]]
        joined.logprobs += [entry["logprob"] for entry in logprobs["content"]]
        joined.raw += [bytes(entry["bytes"]) for entry in logprobs["content"]]
    elif logprobs:
        joined.tokens += logprobs["tokens"]
        joined.logprobs += logprobs["token_logprobs"]
        joined.offsets += logprobs["text_offset"]


def plain(client: httpx.Client, path: str, body: dict[str, Any]) -> tuple[dict[int, Joined], dict[str, Any]]:
    """The choices of a plain answer in the form that `join` gives, and the answer itself."""
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    choices: dict[int, Joined] = {}
    for choice in answer["choices"]:
        add(choices.setdefault(choice["index"], Joined()), choice)
    return choices, answer


def check_error(response: httpx.Response, status: int = 400, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Assert that `response` is an error object (and no stream) and return its inner part."""
    assert response.status_code == status, (response.status_code, response.text[:500])
    assert response.headers["content-type"] == "application/json"
    assert len(response.content) < 10_000
    answer = response.json()
    assert set(answer) == {"error"} and set(answer["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = answer["error"]
    assert isinstance(error["message"], str) and error["message"] and isinstance(error["type"], str)
    assert "Traceback" not in error["message"] and "/" + "work" not in error["message"]
    if param is not None:
        assert error["param"] == param, error
    if code is not None:
        assert error["code"] == code, error
    return error
