"""The worker loop: run the forward pass of step t+1 as soon as it arrives, answer step t when its work is done.

On the CPU a step is done when its sampling returns, so Result t is sent before step t+1 is received. On a GPU the loop only launches work
and never waits for the device: a thread of its own waits for each step's results and sends them. In both, everything that is sent
goes out in the order in which it was asked for, and Result t precedes the wait for the mask of step t+1 or does not need it.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol

from gristmill.errors import ProtocolError
from gristmill.messages import Control, Done, Mask, Message, Result, Step

_POLL_MS = 200  # how often `stop` is looked at while nothing comes
_JOIN_S = 5.0


class Pending(Protocol):
    """A step whose work was launched."""

    def wait(self) -> Result: ...


class Runner(Protocol):
    """What ModelRunner and NullRunner have in common. `launches` says whether `sample` returns before the work is done."""

    launches: bool

    def forward(self, step: Step) -> Any: ...

    def sample(self, done: Any, mask: Mask | None = None) -> Pending: ...


class Source(Protocol):
    def recv(self, timeout_ms: int | None = 0) -> Message | None: ...


class Sink(Protocol):
    def send(self, message: Message) -> None: ...


class Stopped(Exception):
    """`stop` was set."""


class _Answers:
    """What the loop has to say, sent in order. With a thread, `put` returns at once."""

    def __init__(self, sink: Sink, threaded: bool) -> None:
        self._sink = sink
        self._error: BaseException | None = None
        self._waiting: queue.SimpleQueue[Callable[[], Message] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="results", daemon=True) if threaded else None
        if self._thread is not None:
            self._thread.start()

    def put(self, message: Callable[[], Message]) -> None:
        if self._thread is None:
            self._sink.send(message())
        else:
            self._waiting.put(message)

    def check(self) -> None:
        """Raise what ended the thread."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Send what is left, then end."""
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        try:
            while (message := self._waiting.get()) is not None:
                self._sink.send(message())
        except BaseException as error:
            self._error = error


def run_loop(runner: Runner, source: Source, sink: Sink, stop: threading.Event, rank: int = 0) -> None:
    """Serve messages until Control shutdown (answered with Done) or until `stop` is set. Raises ProtocolError on a message out of order."""
    answers = _Answers(sink, runner.launches)
    try:
        _serve(runner, source, answers, stop, rank)
    except Stopped:
        return
    finally:
        answers.close()
    answers.check()


def _serve(runner: Runner, source: Source, answers: _Answers, stop: threading.Event, rank: int) -> None:
    last_step: int | None = None
    while not stop.is_set():
        message = _receive(source, stop, answers)
        if isinstance(message, Step):
            if last_step is not None and message.step != last_step + 1:
                raise ProtocolError(f"step {message.step} came after step {last_step}")
            last_step = message.step
            forwarded = runner.forward(message)
            mask = _receive_mask(source, stop, answers, message) if message.needs_mask else None
            pending = runner.sample(forwarded, mask)
            if rank == 0:
                answers.put(pending.wait)
        elif isinstance(message, Control):
            answers.put(functools.partial(_control, message, rank))
            if message.op == "shutdown":
                return
        else:
            raise ProtocolError(f"the worker received a {type(message).__name__} where a Step or Control was due")


def _receive(source: Source, stop: threading.Event, answers: _Answers) -> Message:
    while True:
        message = source.recv(_POLL_MS)
        answers.check()
        if message is not None:
            return message
        if stop.is_set():
            raise Stopped


def _receive_mask(source: Source, stop: threading.Event, answers: _Answers, step: Step) -> Mask:
    message = _receive(source, stop, answers)
    if not isinstance(message, Mask) or message.step != step.step:
        raise ProtocolError(f"the message after step {step.step}, which needs a mask, was a {type(message).__name__}")
    return message


def _control(message: Control, rank: int) -> Done:
    """flush, pause and continue concern the scheduler alone: the worker holds nothing that a later NewReq does not reset."""
    if message.op in ("flush", "pause", "continue", "shutdown"):
        return Done(seq=message.seq, rank=rank)
    return Done(seq=message.seq, rank=rank, error=f"the worker does not support {message.op!r}")
