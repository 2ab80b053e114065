"""Running one API request: its choices are submitted, watched for a client that leaves, and followed to their ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gristmill.messages import Submit, Text, TokenLogprob, Usage
from gristmill.server.errors import error_object
from gristmill.server.schemas import GenerationRequest, PromptDetails, UsageObject
from gristmill.server.state import RequestFacts, ServerState
from gristmill.tokenizer.manager import Generation
from gristmill.tokenizer.validate import (
    MAX_CHOICES,
    RequestError,
    check_int,
    check_sampling,
    check_stops,
    choice_seed,
    make_submit,
)

Batch = list[tuple[int, Text]]
encode_json = msgspec.json.Encoder().encode


class ClientGone(Exception):
    """The client closed the connection; its request was aborted."""


@dataclass
class Choice:
    """What is known of one choice so far."""

    prompt_ids: Sequence[int]
    finish: str = ""
    usage: Usage = field(default_factory=Usage)
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)


def check_model(state: ServerState, name: str) -> None:
    if not name:
        raise RequestError("model is missing", "model", code="missing_field")
    if name != state.model_name:
        raise RequestError(
            f"the model {name[:100]!r} does not exist; this server has {state.model_name!r}", "model", code="model_not_found", status=404
        )


def check_stream_options(body: GenerationRequest) -> bool:
    """Whether the stream ends with a usage chunk."""
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream to be true", "stream_options")
    return bool(body.stream_options and body.stream_options.include_usage)


def build_submits(
    state: ServerState,
    body: GenerationRequest,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int | None,
    max_tokens_name: str,
    prompt_name: str = "prompt",
    logprobs: int,
    prompt_logprobs: bool,
) -> list[Submit]:
    """n choices for each prompt, in that order. Raises RequestError for the first field that cannot be used."""
    n = check_int("n", 1 if body.n is None else body.n, 1, MAX_CHOICES)
    stops = check_stops([body.stop] if isinstance(body.stop, str) else body.stop or [])
    given = {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "min_p": body.min_p,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "repetition_penalty": body.repetition_penalty,
        "min_tokens": body.min_tokens,
        "ignore_eos": body.ignore_eos,
        "stop_token_ids": body.stop_token_ids,
        "logit_bias": body.logit_bias,
        "seed": body.seed,
    }
    fields = {name: value for name, value in given.items() if value is not None}
    submits = []
    for ids in prompts:
        sampling = check_sampling(
            state.manager.limits,
            len(ids),
            max_tokens=max_tokens,
            max_tokens_name=max_tokens_name,
            prompt_name=prompt_name,
            **fields,  # type: ignore[arg-type]
        )
        submit = make_submit(
            ids,
            sampling,
            stop=stops,
            include_stop=bool(body.include_stop_str_in_output),
            skip_special=body.skip_special_tokens is not False,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
        )
        for i in range(n):
            seeded = msgspec.structs.replace(sampling, seed=choice_seed(sampling.seed, i))
            submits.append(msgspec.structs.replace(submit, sampling=seeded))
    return submits


class RunningRequest:
    """A submitted request with its choices. `batches` yields what arrives and keeps `choices`, `facts` and the metrics up to date."""

    def __init__(
        self,
        state: ServerState,
        request: Request,
        facts: RequestFacts,
        request_id: str,
        prompts: Sequence[Sequence[int]],
        submits: list[Submit],
    ) -> None:
        self.id, self.created = request_id, int(time.time())
        self.state, self.facts = state, facts
        self._prompts = prompts
        self.n = len(submits) // len(prompts)
        self.choices = [Choice(prompts[i // self.n]) for i in range(len(submits))]
        self.generation: Generation = state.manager.submit(submits, request_id)
        state.release_body(facts)
        facts.request_id = request_id
        facts.prompt_tokens = sum(map(len, prompts))
        self.client_gone = False
        self._watch = asyncio.create_task(self._until_disconnect(request.receive))

    async def batches(self) -> AsyncIterator[Batch]:
        """Raises ClientGone when the client leaves and RequestError when the engine refuses or fails a choice."""
        async for batch in self.generation.batches():
            now = time.monotonic()
            for index, text in batch:
                self._note(self.choices[index], text, now)
            yield batch
        if self.client_gone:
            self.facts.finish = "client gone"
            raise ClientGone
        facts = self.facts
        self.state.metrics.observe(
            facts.started, facts.first_token, facts.last_token or time.monotonic(), facts.output_tokens, len(self.choices)
        )

    def end(self) -> None:
        """To be called when nobody iterates any more, however that came about. Aborts what is unfinished."""
        self._watch.cancel()
        self.generation.abort()

    def usage(self) -> UsageObject:
        """Of all choices so far: each prompt counts once."""
        prompt, completion = self.facts.prompt_tokens, sum(choice.usage.completion_tokens for choice in self.choices)
        return UsageObject(prompt, completion, prompt + completion, PromptDetails(self.facts.cached_tokens))

    def _note(self, choice: Choice, text: Text, now: float) -> None:
        facts = self.facts
        if text.finish == "error":
            if text.code == "queue_full":
                raise self.state.manager.queue_full(len(self.choices), (text.error or "").removesuffix("; try again later"))
            raise RequestError(text.error or "the engine failed", code=text.code, status=text.status)
        if len(text.ids):
            facts.first_token = facts.first_token or now
            facts.last_token = now
        facts.output_tokens += len(text.ids)
        if text.finish is not None:
            choice.finish = text.finish
            choice.usage = text.usage or Usage()
            facts.finish = ",".join(dict.fromkeys(c.finish for c in self.choices if c.finish))
            # of several choices for one prompt the first tells what was cached before the request came
            facts.cached_tokens = sum(first.usage.cached_tokens for first in self.choices[:: self.n])

    async def _until_disconnect(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.client_gone = True
        self.generation.abort()


async def collect(running: RunningRequest) -> None:
    """Follow a request that is answered in one piece to its end."""
    try:
        async for batch in running.batches():
            for index, text in batch:
                choice = running.choices[index]
                choice.text.append(text.text)
                choice.logprobs += text.logprobs
                choice.prompt_logprobs += text.prompt_logprobs
    finally:
        running.end()


Render = Callable[[int, Text], Iterable[msgspec.Struct]]


class EventStream(Response):
    """Server-sent events of one request. `render` turns a text into chunks; `final` makes the last ones.

    Made by `open_stream`, which has waited for the first batch: a refusal is still an ordinary error response.
    """

    def __init__(
        self,
        running: RunningRequest,
        batches: AsyncIterator[Batch],
        first: Batch,
        render: Render,
        final: Callable[[], Iterable[msgspec.Struct]],
    ) -> None:
        super().__init__(None, headers={"cache-control": "no-cache", "x-accel-buffering": "no"}, media_type="text/event-stream")
        del self.headers["content-length"]
        self._running, self._batches, self._first, self._render, self._final = running, batches, first, render, final

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # while send waits for the client to read, the engine goes on: the generation bounds what may pile up meanwhile
        generation = self._running.generation
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            generation.held_up = True
            await self._send_batch(send, self._first)
            try:
                generation.held_up = False
                async for batch in self._batches:
                    generation.held_up = True
                    await self._send_batch(send, batch)
                    generation.held_up = False
                tail = [*map(_event, self._final()), b"data: [DONE]\n\n"]
            except RequestError as error:
                self._running.facts.finish = "error"
                tail = [_event(error_object(str(error), error.status, error.param, error.code)), b"data: [DONE]\n\n"]
            await send({"type": "http.response.body", "body": b"".join(tail), "more_body": False})
        except (ClientGone, OSError):
            self._running.facts.finish = "client gone"
        finally:
            self._running.end()

    async def _send_batch(self, send: Send, batch: Batch) -> None:
        body = b"".join([_event(chunk) for index, text in batch for chunk in self._render(index, text)])
        if body:
            await send({"type": "http.response.body", "body": body, "more_body": True})


async def open_stream(running: RunningRequest, render: Render, final: Callable[[], Iterable[msgspec.Struct]]) -> EventStream:
    """Wait for the first text, so that whatever is wrong with the request is answered by a status and not inside a stream."""
    batches = running.batches()
    try:
        first = await batches.__anext__()
    except BaseException:
        running.end()
        raise
    return EventStream(running, batches, first, render, final)


def _event(chunk: msgspec.Struct) -> bytes:
    return b"data: " + encode_json(chunk) + b"\n\n"
