"""Process C: reads Out from the scheduler, sends Text to the server; Reply and Stats pass through unchanged.

State exists per choice index from its open to its close. Everything that arrived together is sent together: one Text per choice.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

import zmq

from gristmill.detokenizer.incremental import IncrementalText
from gristmill.detokenizer.stop import StopScanner
from gristmill.errors import ProtocolError
from gristmill.launch_config import LaunchConfig
from gristmill.messages import HEARTBEAT, Close, LogprobBlock, Message, Open, Out, Reply, Stats, Text, TokenLogprob, Usage, ints
from gristmill.tokenizer.tokenizer import Tokenizer, load_tokenizer
from gristmill.trace import open_tracer
from gristmill.transport import Endpoints, Pull, Push
from gristmill.watchdog import beat_interval_s

log = logging.getLogger(__name__)

_BATCH = 64  # messages read before anything is sent
_POLL_MS = 100  # how late `stop` is noticed


class ChoiceText:
    """The text of one open choice and what of it has not been sent."""

    def __init__(self, opened: Open, tokenizer: Tokenizer) -> None:
        self.rid, self.spec = opened.rid, opened.detok
        self._tokenizer = tokenizer
        tail = opened.detok.prompt_tail
        whole_prompt = opened.detok.n_prompt <= len(tail)
        starts_text = whole_prompt and all(i in tokenizer.special_ids for i in tail)
        context = b"".join(map(tokenizer.id_to_bytes, tail))
        self._utf8 = IncrementalText(context, strip_space=starts_text and tokenizer.strips_space)
        self._stop = StopScanner(opened.detok.stop, opened.detok.include_stop)
        self._skip = tokenizer.special_ids if opened.detok.skip_special else frozenset()
        self.completion_tokens = self.cached_tokens = 0
        self.finished = False
        self._waiting_logprobs: deque[TokenLogprob] = deque()  # of tokens that have not been added yet
        self._text: list[str] = []
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._prompt_logprobs: list[TokenLogprob] = []
        self._end: Text | None = None

    def add_logprobs(self, block: LogprobBlock) -> None:
        entries = self._entries(block)
        if block.start < self.spec.n_prompt:
            self._prompt_logprobs += entries
        else:
            self._waiting_logprobs.extend(entries)

    def add(self, token: int, closing: str | None = None) -> None:
        """Count `token` and add its text. `closing` is the close reason when it is the last one."""
        if self.finished:
            return
        self.completion_tokens += 1
        self._ids.append(token)
        if self._waiting_logprobs:
            self._logprobs.append(self._waiting_logprobs.popleft())
        if not self._hidden(token, closing):
            self._show(self._utf8.feed(self._tokenizer.id_to_bytes(token)))

    def close(self, close: Close) -> None:
        """End the choice; only frees it when a stop string ended it before."""
        if self.finished:
            return
        self._show(self._utf8.finish())
        if self.finished:  # the last, incomplete character was a stop string
            return
        self._text.append(self._stop.finish())
        usage = Usage(close.prompt_tokens, self.completion_tokens, close.cached_tokens)
        if self._stop.hit is not None and close.reason in ("stop", "length"):
            self._finish(Text(self.rid, finish="stop", stop_reason=self._stop.hit.stop, usage=usage))
            return
        last = self._ids[-1] if self._ids else None
        reason = last if close.reason == "stop" and last in self.spec.stop_token_ids else None
        self._finish(
            Text(
                self.rid,
                finish=close.reason,
                stop_reason=reason,
                usage=usage,
                error=close.error,
                status=close.status,
                code=close.code,
            )
        )

    def take(self) -> Text | None:
        """What is new since the last call, or None. Ids wait for the text that they belong to."""
        if self._end is None and not any(self._text) and not self._prompt_logprobs:
            return None
        message = self._end or Text(self.rid)
        message.text = "".join(self._text)
        message.ids = ints(self._ids)
        message.logprobs, message.prompt_logprobs = self._logprobs, self._prompt_logprobs
        self._text, self._ids, self._logprobs, self._prompt_logprobs, self._end = [], [], [], [], None
        return message

    def _hidden(self, token: int, closing: str | None) -> bool:
        if closing == "stop":  # a stop token or an EOS, whichever kind of token it is
            return not self.spec.include_stop if token in self.spec.stop_token_ids else self.spec.skip_special
        return token in self._skip

    def _show(self, text: str) -> None:
        if not text:
            return
        self._text.append(self._stop.feed(text))
        hit = self._stop.hit
        if hit is not None:
            usage = Usage(self.spec.n_prompt, self.completion_tokens, self.cached_tokens)
            self._finish(Text(self.rid, finish="stop", stop_reason=hit.stop, usage=usage))

    def _finish(self, end: Text) -> None:
        self.finished, self._end = True, end

    def _entries(self, block: LogprobBlock) -> list[TokenLogprob]:
        ids, values = block.ids.tolist(), block.values.tolist()
        top_ids, top_values, k = block.top_ids.tolist(), block.top_values.tolist(), block.k
        return [
            self._entry(ids[i], values[i], [self._entry(*pair) for pair in zip(top_ids[i * k : i * k + k], top_values[i * k : i * k + k])])
            for i in range(len(ids))
        ]

    def _entry(self, token: int, value: float, top: list[TokenLogprob] | None = None) -> TokenLogprob:
        raw = self._tokenizer.id_to_bytes(token)
        return TokenLogprob(token, raw.decode("utf-8", errors="replace"), raw, value, top or [])


class Detokenizer:
    """The state machine of process C, free of sockets: `handle` takes what B sent, `flush` sends what became of it."""

    def __init__(self, tokenizer: Tokenizer, send: Callable[[Message], None]) -> None:
        self._tokenizer, self._send = tokenizer, send
        self._choices: dict[int, ChoiceText] = {}
        self._touched: dict[int, ChoiceText] = {}  # keyed by id(): a closed idx may be reused before the flush
        self.shut_down = False

    @property
    def n_open(self) -> int:
        return len(self._choices)

    def handle(self, message: Message) -> None:
        if isinstance(message, Out):
            self._out(message)
        elif isinstance(message, Reply | Stats):
            self.flush()  # text that came before a reply arrives before it
            self._send(message)
            self.shut_down |= isinstance(message, Reply) and bool((message.result or {}).get("shutdown"))
        else:
            raise ProtocolError(f"the detokenizer got a {type(message).__name__}; Out, Reply and Stats are what it reads")

    def flush(self) -> None:
        for choice in self._touched.values():
            text = choice.take()
            if text is not None:
                self._send(text)
        self._touched.clear()

    def _out(self, out: Out) -> None:
        for opened in out.open:
            if opened.idx in self._choices:
                raise ProtocolError(f"choice {opened.idx} was opened twice ({self._choices[opened.idx].rid}, {opened.rid})")
            self._choices[opened.idx] = ChoiceText(opened, self._tokenizer)
        for idx, n_cached in out.cached.reshape(-1, 2).tolist():
            self._touch(idx).cached_tokens = n_cached
        for block in out.logprobs:
            self._touch(block.key).add_logprobs(block)
        order = out.idx.tolist()
        last = {idx: i for i, idx in enumerate(order)}
        reasons = {close.idx: close.reason for close in out.close}
        for i, (idx, token) in enumerate(zip(order, out.tok.tolist())):
            self._touch(idx).add(token, reasons.get(idx) if last[idx] == i else None)
        for close in out.close:
            self._touch(close.idx).close(close)
            del self._choices[close.idx]

    def _touch(self, idx: int) -> ChoiceText:
        choice = self._choices.get(idx)
        if choice is None:
            raise ProtocolError(f"choice {idx} is not open")
        self._touched[id(choice)] = choice
        return choice


def run(config: LaunchConfig, context: zmq.Context, stop: threading.Event) -> None:
    """Run process C until the reply to a shutdown has passed or `stop` is set. Raises ModelError and ProtocolError."""
    ends = Endpoints(config.endpoint_prefix)
    tokenizer = load_tokenizer(config.model_path, config.made_up_tokens)
    inbox = Pull(context, ends.b_to_c)
    outbox = Push(context, ends.c_to_a, "detokenizer")
    tracer = open_tracer(config.trace_dir, "detokenizer")
    try:
        detokenizer = Detokenizer(tokenizer, outbox.send)
        interval_s, heartbeat_due = beat_interval_s(config.options.watchdog_s), 0.0
        while not stop.is_set() and not detokenizer.shut_down:
            if time.monotonic() >= heartbeat_due:
                outbox.send(Reply(HEARTBEAT))
                heartbeat_due = time.monotonic() + interval_s
            message = inbox.recv(_POLL_MS)
            if message is None:
                continue
            with tracer.span("detokenize"):
                for _ in range(_BATCH):
                    detokenizer.handle(message)
                    message = inbox.recv(0) if not detokenizer.shut_down else None
                    if message is None:
                        break
                else:
                    detokenizer.handle(message)
                detokenizer.flush()
    finally:
        inbox.close()
        outbox.close()
        tracer.close()
