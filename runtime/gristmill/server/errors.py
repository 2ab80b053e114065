"""OpenAI's error object, for everything that is not a success. No traceback and no internal path ever gets in."""

from __future__ import annotations

import asyncio
import contextlib

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gristmill.tokenizer.validate import RequestError

MAX_MESSAGE_CHARS = 1000

LINGER_S = 0.5  # how long the rest of a body that is not wanted is read, so that its sender gets to read the answer
CLIENT_GONE = 499  # nginx's status for a client that left; it only reaches the log


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorObject(msgspec.Struct):
    error: ErrorDetail


def error_object(message: str, status: int, param: str | None = None, code: str | None = None) -> ErrorObject:
    kind = {401: "authentication_error", 404: "not_found_error", 409: "conflict_error", 503: "service_unavailable_error"}.get(status)
    kind = kind or ("invalid_request_error" if status < 500 else "server_error")
    return ErrorObject(ErrorDetail(message[:MAX_MESSAGE_CHARS], kind, param and param[:200], code))


def error_response(
    message: str, status: int, param: str | None = None, code: str | None = None, headers: dict[str, str] | None = None
) -> Response:
    body = msgspec.json.encode(error_object(message, status, param, code))
    return Response(body, status, headers, media_type="application/json")


class LastResponse(Response):
    """An answer to a body that was not read to its end, after which the connection is closed.

    Closing at once would reset the connection of a client that is still sending, and the answer would be lost with it: the answer
    goes out whole, then the body is thrown away for a moment.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
            await asyncio.wait_for(_discard(receive), LINGER_S)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _discard(receive: Receive) -> None:
    while (message := await receive())["type"] == "http.request" and message.get("more_body"):
        pass


def request_error_response(error: RequestError) -> Response:
    if error.status in (408, 413):
        body = msgspec.json.encode(error_object(str(error), error.status, error.param, error.code))
        return LastResponse(body, error.status, {"connection": "close"}, media_type="application/json")
    headers = {"retry-after": str(error.retry_after_s)} if error.retry_after_s else None
    return error_response(str(error), error.status, error.param, error.code, headers)
