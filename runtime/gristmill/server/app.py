"""The HTTP application: routes, error objects for every failure, one log line per request."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gristmill.logs import escape
from gristmill.options import Options
from gristmill.server import admin
from gristmill.server.chat import chat_completions
from gristmill.server.completions import completions
from gristmill.server.errors import CLIENT_GONE, error_response, request_error_response
from gristmill.server.generation import ClientGone
from gristmill.server.metrics import Metrics
from gristmill.server.state import RequestFacts, ServerState, request_facts, server_state
from gristmill.tokenizer.manager import EngineUnavailable, TokenizerManager
from gristmill.tokenizer.validate import RequestError

log = logging.getLogger(__name__)

Endpoint = Callable[[Request], Awaitable[Response]]

_QUIET = frozenset({"/health", "/metrics"})  # polled every few seconds: logged at debug level


def build_app(manager: TokenizerManager, options: Options) -> Starlette:
    """The ASGI application over a manager that was or will be started on the same loop."""
    state = ServerState(manager, options, Metrics(lambda: manager.stats, lambda: manager.ready))
    routes = [
        ("/v1/chat/completions", chat_completions, "POST"),
        ("/v1/completions", completions, "POST"),
        ("/v1/models", admin.list_models, "GET"),
        ("/v1/models/{name:path}", admin.get_model, "GET"),
        ("/health", admin.health, "GET"),
        ("/server_info", admin.server_info, "GET"),
        ("/metrics", admin.render_metrics, "GET"),
        ("/flush_cache", admin.flush_cache, "POST"),
        ("/abort_request", admin.abort_request, "POST"),
    ]
    app = Starlette(
        routes=[Route(path, _answering(endpoint), methods=[method]) for path, endpoint, method in routes],
        middleware=[Middleware(RequestLog, state=state, known={path for path, _, _ in routes})],
        exception_handlers={HTTPException: _http_error},
    )
    app.router.redirect_slashes = False
    app.state.server = state
    return app


def _answering(endpoint: Endpoint) -> Endpoint:
    """`endpoint` with every failure turned into an error object."""

    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except RequestError as error:
            return request_error_response(error)
        except EngineUnavailable as error:
            code = "conflict" if error.status == 409 else "engine_unavailable"
            return error_response(str(error), error.status, code=code)
        except asyncio.CancelledError:  # uvicorn cancels what is open when it is told to end at once
            return error_response("the server is shutting down", 503, code="draining")
        except (ClientGone, ClientDisconnect):
            return Response(status_code=CLIENT_GONE)
        except Exception:
            log.exception("%s failed", request.url.path)
            return error_response("the server failed to answer this request", 500, code="internal_error")
        finally:
            server_state(request).release_body(request_facts(request))

    return answer


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path, method = request.url.path[:100], request.method[:20]
    message = {404: f"there is no route {path!r}", 405: f"{path!r} does not take {method!r}"}.get(error.status_code, error.detail)
    return error_response(message, error.status_code, headers=dict(error.headers or {}))


class RequestLog:
    """ASGI middleware: one log line and one count per request, and the request's id in the response headers."""

    def __init__(self, app: ASGIApp, state: ServerState, known: set[str]) -> None:
        self._app, self._state, self._known = app, state, known

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        facts = RequestFacts()
        scope.setdefault("state", {})["facts"] = facts
        status = 0

        async def watching(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if facts.request_id:
                    message["headers"] = [*message["headers"], (b"x-request-id", facts.request_id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, watching)
        finally:
            if facts.finish == "client gone":
                status = CLIENT_GONE
            self._write(scope, facts, status)

    def _write(self, scope: Scope, facts: RequestFacts, status: int) -> None:
        path = scope["path"]
        self._state.metrics.count(path if path in self._known else "other", status)
        now = time.monotonic()
        parts = [scope["method"], path[:200], str(status)]
        if facts.request_id:
            parts += [facts.request_id, f"prompt={facts.prompt_tokens} cached={facts.cached_tokens} output={facts.output_tokens}"]
            parts.append(f"finish={facts.finish or 'none'}")
            if facts.first_token:
                parts.append(f"first={facts.first_token - facts.started:.3f}s")
        parts.append(f"total={now - facts.started:.3f}s")
        log.log(logging.DEBUG if path in _QUIET else logging.INFO, "%s", escape(" ".join(parts)))
