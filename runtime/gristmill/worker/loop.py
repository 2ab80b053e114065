"""The worker loop on the CPU: run step t, send Result t, then receive step t+1. With a mask, Result t-1 always precedes the wait for it."""

from __future__ import annotations

import threading
from typing import Any, Protocol

from gristmill.errors import ProtocolError
from gristmill.messages import Control, Done, Mask, Message, Result, Step

_POLL_MS = 200  # how often `stop` is looked at while nothing comes


class Runner(Protocol):
    """What ModelRunner and NullRunner have in common."""

    def forward(self, step: Step) -> Any: ...

    def sample(self, done: Any, mask: Mask | None = None) -> Result: ...


class Source(Protocol):
    def recv(self, timeout_ms: int | None = 0) -> Message | None: ...


class Sink(Protocol):
    def send(self, message: Message) -> None: ...


class Stopped(Exception):
    """`stop` was set."""


def receive(source: Source, stop: threading.Event) -> Message:
    while True:
        message = source.recv(_POLL_MS)
        if message is not None:
            return message
        if stop.is_set():
            raise Stopped


def run_loop(runner: Runner, source: Source, sink: Sink, stop: threading.Event, rank: int = 0) -> None:
    """Serve messages until Control shutdown (answered with Done) or until `stop` is set. Raises ProtocolError on a message out of order."""
    last_step: int | None = None
    try:
        while not stop.is_set():
            message = receive(source, stop)
            if isinstance(message, Step):
                if last_step is not None and message.step != last_step + 1:
                    raise ProtocolError(f"step {message.step} came after step {last_step}")
                last_step = message.step
                forwarded = runner.forward(message)
                mask = _receive_mask(source, stop, message) if message.needs_mask else None
                result = runner.sample(forwarded, mask)
                if rank == 0:
                    sink.send(result)
            elif isinstance(message, Control):
                sink.send(_control(message, rank))
                if message.op == "shutdown":
                    return
            else:
                raise ProtocolError(f"the worker received a {type(message).__name__} where a Step or Control was due")
    except Stopped:
        return


def _receive_mask(source: Source, stop: threading.Event, step: Step) -> Mask:
    message = receive(source, stop)
    if not isinstance(message, Mask) or message.step != step.step:
        raise ProtocolError(f"the message after step {step.step}, which needs a mask, was a {type(message).__name__}")
    return message


def _control(message: Control, rank: int) -> Done:
    """flush, pause and continue concern the scheduler alone: the worker holds nothing that a later NewReq does not reset."""
    if message.op in ("flush", "pause", "continue", "shutdown"):
        return Done(seq=message.seq, rank=rank)
    return Done(seq=message.seq, rank=rank, error=f"the worker does not support {message.op!r}")
