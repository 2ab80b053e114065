"""Control operations from the server: what must wait until nothing is in flight, what goes on to the workers, how the engine drains."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from gristmill.messages import Control, Done, Reply

WORKER_OPS = ("profile", "weights")  # done by every rank while nothing is in flight
LOCAL_OPS = ("flush", "pause", "continue")


class Controls:
    """Operations in order of arrival, one at a time. Flush, pause and worker operations are exclusive: planning stops until the steps
    in flight are applied, then they run. Shutdown overtakes all others.

    Args:
        n_ranks: Workers that must say Done to a worker operation.
        flush: Empties the prefix cache and returns the counts for the reply.
        reply: Takes the answers.
    """

    def __init__(self, n_ranks: int, flush: Callable[[], dict[str, Any]], reply: Callable[[Reply], None]) -> None:
        self._n_ranks, self._flush, self._reply = n_ranks, flush, reply
        self._queue: deque[Control] = deque()
        self._awaited: set[int] = set()  # ranks that the first of the queue waits for
        self._results: list[Any] = []
        self._errors: list[str] = []
        self._to_workers: list[Control] = []
        self.paused = False
        self.shutdowns: list[int] = []  # seq of each shutdown asked for; answered at the very end
        self.draining = False

    def add(self, control: Control) -> None:
        """Take an operation from the server; an unknown one is answered with an error."""
        if control.op == "shutdown":
            self.shutdowns.append(control.seq)
            # a second one without drain cuts a drain short
            self.draining = bool(control.args.get("drain")) and (self.draining or len(self.shutdowns) == 1)
            self.paused = False
            self._refuse_all()
        elif self.shutdowns:
            self._reply(Reply(control.seq, error="the engine is shutting down"))
        elif control.op in LOCAL_OPS or control.op in WORKER_OPS:
            self._queue.append(control)
        else:
            known = ", ".join((*LOCAL_OPS, *WORKER_OPS, "shutdown"))
            self._reply(Reply(control.seq, error=f"control op {control.op!r} is not known; it can be {known}"))

    def _refuse_all(self) -> None:
        for control in self._queue:
            self._reply(Reply(control.seq, error="the engine is shutting down"))
        self._queue.clear()
        self._awaited.clear()

    def done(self, done: Done) -> None:
        """One rank finished the first operation of the queue."""
        if not self._queue or done.seq != self._queue[0].seq or done.rank not in self._awaited:
            return  # it was given up by a shutdown
        self._awaited.discard(done.rank)
        self._results.append(done.result)
        if done.error:
            self._errors.append(f"rank {done.rank}: {done.error}")
        if not self._awaited:
            error = "; ".join(self._errors) or None
            self._reply(Reply(self._queue.popleft().seq, result=None if error else {"ranks": self._results}, error=error))

    def hold(self, n_in_flight: int) -> bool:
        """Run what may run now; returns whether planning must wait."""
        while self._queue:
            control = self._queue[0]
            if self._awaited or (n_in_flight and control.op != "continue"):
                return True
            if control.op in WORKER_OPS:
                self._to_workers.append(control)
                self._awaited = set(range(self._n_ranks))
                self._results, self._errors = [], []
                return True
            self._queue.popleft()
            self._reply(Reply(control.seq, result=self._run(control.op)))
        return self.paused

    def _run(self, op: str) -> dict[str, Any]:
        if op == "flush":
            return self._flush()
        self.paused = op == "pause"
        return {"paused": self.paused}

    def take_worker_controls(self) -> list[Control]:
        """Operations to send to every rank."""
        controls, self._to_workers = self._to_workers, []
        return controls
