"""OpenAI's error object, for everything that is not a success. No traceback and no internal path ever gets in."""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from gristmill.tokenizer.validate import RequestError

MAX_MESSAGE_CHARS = 1000

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


def request_error_response(error: RequestError) -> Response:
    # After 408 and 413 an unread rest of the body may be on its way: the connection cannot be used again.
    headers = {"connection": "close"} if error.status in (408, 413) else None
    return error_response(str(error), error.status, error.param, error.code, headers)
