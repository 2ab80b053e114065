"""POST /v1/completions: text or token prompts, one or many, with echo and prompt scoring."""

from __future__ import annotations

import asyncio
import functools
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from gristmill.detokenizer.incremental import IncrementalText
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
from gristmill.server.schemas import CompletionChoice, CompletionLogprobs, CompletionRequest, CompletionResponse
from gristmill.server.state import ServerState, request_facts, server_state
from gristmill.tokenizer.tokenizer import PromptTooLong, Tokenizer
from gristmill.tokenizer.validate import (
    MAX_CHOICES,
    MAX_LOGPROBS,
    MAX_PROMPTS,
    MAX_TOTAL_CHOICES,
    RequestError,
    check_ids,
    check_int,
    too_long,
)

_LONG_TEXT_CHARS = 20_000  # longer texts are tokenised in a thread
_FLOOR = -9999.0  # OpenAI's stand-in for minus infinity, which JSON does not have


async def completions(request: Request) -> Response:
    state, facts = server_state(request), request_facts(request)
    state.manager.check_room()  # a full queue costs no more than this; the body is not even read
    body = parse(await read_body(request), CompletionRequest)
    state.manager.check_room()
    check_model(state, body.model)
    body.refuse("suffix", "response_format")
    include_usage = check_stream_options(body)
    n = check_int("n", 1 if body.n is None else body.n, 1, MAX_CHOICES)
    if body.best_of is not None and body.best_of != n:
        raise RequestError("best_of other than n is not supported by this server", "best_of", code="unsupported_parameter")
    n_logprobs = -1 if body.logprobs is None else check_int("logprobs", body.logprobs, 0, MAX_LOGPROBS)
    prompts = await _prompts(state, body, n)
    echo, wants_logprobs = bool(body.echo), n_logprobs >= 0
    submits = build_submits(
        state,
        body,
        [prompt.ids for prompt in prompts],
        max_tokens=body.max_tokens,
        max_tokens_name="max_tokens",
        logprobs=n_logprobs,
        prompt_logprobs=echo and wants_logprobs,
    )
    running = RunningRequest(state, request, facts, f"cmpl-{uuid.uuid4().hex}", [prompt.ids for prompt in prompts], submits)
    tokenizer = state.manager.tokenizer
    writers = [ChoiceWriter(tokenizer, prompts[i // n], echo, wants_logprobs, s.detok.skip_special) for i, s in enumerate(submits)]
    if body.stream:
        return await _stream(running, writers, include_usage)
    await collect(running)
    choices = []
    for i, choice in enumerate(running.choices):
        text, logprobs = writers[i].write("".join(choice.text), choice.logprobs, choice.prompt_logprobs)
        choices.append(CompletionChoice(i, text, choice.finish, logprobs))
    response = CompletionResponse(running.id, running.created, state.model_name, choices, running.usage())
    return Response(encode_json(response), media_type="application/json")


async def _stream(running: RunningRequest, writers: list[ChoiceWriter], include_usage: bool) -> Response:
    usage = None if include_usage else msgspec.UNSET
    model = running.state.model_name

    def render(index: int, text: Text) -> Iterable[CompletionResponse]:
        writer = writers[index]
        if writer.waits(text):
            return
        shown, logprobs = writer.write(text.text, text.logprobs, text.prompt_logprobs)
        if shown or logprobs is not None or text.finish is not None:
            choice = CompletionChoice(index, shown, text.finish, logprobs)
            yield CompletionResponse(running.id, running.created, model, [choice], usage)

    def final() -> Iterable[CompletionResponse]:
        if include_usage:
            yield CompletionResponse(running.id, running.created, model, [], running.usage())

    return await open_stream(running, render, final)


class Prompt(msgspec.Struct):
    """`text` is what echo shows."""

    ids: Sequence[int]
    text: str


class ChoiceWriter:
    """Text and logprob lists of one choice, piece by piece: first the echoed prompt, then the output."""

    def __init__(self, tokenizer: Tokenizer, prompt: Prompt, echo: bool, logprobs: bool, skip_special: bool = True) -> None:
        self._tokenizer, self._prompt = tokenizer, prompt
        self._hidden = tokenizer.special_ids if skip_special else frozenset[int]()  # an echoed prompt hides nothing
        self._echo, self._logprobs = echo, logprobs
        self._offset = 0
        self._text = IncrementalText()
        self._waiting: list[TokenLogprob] = []  # prompt logprobs that came before the last of them

    def waits(self, text: Text) -> bool:
        """Whether `text` only holds prompt logprobs, more of which will follow: it is kept for the next write."""
        if text.text or text.finish is not None or len(text.ids) or text.logprobs:
            return False
        self._waiting += text.prompt_logprobs
        return True

    def write(self, text: str, logprobs: list[TokenLogprob], prompt_logprobs: list[TokenLogprob]) -> tuple[str, CompletionLogprobs | None]:
        lists = CompletionLogprobs([], [], [], []) if self._logprobs else None
        shown = ""
        if self._echo:
            self._echo = False
            shown = self._prompt.text
            if lists is not None:
                first = self._prompt.ids[0]
                raw = self._tokenizer.id_to_bytes(first)
                opening = TokenLogprob(first, raw.decode("utf-8", errors="replace"), raw, None)
                for entry in [opening, *self._waiting, *prompt_logprobs]:
                    self._add(lists, entry, shown=True)
                self._offset, self._text = len(shown), IncrementalText()
        for entry in logprobs if lists is not None else ():
            assert lists is not None
            self._add(lists, entry, shown=entry.id not in self._hidden)
        return shown + text, lists if lists is not None and lists.tokens else None

    def _add(self, lists: CompletionLogprobs, entry: TokenLogprob, shown: bool) -> None:
        lists.tokens.append(token_text(entry.raw))
        lists.token_logprobs.append(None if entry.logprob is None else _finite(entry.logprob))
        top = {token_text(t.raw): _finite(t.logprob) for t in entry.top}
        if entry.logprob is not None:
            top[token_text(entry.raw)] = _finite(entry.logprob)
        lists.top_logprobs.append(top if entry.logprob is not None else None)
        lists.text_offset.append(self._offset + (shown and self._text.breaks(entry.raw)))
        if shown:
            self._offset += len(self._text.feed(entry.raw))


def token_text(raw: bytes) -> str:
    """A token as a JSON string; one that is not whole characters is spelt `bytes:\\xe5\\x9b`, as OpenAI does."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


async def _prompts(state: ServerState, body: CompletionRequest, n: int) -> list[Prompt]:
    """The prompts of a request, in any of the four forms that the API has."""
    prompt = body.prompt
    several: list[Any] = [prompt] if isinstance(prompt, str) or (prompt and _is_number(prompt[0])) else prompt
    if not several:
        raise RequestError("prompt is empty", "prompt")
    if len(several) > MAX_PROMPTS:
        raise RequestError(f"prompt has {len(several)} entries; {MAX_PROMPTS} is the most", "prompt")
    if len(several) * n > MAX_TOTAL_CHOICES:
        raise RequestError(f"{len(several)} prompts times n={n} are more than {MAX_TOTAL_CHOICES} choices", "n")
    if len({isinstance(entry, str) for entry in several}) > 1:
        raise RequestError("prompt mixes texts and lists of token ids", "prompt")
    return [await _one_prompt(state, entry, bool(body.parse_special)) for entry in several]


async def _one_prompt(state: ServerState, entry: Any, parse_special: bool) -> Prompt:
    tokenizer = state.manager.tokenizer
    if isinstance(entry, str):
        encode = functools.partial(tokenizer.encode, entry, allow_special=parse_special, limit=state.manager.limits.context_length)
        try:
            return Prompt(await asyncio.to_thread(encode) if len(entry) > _LONG_TEXT_CHARS else encode(), entry)
        except PromptTooLong as error:
            raise too_long(error.at_least, state.manager.limits) from error
    if not isinstance(entry, list):
        raise RequestError("prompt must be a text, a list of texts, a list of token ids or a list of such lists", "prompt")
    check_ids("prompt", entry, state.manager.limits)
    return Prompt(entry, tokenizer.decode(entry, skip_special=False))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)  # bool too: it is refused as an id, by name


def _finite(value: float | None) -> float:
    return _FLOOR if value is None or not value > _FLOOR else value
