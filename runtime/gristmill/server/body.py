"""Reading request bodies within limits, and turning JSON into the structs of schemas.py with errors that name the field."""

from __future__ import annotations

import asyncio
import re
from typing import TypeVar

import msgspec
from starlette.requests import Request

from gristmill.server.state import request_facts, server_state
from gristmill.tokenizer.validate import RequestError

BODY_TIMEOUT_S = 60.0
_PATH = re.compile(r" - at `\$\.?(.*)`$")
_UNKNOWN = re.compile(r"^Object contains unknown field `(.*?)`", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(.*?)`")

T = TypeVar("T")


async def read_body(request: Request) -> bytes:
    """The whole body. Raises RequestError: 413 beyond --max-body-bytes, before anything arrives when there is a content-length, 408
    when it is slow, 503 when too much arrives at once."""
    limit = server_state(request).options.max_body_bytes
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced[:20]) > limit:
        raise _too_large(limit)
    try:
        return await asyncio.wait_for(_read(request, limit), BODY_TIMEOUT_S)
    except (TimeoutError, asyncio.TimeoutError) as error:
        raise RequestError(f"the body did not arrive within {BODY_TIMEOUT_S:g} s", status=408, code="request_timeout") from error


async def _read(request: Request, limit: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise _too_large(limit)
        server_state(request).hold_body(request_facts(request), len(chunk))
        parts.append(chunk)
    return b"".join(parts)


def _too_large(limit: int) -> RequestError:
    return RequestError(f"the body is larger than {limit} bytes", status=413, code="body_too_large")


def parse(data: bytes, kind: type[T]) -> T:
    """`data` as a `kind`, strictly. Raises RequestError naming the field that does not fit."""
    if not data:
        raise RequestError("the body is empty; it must be a JSON object", code="invalid_json")
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise _field_error(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is not valid JSON: {str(error)[:200]}", code="invalid_json") from error
    except RecursionError as error:
        raise RequestError("the JSON is nested too deeply", code="invalid_json") from error


def _field_error(text: str) -> RequestError:
    """msgspec says `Expected ..., got ... - at `$.a.b[0]``; the API says it with the field first."""
    match = _PATH.search(text)
    path, reason = (match[1], text[: match.start()]) if match else ("", text)
    for pattern, code in ((_UNKNOWN, "unknown_field"), (_MISSING, "missing_field")):
        found = pattern.match(reason)
        if found:
            name = f"{path}.{found[1][:100]}" if path else found[1][:100]
            what = "is not a field of this API" if code == "unknown_field" else "is missing"
            return RequestError(f"{name} {what}", name, code=code)
    reason = reason.replace("`", "")[:200]
    return RequestError(f"{path}: {reason}" if path else f"the body is not what this route takes: {reason}", path or None)
