"""The scheduler process in a thread, with the test at the other end of every edge."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any, TypeVar

import numpy as np
import zmq

from gristmill.launch_config import LaunchConfig
from gristmill.messages import EMIT_SAMPLE, NO_TOKEN, Control, Message, Out, Pool, Ready, Result, SamplingParams, Stats, Step, Submit, ints
from gristmill.options import Options
from gristmill.scheduler import process
from gristmill.transport import Endpoints, Pull, Push
from gristmill.worker import process as worker_process

_names = itertools.count()
_WAIT_MS = 20_000  # far beyond anything that is not a hang
M = TypeVar("M", bound=Message)


class Rig:
    """Server, detokenizer and (unless `own_workers` is off) the workers are the test's own sockets."""

    def __init__(
        self, *, n_ranks: int = 1, own_workers: bool = True, model_path: str = "null:0", trace_dir: str = "", **options: Any
    ) -> None:
        self.context = zmq.Context()
        self.config = LaunchConfig(
            options=Options(**{"model": "m", **options}),
            model_path=model_path,
            eos_ids=(2,),
            endpoint_prefix=f"inproc://rig{next(_names)}",
            world_size=n_ranks,
            trace_dir=trace_dir,
        )
        endpoints = Endpoints(self.config.endpoint_prefix)
        self.stop, self.error = threading.Event(), None
        self._worker: threading.Thread | None = None
        self.server = Push(self.context, endpoints.a_to_b, "server")
        self.detokenizer = Pull(self.context, endpoints.b_to_c)
        if own_workers:
            self.pulls = [Pull(self.context, endpoints.b_to_d(rank)) for rank in range(n_ranks)]
            self.pushes = [Push(self.context, endpoints.d_to_b(rank), f"worker{rank}") for rank in range(n_ranks)]
        else:
            self.pulls, self.pushes = [], []
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            process.run(self.config, self.context, self.stop)
        except BaseException as error:
            self.error = error

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.join()
        if self._worker is not None:
            self._worker.join(_WAIT_MS / 1000)
        self.server.close()
        for edge in (self.detokenizer, *self.pulls):
            edge.close()
        for push in self.pushes:
            push.close()
        self.context.destroy(linger=0)

    def start_null_worker(self) -> None:
        """A worker that computes nothing, as `own_workers=False` needs one; it ends with the rig."""
        self._worker = threading.Thread(target=worker_process.run, args=(self.config, self.context, self.stop), daemon=True)
        self._worker.start()

    def join(self) -> None:
        self.thread.join(_WAIT_MS / 1000)
        assert not self.thread.is_alive(), "the scheduler did not end"

    def ready(
        self, rank: int = 0, *, slots: int = 1000, page_size: int = 1, max_reqs: int = 8, max_context: int = 500, kind: str = "full"
    ) -> None:
        self.pushes[rank].send(Ready(rank, [Pool(kind, slots, page_size)], max_reqs, max_context, {"vocab_size": 5000}))

    def submit(self, rid: str, n: int = 5, **sampling: Any) -> None:
        self.server.send(Submit(rid, ints(range(10, 10 + n)), SamplingParams(**{"max_tokens": 4, **sampling})))

    def control(self, seq: int, op: str, **args: Any) -> None:
        self.server.send(Control(seq, op, args))

    def step(self, rank: int = 0) -> Step:
        """The next step that a worker gets."""
        message = self.pulls[rank].recv(_WAIT_MS)
        assert isinstance(message, Step), f"{message} came where a step was due"
        return message

    def answer(self, step: Step, token: int = 7) -> None:
        self.pushes[0].send(Result(step.step, np.where(step.emit == EMIT_SAMPLE, token, NO_TOKEN).astype(np.int32)))

    def heard(self, kind: type[M]) -> M:
        """The next message of `kind` for the detokenizer; others are passed over."""
        deadline = time.monotonic() + _WAIT_MS / 1000
        while time.monotonic() < deadline:
            message = self.detokenizer.recv(_WAIT_MS)
            if isinstance(message, kind):
                return message
        raise AssertionError(f"no {kind.__name__} came")

    def closes(self, n: int) -> set[tuple[str, str | None]]:
        """(reason, code) of the next `n` closes."""
        closes: list[tuple[str, str | None]] = []
        while len(closes) < n:
            closes += [(closed.reason, closed.code) for closed in self.heard(Out).close]
        return set(closes)

    def first_stats(self) -> Stats:
        return self.heard(Stats)
