"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
import functools
import uuid
from collections.abc import Iterable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from gristmill.messages import Text, TokenLogprob
from gristmill.server.body import parse, read_body
from gristmill.server.generation import (
    RunningRequest,
    build_submits,
    check_model,
    check_stream_options,
    collect,
    encode_json,
    open_stream,
)
from gristmill.server.schemas import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatLogprobs,
    ChatMessage,
    ChatRequest,
    ChatResponse,
    ChatTokenLogprob,
    ChunkChoice,
    Delta,
    TopLogprob,
)
from gristmill.server.state import request_facts, server_state
from gristmill.tokenizer.tokenizer import ChatTemplateError, PromptTooLong, Tokenizer
from gristmill.tokenizer.validate import MAX_LOGPROBS, Limits, RequestError, check_int, too_long

MAX_MESSAGES = 2048
_LONG_TEXT_CHARS = 20_000  # longer texts are tokenised in a thread
_TEMPLATE_OWN = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_FLOOR = -9999.0  # OpenAI's stand-in for minus infinity, which JSON does not have


async def chat_completions(request: Request) -> Response:
    state, facts = server_state(request), request_facts(request)
    state.manager.check_room()  # a full queue costs no more than this; the body is not even read
    body = parse(await read_body(request), ChatRequest)
    state.manager.check_room()
    check_model(state, body.model)
    _refuse_unsupported(body)
    include_usage = check_stream_options(body)
    n_logprobs = _logprobs(body)
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    max_tokens = getattr(body, name)
    if max_tokens == 0:
        raise RequestError(f"{name} must be at least 1 in a chat", name)
    ids = await _prompt(state.manager.tokenizer, state.manager.limits, body)
    submits = build_submits(
        state, body, [ids], max_tokens=max_tokens, max_tokens_name=name, prompt_name="messages", logprobs=n_logprobs, prompt_logprobs=False
    )
    running = RunningRequest(state, request, facts, f"chatcmpl-{uuid.uuid4().hex}", [ids], submits)
    if body.stream:
        return await _stream(running, n_logprobs >= 0, include_usage)
    await collect(running)
    choices = [
        ChatChoice(i, AssistantMessage("".join(c.text)), c.finish, _chat_logprobs(c.logprobs) if n_logprobs >= 0 else None)
        for i, c in enumerate(running.choices)
    ]
    response = ChatResponse(running.id, running.created, state.model_name, choices, running.usage())
    return Response(encode_json(response), media_type="application/json")


async def _stream(running: RunningRequest, logprobs: bool, include_usage: bool) -> Response:
    # with include_usage every chunk but the last has usage null, without it there is no such field
    usage = None if include_usage else msgspec.UNSET
    model = running.state.model_name
    greeted: set[int] = set()

    def chunk(choice: ChunkChoice) -> ChatChunk:
        return ChatChunk(running.id, running.created, model, [choice], usage=usage)

    def render(index: int, text: Text) -> Iterable[ChatChunk]:
        if index not in greeted:
            greeted.add(index)
            yield chunk(ChunkChoice(index, Delta(role="assistant", content="")))
        entries = _chat_logprobs(text.logprobs) if logprobs and text.logprobs else None
        if text.text or entries:
            yield chunk(ChunkChoice(index, Delta(content=text.text), logprobs=entries))
        if text.finish is not None:
            yield chunk(ChunkChoice(index, Delta(), finish_reason=text.finish))

    def final() -> Iterable[ChatChunk]:
        if include_usage:
            yield ChatChunk(running.id, running.created, model, [], usage=running.usage())

    return await open_stream(running, render, final)


def _refuse_unsupported(body: ChatRequest) -> None:
    if body.response_format is not None and body.response_format != {"type": "text"}:
        body.refuse("response_format")
    if body.tool_choice not in ("none", "auto"):
        body.refuse("tool_choice")
    if body.modalities != ["text"]:
        body.refuse("modalities")
    body.refuse("tools", "functions", "function_call", "audio", "prediction", "web_search_options", "reasoning_effort", "verbosity")


def _logprobs(body: ChatRequest) -> int:
    """Alternatives per token; -1 for no logprobs at all."""
    top = check_int("top_logprobs", body.top_logprobs or 0, 0, MAX_LOGPROBS)
    if body.top_logprobs is not None and not body.logprobs:
        if top:
            raise RequestError("top_logprobs needs logprobs to be true", "top_logprobs")
        return -1
    return top if body.logprobs else -1


async def _prompt(tokenizer: Tokenizer, limits: Limits, body: ChatRequest) -> list[int]:
    if tokenizer.chat_template is None:
        raise RequestError("this model has no chat template; use /v1/completions with a prompt", "messages", code="no_chat_template")
    if not body.messages:
        raise RequestError("messages is empty; at least one message is needed", "messages")
    if len(body.messages) > MAX_MESSAGES:
        raise RequestError(f"messages has {len(body.messages)} entries; {MAX_MESSAGES} is the most", "messages")
    messages = [_message(i, message) for i, message in enumerate(body.messages)]
    variables = body.chat_template_kwargs or {}
    if not _TEMPLATE_OWN.isdisjoint(variables):
        taken = ", ".join(sorted(_TEMPLATE_OWN & set(variables)))
        raise RequestError(f"chat_template_kwargs may not set {taken}", "chat_template_kwargs")
    encode = functools.partial(tokenizer.apply_chat_template, messages, variables=variables, limit=limits.context_length)
    try:
        long = sum(len(message["content"]) for message in messages) > _LONG_TEXT_CHARS
        ids: list[int] = await asyncio.to_thread(encode) if long else encode()
    except ChatTemplateError as error:
        raise RequestError(str(error), "messages", code="chat_template_error") from error
    except PromptTooLong as error:
        raise too_long(error.at_least, limits, "messages") from error
    return ids


def _message(i: int, message: ChatMessage) -> dict[str, Any]:
    """A message as templates expect it."""
    where = f"messages[{i}]"
    for name in ("tool_calls", "function_call", "audio"):
        if getattr(message, name) not in (None, []):
            raise RequestError(f"{where}.{name} is not supported by this server", f"{where}.{name}", code="unsupported_parameter")
    if message.content is None:
        raise RequestError(f"{where}.content is missing", f"{where}.content", code="missing_field")
    # OpenAI renamed the system role for some of its models; templates know the old name
    result: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": _content(where, message)}
    for name in ("name", "tool_call_id", "reasoning_content"):
        value = getattr(message, name)
        if value is not None:
            result[name] = value
    return result


def _content(where: str, message: ChatMessage) -> str:
    if isinstance(message.content, str):
        return message.content
    texts = []
    for j, part in enumerate(message.content or []):
        if part.type != "text" or part.text is None:
            name = f"{where}.content[{j}]"
            raise RequestError(f"{name} is of type {part.type[:50]!r}; this model takes text only", name, code="unsupported_content")
        texts.append(part.text)
    return "\n".join(texts)


def _chat_logprobs(entries: list[TokenLogprob]) -> ChatLogprobs:
    return ChatLogprobs(
        [
            ChatTokenLogprob(e.text, _finite(e.logprob), list(e.raw), [TopLogprob(t.text, _finite(t.logprob), list(t.raw)) for t in e.top])
            for e in entries
        ]
    )


def _finite(value: float | None) -> float:
    return _FLOOR if value is None or not value > _FLOOR else value
