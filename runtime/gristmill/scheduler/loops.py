"""The event loops: how steps flow through the pipeline between scheduler and workers. What is in a step is the scheduler's business.

A loop is a pipeline of values: `plan` returns a Step, it is sent and kept, its Result is applied to it. Nothing about a step in flight
lives anywhere but in the loop's `pending` and in the scheduler's own accounting.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from gristmill.messages import Mask, Message, Result, Step
from gristmill.scheduler.scheduler import Scheduler
from gristmill.trace import NULL_TRACER, NullTracer


class LoopIO(Protocol):
    """The edges of the scheduler as a loop sees them. Every method that reads hands the server's messages to the scheduler."""

    def drain(self) -> None:
        """Hand over whatever the server has sent; never waits."""

    def wait_input(self) -> None:
        """Nothing to compute: wait for the server (or for something else that may change that)."""

    def send_step(self, step: Step) -> None:
        """Send `step` to every rank."""

    def send_mask(self, mask: Mask) -> None:
        """Send `mask` to rank 0."""

    def recv_result(self, return_on_input: bool) -> Result | None:
        """Wait for the next result while handing over the server's messages. None: the server said something and `return_on_input`
        is set, or the loop is to stop."""

    def publish(self, messages: Sequence[Message]) -> None:
        """Send `messages` to the detokenizer."""

    @property
    def stopped(self) -> bool:
        """Whether the loop must end without waiting for anything."""


def event_loop_normal(scheduler: Scheduler, io: LoopIO, tracer: NullTracer = NULL_TRACER) -> None:
    """One step at a time: the workers wait while a step is planned."""
    event_loop(scheduler, io, 1, tracer)


def event_loop_overlap(scheduler: Scheduler, io: LoopIO, tracer: NullTracer = NULL_TRACER) -> None:
    """While the workers run step t, plan and send step t+1; then apply the result of t."""
    event_loop(scheduler, io, 2, tracer)


def event_loop(scheduler: Scheduler, io: LoopIO, depth: int, tracer: NullTracer = NULL_TRACER) -> None:
    """The pipeline with at most `depth` steps in flight; returns when the scheduler is finished or `io` is stopped."""
    pending: deque[Step] = deque()
    while not io.stopped:
        io.drain()
        if scheduler.finished:
            return
        start = time.monotonic()
        step = scheduler.plan()
        if step is not None:
            tracer.complete("plan", start, time.monotonic(), step=step.step, rows=step.req_slot.size)
            io.send_step(step)
            pending.append(step)
        io.publish(scheduler.take())
        if not pending:
            if not scheduler.finished:
                io.wait_input()
            continue
        if step is None:
            # nothing new to send: the server may say something worth planning before the next result comes
            _apply_oldest(scheduler, io, pending, tracer, return_on_input=len(pending) < depth)
            continue
        if step.needs_mask:
            # made of the results of all earlier steps; sent in any case, as the worker waits for it before it reads another step
            while len(pending) > 1 and _apply_oldest(scheduler, io, pending, tracer):
                pass
            if not io.stopped:
                io.send_mask(scheduler.mask(step))
        while len(pending) >= depth and _apply_oldest(scheduler, io, pending, tracer):
            pass


def _apply_oldest(scheduler: Scheduler, io: LoopIO, pending: deque[Step], tracer: NullTracer, return_on_input: bool = False) -> bool:
    """Receive and apply the result of the oldest step; False when something else is to be done first."""
    start = time.monotonic()
    result = io.recv_result(return_on_input)
    if result is None:
        return False
    step = pending.popleft()
    tracer.complete("recv", start, time.monotonic(), step=step.step)
    with tracer.span("apply", step=step.step):
        out = scheduler.apply(step, result)
    io.publish([out] if out is not None else [])
    return True
