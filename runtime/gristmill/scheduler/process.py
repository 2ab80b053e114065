"""Process B: the scheduler with its sockets, its clock and its life from the workers' Ready to the shutdown."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence

import zmq

from gristmill.errors import GristmillError, ProtocolError
from gristmill.launch_config import LaunchConfig
from gristmill.memory.kv_events import KvEventPublisher
from gristmill.memory.window import WindowSpec
from gristmill.messages import Abort, Control, Done, Mask, Message, Pool, Ready, Reply, Result, Step, Submit, encode
from gristmill.options import Options
from gristmill.scheduler.loops import event_loop_normal, event_loop_overlap
from gristmill.scheduler.scheduler import Scheduler, SchedulerConfig
from gristmill.trace import open_tracer
from gristmill.transport import Endpoints, Pull, Push
from gristmill.watchdog import beat_interval_s

log = logging.getLogger(__name__)

_POLL_MS = 100  # how late a stop event is seen at most; messages wake the poll at once


def run(config: LaunchConfig, context: zmq.Context, stop: threading.Event) -> None:
    """Run the scheduler until a Control shutdown is done or `stop` is set. Raises ProtocolError when a worker breaks the protocol."""
    edges = _Edges(context, Endpoints(config.endpoint_prefix), config.world_size)
    tracer = open_tracer(config.trace_dir, "scheduler")
    events: KvEventPublisher | None = None
    try:
        ready = edges.await_ready(stop)
        if ready is None:
            return
        scheduler = Scheduler(scheduler_config(config, ready))
        if config.options.kv_events:
            events = KvEventPublisher(context, config.options.kv_events, config.options.page_size)
            edges.also_poll(events.socket)
        io = SchedulerIO(edges, scheduler, ready[0].caps, stop, beat_interval_s(config.options.watchdog_s), events)
        io.send_stats()
        for message in edges.early:
            io.hear(message)
        loop = event_loop_overlap if config.options.overlap else event_loop_normal
        loop(scheduler, io, tracer)
        io.finish()
    finally:
        tracer.close()
        if events is not None:
            events.close()
        edges.close()


def scheduler_config(config: LaunchConfig, ready: Sequence[Ready]) -> SchedulerConfig:
    """What the slowest and smallest rank allows, within the options."""
    options: Options = config.options
    for message in ready:
        if [pool.kind for pool in message.pools] not in (["full"], ["full", "window"]) or len(message.pools) != len(ready[0].pools):
            kinds = ", ".join(pool.kind for pool in message.pools) or "none"
            raise ProtocolError(
                f"rank {message.rank} has the pools {kinds}; every rank must have one full pool, or a full and a window pool"
            )
    full, *windows = (_smallest(pools, options) for pools in zip(*(message.pools for message in ready)))
    window = WindowSpec(windows[0].slots, windows[0].window) if windows else None
    if full.slots < options.page_size:
        raise GristmillError(
            f"the KV pool has room for {full.slots} tokens, less than one page of {options.page_size}: raise --pool-tokens"
        )
    return SchedulerConfig(
        pool_tokens=full.slots,
        window=window,
        max_reqs=min(options.max_running, *(message.max_reqs for message in ready)),
        max_context=min(message.max_context for message in ready),
        page_size=options.page_size,
        eos_ids=config.eos_ids,
        max_queued=options.max_queued,
        chunk_tokens=options.chunk_tokens,
        mixed_chunks=options.mixed_chunks,
        radix_cache=options.radix_cache,
        max_prefill_tokens=options.max_prefill_tokens,
        policy=options.policy,
        preempt_threshold=options.preempt_threshold,
        eviction_policy=options.eviction_policy,
        kv_events=bool(options.kv_events),
        n_ranks=config.world_size,
        vocab_size=int(ready[0].caps.get("vocab_size", 0)),
        check=os.environ.get("GRISTMILL_CHECK") == "1",
    )


def _smallest(pools: Sequence[Pool], options: Options) -> Pool:
    """The pool of the rank that has least of it, of those that must agree in everything else."""
    for pool in pools:
        if pool.page_size != options.page_size:
            raise ProtocolError(f"a worker has pages of {pool.page_size} tokens where --page-size is {options.page_size}")
        if pool.window != pools[0].window or (pool.kind == "window") != (pool.window > 0):
            raise ProtocolError(f"the {pool.kind} pools of the workers have windows of {sorted({pool.window for pool in pools})} tokens")
    return min(pools, key=lambda pool: pool.slots)


class _Edges:
    """The sockets of B."""

    def __init__(self, context: zmq.Context, endpoints: Endpoints, n_ranks: int) -> None:
        self.server = Pull(context, endpoints.a_to_b)
        self.from_workers = [Pull(context, endpoints.d_to_b(rank)) for rank in range(n_ranks)]
        self.to_workers = [Push(context, endpoints.b_to_d(rank), "scheduler") for rank in range(n_ranks)]
        self.detokenizer = Push(context, endpoints.b_to_c, "scheduler")
        self.early: list[Message] = []  # what the server said before the workers were ready
        self._poller = zmq.Poller()
        for pull in (self.server, *self.from_workers):
            self._poller.register(pull.socket, zmq.POLLIN)

    def poll(self, timeout_ms: float) -> None:
        """Wait until something can be read, at most `timeout_ms`."""
        self._poller.poll(max(0, round(timeout_ms)))

    def also_poll(self, socket: zmq.Socket) -> None:
        """End a wait when `socket` can be read, too."""
        self._poller.register(socket, zmq.POLLIN)

    def await_ready(self, stop: threading.Event) -> list[Ready] | None:
        """The Ready of every rank in the order of ranks; None when the engine is stopped before that."""
        ready: dict[int, Ready] = {}
        while len(ready) < len(self.from_workers):
            if stop.is_set():
                return None
            self.poll(_POLL_MS)
            while (message := self.server.recv()) is not None:
                if isinstance(message, Control) and message.op == "shutdown":
                    self.shut_down([message.seq])
                    return None
                self.early.append(message)
            for rank, pull in enumerate(self.from_workers):
                if (message := pull.recv()) is not None:
                    if not isinstance(message, Ready) or message.rank != rank:
                        raise ProtocolError(f"worker {rank} sent a {type(message).__name__} where its Ready was due")
                    ready[rank] = message
        return [ready[rank] for rank in sorted(ready)]

    def send_workers(self, message: Message) -> None:
        """The same bytes to every rank."""
        frames = encode(message)
        for worker in self.to_workers:
            worker.send_encoded(frames)

    def shut_down(self, seqs: Sequence[int]) -> None:
        """Tell the workers to end, then answer every shutdown that was asked for; the detokenizer ends on the answer."""
        self.send_workers(Control(seqs[0], "shutdown"))
        for seq in seqs:
            self.detokenizer.send(Reply(seq, result={"shutdown": True}))

    def close(self) -> None:
        for pull in (self.server, *self.from_workers):
            pull.close()
        for push in (*self.to_workers, self.detokenizer):
            push.close()


class SchedulerIO:
    """The LoopIO of a real engine, and the clock: statistics once a second, the age of the oldest step."""

    def __init__(
        self,
        edges: _Edges,
        scheduler: Scheduler,
        caps: dict[str, object],
        stop: threading.Event,
        interval_s: float = 1.0,
        events: KvEventPublisher | None = None,
    ) -> None:
        self._edges, self._scheduler, self._caps, self._stop, self._events = edges, scheduler, caps, stop, events
        self._results: list[Result] = []
        self._sent_at: dict[int, float] = {}  # by step number, in flight
        self._stats_due, self._interval_s = 0.0, interval_s
        self._drain_told = False

    @property
    def stopped(self) -> bool:
        return self._stop.is_set()

    def drain(self) -> None:
        self._read()
        self._tick()

    def wait_input(self) -> None:
        self._wait()

    def send_step(self, step: Step) -> None:
        self._sent_at[step.step] = time.monotonic()
        self._edges.send_workers(step)

    def send_mask(self, mask: Mask) -> None:
        self._edges.to_workers[0].send(mask)

    def recv_result(self, return_on_input: bool) -> Result | None:
        while not self._results:
            heard = self._read()
            if self._results:
                break
            if self.stopped or (return_on_input and heard):
                return None
            self._wait()
        result = self._results.pop(0)
        self._sent_at.pop(result.step, None)
        return result

    def _wait(self) -> None:
        """Until something can be read or is due."""
        self._tick()
        busy = self._events is not None and self._events.busy
        self._edges.poll(0 if busy else min(_POLL_MS, (self._stats_due - time.monotonic()) * 1000))

    def publish(self, messages: Sequence[Message]) -> None:
        for message in messages:
            self._edges.detokenizer.send(message)

    def _read(self) -> bool:
        """Hand over what is there; results are kept for recv_result. Returns whether the scheduler was told anything."""
        heard = False
        while (message := self._edges.server.recv()) is not None:
            self.hear(message)
            heard = True
        for rank, pull in enumerate(self._edges.from_workers):
            while (message := pull.recv()) is not None:
                if isinstance(message, Result) and rank == 0:
                    self._results.append(message)
                elif isinstance(message, Done):
                    self._scheduler.handle(message)
                    heard = True
                else:
                    raise ProtocolError(f"worker {rank} sent a {type(message).__name__}, which is not its to send now")
        return heard

    def hear(self, message: Message) -> None:
        """Take one message of the server."""
        if isinstance(message, Control) and message.op == "stats":  # the newest counters, sent ahead of the reply
            self.send_stats()
            self._edges.detokenizer.send(Reply(message.seq, result={}))
        elif isinstance(message, Submit | Abort | Control):
            self._scheduler.handle(message)
        else:
            log.warning("dropped a %s from the server, which is not its to send", type(message).__name__)

    def _tick(self) -> None:
        for control in self._scheduler.controls.take_worker_controls():
            self._edges.send_workers(control)
        if time.monotonic() >= self._stats_due:
            self.send_stats()
        elif self._scheduler.controls.shutdowns and not self._drain_told:
            self._drain_told = True
            self.send_stats()
        if self._events is not None:
            self._events.publish(self._scheduler.pool.take_events())
            self._events.turn()

    def send_stats(self) -> None:
        now = time.monotonic()
        stats = self._scheduler.snapshot()
        stats.ready, stats.caps = True, self._caps
        stats.age_s = now - min(self._sent_at.values()) if self._sent_at else 0.0
        self._edges.detokenizer.send(stats)
        self._stats_due = now + self._interval_s

    def finish(self) -> None:
        """The loop has ended: last words to the detokenizer, then everybody's shutdown."""
        self.publish(self._scheduler.take())
        if self._events is not None:
            self._events.publish(self._scheduler.pool.take_events())
        if self._scheduler.controls.shutdowns:
            self.send_stats()
            self._edges.shut_down(self._scheduler.controls.shutdowns)
