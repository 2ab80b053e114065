"""Process A's link to the engine: sends requests to the scheduler, hands the text that comes back to whoever waits for it.

Everything runs on one asyncio loop: the one that `start` is called on. No thread, no copy: the socket's descriptor wakes the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
import zmq

from gristmill.errors import GristmillError, ProtocolError
from gristmill.launch_config import LaunchConfig
from gristmill.loading.config import ModelConfig
from gristmill.messages import HEARTBEAT, Abort, Control, Message, Reply, Stats, Submit, Text
from gristmill.tokenizer.backlog import MAX_UNREAD_BYTES, Turnover, Unread
from gristmill.tokenizer.tokenizer import Tokenizer
from gristmill.tokenizer.validate import Limits, RequestError
from gristmill.trace import NULL_TRACER, NullTracer, open_tracer
from gristmill.transport import Endpoints, Pull, Push
from gristmill.watchdog import Seen

log = logging.getLogger(__name__)

_MESSAGES_PER_WAKE = 256  # then other tasks of the loop get their turn


class EngineUnavailable(GristmillError):
    """The engine cannot take or finish requests: it is loading, has failed or is shutting down."""

    def __init__(self, message: str, status: int = 503) -> None:
        super().__init__(message)
        self.status = status


class Generation:
    """One client request: `len(rids)` choices whose texts come interleaved. Iterate over `batches()` on the manager's loop.

    What nobody has taken yet is one text per choice. While `held_up` says that the client does not read, more than MAX_UNREAD_BYTES
    of it end the request with an error: the memory that a client can pin is bounded.
    """

    def __init__(self, manager: TokenizerManager, request_id: str, rids: list[str]) -> None:
        self.request_id, self.rids = request_id, rids
        self.held_up = False  # set by whoever iterates, while it waits for its client
        self.n_open = 0  # choices that were open in all with this request's, when it was submitted
        self._manager = manager
        self._unread = Unread()
        self._waiter: asyncio.Future[None] | None = None
        self._unfinished = len(rids)

    async def batches(self) -> AsyncIterator[list[tuple[int, Text]]]:
        """Lists of (choice index, text), one text for each choice that has something new, until each choice has sent its `finish`."""
        while self._unread or self._unfinished:
            if not self._unread:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
            batch = self._unread.take()
            if batch:
                yield batch

    def abort(self) -> None:
        """Nobody waits for this request any more: unfinished choices are aborted and `batches` ends. Idempotent."""
        self._manager.drop(self)
        self._unfinished = 0
        self._unread.clear()
        self._wake()

    @property
    def finished(self) -> bool:
        return self._unfinished == 0

    def push(self, index: int, text: Text) -> None:
        """Called by the manager."""
        self._unread.add(index, text)
        self._unfinished -= text.finish is not None
        if self.held_up and self._unread.size_bytes > MAX_UNREAD_BYTES:
            self._give_up()
        self._wake()

    def _give_up(self) -> None:
        """The client does not read: free what waits for it and the engine from its work; should it ever read on, it gets the reason."""
        log.warning("aborted %s: its client left %d bytes unread", self.request_id, self._unread.size_bytes)
        self.abort()
        reason = f"the client read too slowly: more than {MAX_UNREAD_BYTES} bytes were waiting for it"
        self._unread.add(0, Text(self.rids[0], finish="error", error=reason, status=408, code="slow_client"))

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class TokenizerManager:
    """Owns the A -> B and C -> A edges, the open requests and the engine's latest statistics.

    Args:
        context: a `zmq.Context` or `zmq.asyncio.Context`; for an engine in one process the one its other parts use.

    Attributes:
        stats: the newest Stats message (all zero before the first).
        failure: why the engine takes no more requests; "" while it does.
    """

    def __init__(self, config: LaunchConfig, context: zmq.Context, tokenizer: Tokenizer, model_config: ModelConfig) -> None:
        self.config, self.tokenizer, self.model_config = config, tokenizer, model_config
        self.stats = Stats()
        self.failure = ""
        # asyncio contexts make sockets whose calls return futures; the edges need plain ones
        self._given_context = context  # a shadow does not keep it alive
        self._context: zmq.Context = zmq.Context.shadow(context.underlying)
        self.heartbeats = 0  # of the detokenizer, which passes on everything else that comes
        self.stats_seen = 0
        self._open: dict[str, tuple[Generation, int]] = {}
        self._turnover = Turnover()
        self._full_at = math.inf  # so many open choices the scheduler would certainly refuse
        self._controls: dict[int, asyncio.Future[Reply]] = {}
        self._seq = itertools.count(1)
        self._ready: asyncio.Future[None] | None = None
        self._inbox: Pull | None = None
        self._outbox: Push | None = None
        self._tracer: NullTracer = NULL_TRACER

    # --- life

    async def start(self) -> None:
        """Open the edges on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._ready = self._loop.create_future()
        self._tracer = open_tracer(self.config.trace_dir, "server")
        ends = Endpoints(self.config.endpoint_prefix)
        self._inbox = Pull(self._context, ends.c_to_a)
        self._outbox = Push(self._context, ends.a_to_b, "server")
        self._fd = self._inbox.socket.getsockopt(zmq.FD)
        self._loop.add_reader(self._fd, self._on_readable)
        self._on_readable()  # the descriptor is edge-triggered: look once for what came before it was watched

    async def wait_ready(self) -> None:
        """Until the engine can make its first token. Raises EngineUnavailable when it failed before."""
        assert self._ready is not None, "start() comes first"
        await asyncio.shield(self._ready)

    async def shutdown(self, drain: bool = False) -> None:
        """Ask the engine to end and wait until it has said that it does."""
        await self.control("shutdown", {"drain": True} if drain else {}, timeout_s=None)

    async def close(self) -> None:
        """Fail what is open and close the edges. Idempotent."""
        self.fail_all("the server is shutting down")
        if self._inbox is not None and self._outbox is not None:
            self._loop.remove_reader(self._fd)
            self._inbox.close()
            self._outbox.close()
            self._inbox = self._outbox = None
            self._tracer.close()

    # --- state

    @property
    def ready(self) -> bool:
        return not self.failure and self.stats.ready

    @property
    def seen(self) -> Seen:
        """What there is to tell of everybody's progress."""
        return Seen(self.stats.ready, self.stats_seen, self.heartbeats, self.stats.applied_step, self.stats.age_s)

    @property
    def open_requests(self) -> int:
        """Requests (not choices) that wait for text."""
        return len({id(generation) for generation, _ in self._open.values()})

    @property
    def limits(self) -> Limits:
        context = self.config.options.context_length or self.model_config.context_length
        vocab_size = min(self.tokenizer.vocab_size, self.model_config.vocab_size)
        return Limits(vocab_size, min(context, self.stats.max_context or context), self.stats.pool_total, context)

    # --- requests

    def submit(self, choices: Sequence[Submit], request_id: str | None = None) -> Generation:
        """Start `choices` (made by `validate.make_submit`) as one request.

        Raises:
            EngineUnavailable: the engine is not ready.
            RequestError: the queue is full. When only the scheduler knows that, the first texts of the request say so, all of them.
        """
        outbox = self._outbox
        if self.failure or outbox is None:
            raise EngineUnavailable(self.failure or "the engine was not started")
        if not self.stats.ready:
            raise EngineUnavailable("the model is still being loaded; try again in a moment")
        if self.stats.draining:
            raise EngineUnavailable("the server is shutting down")
        most = self.config.options.max_queued
        if len(choices) > most:
            raise RequestError(f"the request asks for {len(choices)} choices at once; this server queues {most} (--max-queued)", "n")
        request_id = request_id or f"req-{uuid.uuid4().hex}"
        if f"{request_id}-0" in self._open:
            raise ValueError(f"request id {request_id!r} is already in use")
        self.check_room(len(choices))
        self._tracer.instant("submit", request=request_id, choices=len(choices))
        generation = Generation(self, request_id, [f"{request_id}-{i}" for i in range(len(choices))])
        if not self._open:
            self._turnover.busy(time.monotonic())
        for i, (rid, choice) in enumerate(zip(generation.rids, choices)):
            self._open[rid] = (generation, i)
            outbox.send(msgspec.structs.replace(choice, rid=rid, queue_places=0 if i else len(choices)))
        generation.n_open = len(self._open)
        return generation

    def check_room(self, choices: int = 1) -> None:
        """Raise the RequestError of a full queue when the scheduler would certainly refuse so many choices more: costs nobody anything.

        Of the open choices at most max_reqs run, the others wait; and what the scheduler refused a moment ago it still refuses as long
        as nothing has ended since.
        """
        options = self.config.options
        n = len(self._open) + choices
        if self.ready and (n > self.stats.max_reqs + options.max_queued or n >= self._full_at):
            raise self.queue_full(choices, f"{options.max_queued} requests are waiting, the most that --max-queued allows")

    def queue_full(self, choices: int, reason: str) -> RequestError:
        """The refusal of a request of so many choices, with the seconds after which there should be places for it."""
        seconds = self._turnover.seconds_until_free(choices, time.monotonic())
        return RequestError(f"{reason}; try again in {seconds} s", status=503, code="queue_full", retry_after_s=seconds)

    def drop(self, generation: Generation) -> None:
        """Abort what is unfinished of `generation`; text that still comes for it is ignored."""
        for rid in generation.rids:
            if self._open.pop(rid, None) is not None:
                self._turnover.ended(time.monotonic())
                self._send(Abort(rid, "client"))

    def abort(self, request_id: str) -> int:
        """Abort the request with this id; its client gets what there is, with finish "abort". Returns the choices aborted."""
        found = [rid for rid, (generation, _) in self._open.items() if generation.request_id == request_id]
        for rid in found:
            self._send(Abort(rid, "client"))
        return len(found)

    def abort_all(self) -> int:
        for rid in self._open:
            self._send(Abort(rid, "client"))
        return len(self._open)

    def refuse_all(self, message: str) -> None:
        """No new request is taken from now on, for the reason `message`; /health says so too."""
        self.failure = self.failure or message

    def fail_all(self, message: str, status: int = 503) -> None:
        """The engine is gone: every open request ends with `message`, and no new one is taken."""
        self.refuse_all(message)
        for rid, (generation, index) in list(self._open.items()):
            if rid not in self._open:  # the push before aborted the whole request
                continue
            generation.push(index, Text(rid, finish="error", error=message, status=status, code="engine_unavailable"))
        self._open.clear()
        for future in self._controls.values():
            if not future.done():
                future.set_exception(EngineUnavailable(message))
        self._controls.clear()
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(EngineUnavailable(message))
            self._ready.exception()  # nobody may be waiting

    async def control(self, op: str, args: dict[str, Any] | None = None, timeout_s: float | None = 30.0) -> dict[str, Any]:
        """Run a control operation. Raises EngineUnavailable (failed, refused or timed out)."""
        if self.failure or self._outbox is None:
            raise EngineUnavailable(self.failure or "the engine was not started")
        seq = next(self._seq)
        future: asyncio.Future[Reply] = self._loop.create_future()
        self._controls[seq] = future
        self._send(Control(seq, op, args or {}))
        try:
            reply = await asyncio.wait_for(future, timeout_s)
        except (TimeoutError, asyncio.TimeoutError) as error:
            raise EngineUnavailable(f"the engine did not answer {op!r} within {timeout_s:g} s") from error
        finally:
            self._controls.pop(seq, None)
        if reply.error is not None:
            raise EngineUnavailable(reply.error, status=409)
        return reply.result or {}

    async def refresh_stats(self, timeout_s: float = 0.5) -> Stats:
        """The scheduler's statistics of this moment; the newest known ones when it does not answer in time."""
        if self.ready:
            with contextlib.suppress(EngineUnavailable):
                await self.control("stats", timeout_s=timeout_s)  # they arrive ahead of the reply
        return self.stats

    # --- messages

    def _send(self, message: Message) -> None:
        if self._outbox is not None:
            self._outbox.send(message)

    def _on_readable(self) -> None:
        for _ in range(_MESSAGES_PER_WAKE):
            if self._inbox is None:
                return
            try:
                message = self._inbox.recv(0)
            except ProtocolError as error:
                log.error("%s", error)
                self.fail_all(str(error))
                continue
            if message is None:
                return
            with self._tracer.span("dispatch", message=type(message).__name__):
                self._dispatch(message)
        self._loop.call_soon(self._on_readable)

    def _dispatch(self, message: Message) -> None:
        if isinstance(message, Text):
            entry = self._open.get(message.rid)
            if entry is None:
                return  # aborted meanwhile
            generation, index = entry
            if message.finish is not None:
                del self._open[message.rid]
                if message.code == "queue_full":
                    self._full_at = min(self._full_at, generation.n_open)
                else:
                    self._turnover.ended(time.monotonic())
                if message.finish == "stop" and isinstance(message.stop_reason, str):
                    self._send(Abort(message.rid, "stop"))  # the scheduler does not know of stop strings
            generation.push(index, message)
        elif isinstance(message, Stats):
            self.stats = message
            self.stats_seen += 1
            if message.waiting < self.config.options.max_queued:
                self._full_at = math.inf
            if not message.waiting:
                self._turnover.nobody_waits()
            if message.ready and self._ready is not None and not self._ready.done():
                self._ready.set_result(None)
        elif isinstance(message, Reply) and message.seq == HEARTBEAT:
            self.heartbeats += 1
        elif isinstance(message, Reply):
            future = self._controls.get(message.seq)
            if future is not None and not future.done():
                future.set_result(message)
        else:
            log.error("the server got a %s; Text, Reply and Stats are what it reads", type(message).__name__)
