"""The routes around generation: models, health, server info, metrics, cache flush, abort."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

import gristmill
from gristmill.server import metrics
from gristmill.server.body import parse, read_body
from gristmill.server.errors import error_response
from gristmill.server.generation import encode_json
from gristmill.server.schemas import AbortRequest, ModelCard, ModelList
from gristmill.server.state import ServerState, server_state
from gristmill.tokenizer.validate import RequestError

# Options that name files of this machine stay out of /server_info.
_PRIVATE_OPTIONS = frozenset({"model", "trace", "kv_events"})


def _json(value: object, status: int = 200) -> Response:
    return Response(encode_json(value), status, media_type="application/json")


def _card(state: ServerState) -> ModelCard:
    return ModelCard(state.model_name, state.started, state.manager.limits.context_length)


async def list_models(request: Request) -> Response:
    return _json(ModelList([_card(server_state(request))]))


async def get_model(request: Request) -> Response:
    state, name = server_state(request), request.path_params["name"]
    if name != state.model_name:
        raise RequestError(f"the model {name[:100]!r} does not exist", "model", code="model_not_found", status=404)
    return _json(_card(state))


async def health(request: Request) -> Response:
    """200 once a token can be made and for as long as it can; 503 with the reason otherwise."""
    manager = server_state(request).manager
    if manager.ready and not manager.stats.draining:
        return _json({"status": "ok"})
    if manager.failure:
        return error_response(manager.failure, 503, code="engine_unavailable")
    if manager.stats.draining:
        return error_response("the server is shutting down", 503, code="draining")
    return error_response("the model is still being loaded", 503, code="loading")


async def server_info(request: Request) -> Response:
    state = server_state(request)
    manager = state.manager
    options = {name: getattr(state.options, name) for name in state.options.__dataclass_fields__ if name not in _PRIVATE_OPTIONS}
    newest = await manager.refresh_stats()
    stats = {name: getattr(newest, name) for name in newest.__struct_fields__}
    return _json(
        {
            "version": gristmill.__version__,
            "model": state.model_name,
            "architecture": manager.model_config.architecture,
            "context_length": manager.limits.context_length,
            "vocab_size": manager.limits.vocab_size,
            "eos_ids": manager.config.eos_ids,
            "has_chat_template": manager.tokenizer.chat_template is not None,
            "open_requests": manager.open_requests,
            "stats": stats,
            "options": options,
        }
    )


async def render_metrics(request: Request) -> Response:
    state = server_state(request)
    await state.manager.refresh_stats()
    return Response(state.metrics.render(), media_type=metrics.CONTENT_TYPE)


async def flush_cache(request: Request) -> Response:
    """Empty the prefix cache; waits until nothing is in flight."""
    return _json({"success": True, **await server_state(request).manager.control("flush")})


async def abort_request(request: Request) -> Response:
    """Abort one request by the id that its response carries, or all. An unknown id is no error: it may just have ended."""
    state = server_state(request)
    body = parse(await read_body(request), AbortRequest)
    if not body.rid and not body.abort_all:
        raise RequestError("rid is missing; give it or abort_all", "rid", code="missing_field")
    count = state.manager.abort_all() if body.abort_all else state.manager.abort(body.rid)
    return _json({"aborted_choices": count})
