"""The real scheduler and event loop against a worker that takes the time its profile says, under a clock that only events move.

    arrival --submit--> scheduler --plan, edge--> worker: max(arrived, free) + step time --edge, apply--> scheduler --deliver--> client

Nothing here decides anything: which steps there are is up to scheduler/, how long they take up to the profile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gristmill.errors import GristmillError
from gristmill.launch_config import LaunchConfig
from gristmill.messages import EMIT_SAMPLE, NO_TOKEN, Mask, Message, Out, Pool, Ready, Result, SamplingParams, Step, Submit
from gristmill.options import Options
from gristmill.scheduler.loops import event_loop_normal, event_loop_overlap
from gristmill.scheduler.process import scheduler_config
from gristmill.scheduler.scheduler import Scheduler
from gristmill.simulation.profile import Profile
from gristmill.simulation.report import Record, summarize
from gristmill.simulation.traces import TraceRequest
from gristmill.worker.work import StepWork, work_of

_MOST_SAMPLES = 200  # of the pool over time; when there are more, every other one is dropped
_FIRST_INTERVAL_S = 0.05
_OUTPUT_IDS = 1 << 30  # generated ids begin here, so that no output is ever a part of another prompt
_IDLE_TURNS = 64  # turns with nothing to do and no arrival to come, after which the scheduler counts as stuck


@dataclass
class Simulation:
    """What came of a trace. `pool` holds samples over time; counters are the scheduler's own."""

    records: list[Record]
    counters: dict[str, int]
    pool: list[dict[str, float]]
    busy_s: float  # the worker's
    largest: StepWork  # of every term, the most that a step had

    def summary(self) -> dict[str, Any]:
        """The numbers of `report.summarize` and those that only a simulation knows."""
        result = summarize(self.records)
        if duration := result.get("duration_s"):
            result["worker_busy"] = self.busy_s / duration
        return {**result, **self.counters, "largest": self.largest._asdict(), "pool": self.pool}


def simulate(requests: Sequence[TraceRequest], profile: Profile, options: Options) -> Simulation:
    """Run a trace to its end.

    Args:
        requests: in the order of their arrival.
        options: the scheduling and memory options; a `pool_tokens` or `context_length` of 0 means the profile's.

    Raises:
        GristmillError: the options do not fit together, or the scheduler came to a halt.
    """
    io = _VirtualIO(requests, profile, _scheduler(profile, options))
    (event_loop_overlap if options.overlap else event_loop_normal)(io.scheduler, io)
    return io.result()


def _scheduler(profile: Profile, options: Options) -> Scheduler:
    """As scheduler/process.py makes it after the workers' Ready."""
    slots = (options.pool_tokens or profile.pool_tokens) // options.page_size * options.page_size
    if options.context_length > profile.max_context:
        raise GristmillError(f"--context-length {options.context_length} is more than the profile's max_context {profile.max_context}")
    context = options.context_length or profile.max_context
    ready = Ready(0, [Pool("full", slots, options.page_size)], options.max_running, context)
    launch = LaunchConfig(options=options, model_path=profile.model, eos_ids=(), endpoint_prefix="inproc://simulation")
    return Scheduler(scheduler_config(launch, [ready]))


class _VirtualIO:
    """The LoopIO of a simulation: one clock, one worker, all clients."""

    def __init__(self, requests: Sequence[TraceRequest], profile: Profile, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._cost, self._host = profile.step_s, profile.host_s
        self._requests = requests
        self._records = [Record(request.t, request.prompt_tokens) for request in requests]
        self._n_arrived = 0
        self._rid_of: dict[int, int] = {}  # choice index -> number of the request
        self._slot_of = np.zeros(scheduler.config.max_reqs, np.int64)  # request slot -> number of the request
        self._results: deque[tuple[float, Result]] = deque()  # with the time of arrival at the scheduler
        self._now = 0.0
        self._worker_free = self._busy = 0.0
        self._largest = StepWork(0, 0, 0, 0)
        self._idle_turns = 0
        self._stopped = False
        self._most = dict.fromkeys(("running", "waiting", "locked", "occupied"), 0)  # at any step
        self._samples: list[dict[str, float]] = []
        self._sample_due, self._interval = 0.0, _FIRST_INTERVAL_S

    # --- LoopIO

    @property
    def stopped(self) -> bool:
        return self._stopped

    def drain(self) -> None:
        while self._next_arrival() <= self._now:
            self._arrive()
        if self._now >= self._sample_due:
            self._sample()

    def wait_input(self) -> None:
        if self._n_arrived < len(self._requests):
            self._now = max(self._now, self._next_arrival())
            return
        self._idle_turns += 1
        waiting = self.scheduler.snapshot().waiting
        self._stopped = not waiting
        if waiting and self._idle_turns > _IDLE_TURNS:
            raise GristmillError(
                f"the simulated scheduler stopped at {self._now:.3f} s with {waiting} requests waiting that it does not start"
            )

    def send_step(self, step: Step) -> None:
        self._idle_turns = 0
        self._now += self._host.plan
        for new in step.new:
            number = new.sampling.seed
            self._slot_of[new.req_slot] = number
            if self._records[number].t_start < 0:
                self._records[number].t_start = self._now
        stats = self.scheduler.snapshot()
        occupied = stats.pool_locked + stats.pool_evictable
        for name, value in zip(self._most, (stats.running, stats.waiting, stats.pool_locked, occupied)):
            self._most[name] = max(self._most[name], value)
        work = work_of(step)
        self._largest = StepWork(*map(max, self._largest, work))
        seconds = self._cost.seconds(work)
        end = max(self._now + self._host.edge, self._worker_free) + seconds
        self._worker_free = end + self._host.gap
        self._busy += seconds
        rows = step.emit == EMIT_SAMPLE
        ids = np.full(step.req_slot.size, NO_TOKEN, np.int32)
        ids[rows] = _OUTPUT_IDS + (step.kv_len[rows].astype(np.int64) * 7919 + self._slot_of[step.req_slot[rows]] * 104729) % (1 << 29)
        self._results.append((end + self._host.edge, Result(step.step, ids)))

    def send_mask(self, mask: Mask) -> None:
        raise AssertionError("no request of a trace has a grammar")

    def recv_result(self, return_on_input: bool) -> Result | None:
        when, result = self._results[0]
        while (arrival := self._next_arrival()) <= when:
            self._now = max(self._now, arrival)
            self._arrive()
            if return_on_input:
                return None
        self._results.popleft()
        self._now = max(self._now, when) + self._host.apply
        return result

    def publish(self, messages: Sequence[Message]) -> None:
        when = self._now + self._host.deliver
        for out in messages:
            assert isinstance(out, Out)
            for opened in out.open:
                self._rid_of[opened.idx] = int(opened.rid)
            for idx in out.idx.tolist():
                record = self._records[self._rid_of[idx]]
                record.t_first = when if record.t_first < 0 else record.t_first
                record.t_last = when
                record.output_tokens += 1
            for closed in out.close:
                record = self._records[self._rid_of.pop(closed.idx)]
                record.cached_tokens = closed.cached_tokens
                if closed.reason == "error":
                    record.error = closed.code or "error"

    # --- arrivals and the result

    def _next_arrival(self) -> float:
        """When the scheduler hears of the next request."""
        return self._requests[self._n_arrived].t + self._host.submit if self._n_arrived < len(self._requests) else float("inf")

    def _arrive(self) -> None:
        number, request = self._n_arrived, self._requests[self._n_arrived]
        self._n_arrived += 1
        # the seed says which request it is: the worker learns no other name
        sampling = SamplingParams(temperature=0.0, seed=number, max_tokens=request.output_tokens, ignore_eos=True)
        self.scheduler.handle(Submit(str(number), request.prompt(), sampling, priority=request.priority))

    def _sample(self) -> None:
        stats = self.scheduler.snapshot()
        self._samples.append(
            {
                "t": round(self._now, 4),
                "running": stats.running,
                "waiting": stats.waiting,
                "free": stats.pool_free,
                "evictable": stats.pool_evictable,
                "locked": stats.pool_locked,
            }
        )
        if len(self._samples) > _MOST_SAMPLES:
            del self._samples[1::2]
            self._interval *= 2
        self._sample_due = self._now + self._interval

    def result(self) -> Simulation:
        stats = self.scheduler.snapshot()
        counters = {
            "steps": stats.sent_step,
            "retractions": stats.retractions,
            "preemptions": stats.preemptions,
            "zombie_rows": stats.zombie_rows,
            "pool_tokens": stats.pool_total,
            **{f"most_{name}": value for name, value in self._most.items()},
        }
        return Simulation(self._records, counters, self._samples, self._busy, self._largest)
