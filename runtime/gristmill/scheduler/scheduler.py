"""The scheduler as a pure machine: messages and results in, steps and outputs out. No I/O, no clock; the loops are in loops.py."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gristmill.errors import ProtocolError
from gristmill.memory.radix_cache import RadixCache, TreeFactory, native_tree
from gristmill.memory.req_table import ReqTable
from gristmill.memory.window import Reservations, WindowSpec
from gristmill.messages import (
    EMIT_NONE,
    EMIT_SAMPLE,
    INVALID_TOKEN,
    Abort,
    Close,
    Control,
    Done,
    Mask,
    Message,
    NewReq,
    Open,
    Out,
    Result,
    Stats,
    Step,
    Submit,
    ints,
)
from gristmill.scheduler.admission import INITIAL_RATIO, Admission, Limits, Refusal, refuse
from gristmill.scheduler.control import Controls
from gristmill.scheduler.masks import MaskProvider
from gristmill.scheduler.outbox import Outbox
from gristmill.scheduler.policy import POLICIES
from gristmill.scheduler.prefill import Prefill
from gristmill.scheduler.queue import WaitingQueue
from gristmill.scheduler.request import Request, State
from gristmill.scheduler.running import LOOKAHEAD_TOKENS, Running
from gristmill.scheduler.step_writes import StepWrites
from gristmill.scheduler.windows import Windows

MAX_PREFILL_STREAK = 8  # without mixed chunks: steps of prompts only, after which waiting decode rows get one


@dataclass(frozen=True)
class SchedulerConfig:
    """What a scheduler works with; sizes in tokens."""

    pool_tokens: int
    max_reqs: int
    max_context: int
    page_size: int = 1
    eos_ids: tuple[int, ...] = ()
    max_queued: int = 1024
    chunk_tokens: int = 512
    mixed_chunks: bool = True
    radix_cache: bool = True
    max_prefill_tokens: int = 16384
    policy: str = "fcfs"
    preempt_threshold: int = 10
    eviction_policy: str = "lru"
    window: WindowSpec | None = None  # the pool of sliding-window layers
    kv_events: bool = False  # record what enters and leaves the prefix cache
    n_ranks: int = 1
    vocab_size: int = 0  # 0: ids are not checked against it
    lookahead_tokens: int = LOOKAHEAD_TOKENS
    new_token_ratio: float = INITIAL_RATIO  # share of their remaining tokens that running requests are first expected to need
    check: bool = False  # verify the accounting after every plan and apply


class _Sent(NamedTuple):
    """A step in flight: rows [0, n_decode) are decode rows, the rest are `prefill` with the end of each one's chunk."""

    step: Step
    n_decode: int
    prefill: list[tuple[Request, int]]


class Scheduler:
    """Plans steps and applies their results.

    Use: `handle` each message of the server; `plan` a step and send it; `apply` its result. Any number of steps may be in flight; results
    come in the order of the steps. `take` returns what came up for the detokenizer outside of `apply`.
    """

    def __init__(self, config: SchedulerConfig, masks: MaskProvider | None = None, tree_factory: TreeFactory = native_tree) -> None:
        self.config = config
        self.pool = RadixCache(
            config.pool_tokens,
            config.page_size,
            tree_factory if config.radix_cache else None,
            eviction=config.eviction_policy,
            window=config.window,
            events=config.kv_events,
        )
        # a request never has more KV than the pool, nor more ids than that and the one that was sampled last
        self.table = ReqTable(config.max_reqs, min(config.max_context, self.pool.total + 1), config.page_size)
        windows = None
        if config.window is not None:
            chunk_tokens = config.chunk_tokens or config.max_prefill_tokens
            lookahead = self.pool.pages(config.lookahead_tokens)
            windows = Windows(self.table, self.pool, Reservations(config.window, config.page_size, lookahead, chunk_tokens))
        self.running = Running(self.table, self.pool, config.lookahead_tokens, windows)
        self.admission = Admission(config.chunk_tokens, config.max_prefill_tokens, initial_ratio=config.new_token_ratio)
        self.outbox = Outbox()
        self.controls = Controls(config.n_ranks, self._flush, self.outbox.reply)
        self.stats = Stats(max_reqs=config.max_reqs, max_context=min(config.max_context, self.pool.total), pool_total=self.pool.total)
        self._limits = Limits(config.max_context, self.pool.total, config.page_size, config.max_queued, config.vocab_size)
        self._masks = masks
        self._open: dict[str, Request] = {}  # by rid, until closed
        self._waiting = WaitingQueue(POLICIES[config.policy], self.pool, self.admission.prefill_budget())
        self._prefill = Prefill(
            self.running,
            self._waiting,
            self.admission,
            masks,
            self.outbox,
            self.stats,
            eos_ids=config.eos_ids,
            max_context=config.max_context,
            preempt_threshold=config.preempt_threshold,
            fail_for_room=self._fail_for_room,
        )
        self._sent: deque[_Sent] = deque()
        self._n_submitted = 0
        self._queue_refusal: Refusal | None = None  # of the request whose choices arrive: all are queued or none
        self._prefill_streak = 0
        self._eos = np.zeros(max(config.eos_ids, default=0) + 2, dtype=bool)  # by id; the last entry stands for all others
        self._eos[list(config.eos_ids)] = True

    # --- what the server says

    def handle(self, message: Message) -> None:
        """Take a Submit, Abort or Control of the server, or a Done of a worker."""
        if isinstance(message, Submit):
            self._submit(message)
        elif isinstance(message, Abort):
            request = self._open.get(message.rid)
            if request is not None:
                stopped = message.reason == "stop"
                self.stats.aborts += not stopped
                self._close(request, "stop" if stopped else "abort")
        elif isinstance(message, Control):
            self.controls.add(message)
            if self.controls.shutdowns and not self.controls.draining:
                for request in list(self._open.values()):
                    self._close(request, "error", Refusal(503, "shutting_down", "the server is shutting down"))
        elif isinstance(message, Done):
            self.controls.done(message)
        else:
            raise ProtocolError(f"the scheduler got a {type(message).__name__}, which nobody sends it")

    def _submit(self, submit: Submit) -> None:
        refusal = self._refuse(submit)
        idx = self.outbox.new_idx()
        self.outbox.open(Open(idx, submit.rid, submit.detok))
        if refusal is not None:
            self.outbox.close(Close(idx, "error", len(submit.ids), 0, refusal.error, refusal.status, refusal.code))
            return
        request = Request(
            submit.rid,
            idx,
            self._n_submitted,
            np.array(submit.ids, dtype=np.int32),  # a copy: the message's arrays are views of its frames
            submit.sampling,
            priority=submit.priority,
            extra_key=submit.extra_key,
            logprobs=submit.logprobs,
            score_from=submit.prompt_logprobs_from,
        )
        self._n_submitted += 1
        self.stats.prompt_tokens += request.n_prompt
        self._open[submit.rid] = request
        self._waiting.add(request, self.stats.sent_step)
        self._prefill.due = True

    def _refuse(self, submit: Submit) -> Refusal | None:
        """The server validated all of this already; whatever reaches us must still not be able to end the engine."""
        if self.controls.shutdowns:
            return Refusal(503, "shutting_down", "the server is shutting down")
        if submit.rid in self._open:
            return Refusal(400, "duplicate_request", f"a request with id {submit.rid!r} is open already")
        if not submit.queue_places and self._queue_refusal is not None:
            return self._queue_refusal
        refusal = refuse(submit, len(self._waiting), self._limits)
        if submit.queue_places:
            self._queue_refusal = refusal if refusal is not None and refusal.code == "queue_full" else None
        return refusal

    def take(self) -> list[Message]:
        """Messages for the detokenizer that came up since the last call: refusals, closes outside of results, replies."""
        return self.outbox.take()

    # --- planning

    @property
    def n_in_flight(self) -> int:
        """Steps sent and not applied."""
        return len(self._sent)

    @property
    def finished(self) -> bool:
        """A shutdown was asked for and nothing that it waits for is left."""
        return bool(self.controls.shutdowns) and not (self.controls.draining and (self._open or self._sent))

    def plan(self) -> Step | None:
        """The next step, or None when there is nothing to compute now. The caller sends it to every rank."""
        self._settle()
        step = None
        if not self.controls.hold(len(self._sent)):
            step = self._plan()
            while step is None and self._settle():  # room was made, and nothing in flight will bring us back here
                step = self._plan()
        if self.config.check:
            self.check()
        return step

    def _plan(self) -> Step | None:
        writes = StepWrites()
        new: list[NewReq] = []
        if self.config.mixed_chunks:
            decode = self._plan_decode(writes)
            prefill = self._prefill.plan(writes, new)
        elif self._prefill_streak < MAX_PREFILL_STREAK and (prefill := self._prefill.plan(writes, new)):
            decode = ints()
            self._prefill_streak += 1
        else:
            decode, prefill = self._plan_decode(writes), []
            if not decode.size:
                prefill = self._prefill.plan(writes, new)
            self._prefill_streak = 0
        if not decode.size and not prefill:
            return None
        return self._send(decode, prefill, writes, new)

    def _send(self, decode: np.ndarray, prefill: list[tuple[Request, int]], writes: StepWrites, new: list[NewReq]) -> Step:
        """Make the step of these rows and count it as in flight."""
        table = self.table
        table.kv[decode] += 1
        table.length[decode] += 1
        req_slot = decode.astype(np.int32)
        q_len, kv_len = np.ones(decode.size, dtype=np.int32), table.kv[decode]
        emit = np.full(decode.size, EMIT_SAMPLE, dtype=np.int32)
        chunks: list[tuple[Request, int]] = []
        if prefill:
            rows = []
            for request, n in prefill:
                rows.append(self._advance_prefill(request, n))
                chunks.append((request, rows[-1][2]))
            columns = np.array(rows, dtype=np.int32).T
            req_slot, q_len, kv_len, emit = (np.concatenate(pair) for pair in zip((req_slot, q_len, kv_len, emit), columns))
        table.inflight[req_slot] += 1
        needs_mask = self._masks is not None and bool((table.masked[req_slot] & (emit == EMIT_SAMPLE)).any())
        self.stats.sent_step += 1
        step = Step(
            self.stats.sent_step,
            req_slot,
            q_len,
            kv_len,
            emit,
            new=new,
            writes=writes.writes,
            write_slots=writes.slots(),
            needs_mask=needs_mask,
        )
        self._sent.append(_Sent(step, decode.size, chunks))
        self.admission.on_step()
        return step

    def _advance_prefill(self, request: Request, n: int) -> tuple[int, int, int, int]:
        """The row (req_slot, q_len, kv_len, emit) of the next `n` known tokens of `request`."""
        table, slot = self.table, request.req_slot
        end = int(table.kv[slot]) + n
        table.kv[slot] = end
        if end < request.n_known:
            self.stats.chunks += 1
            return slot, n, end, EMIT_NONE
        self.running.prefilling.remove(request)
        if request.sampling.max_tokens == 0:
            return slot, n, end, EMIT_NONE
        table.length[slot] += 1
        table.decoding[slot] = True
        return slot, n, end, EMIT_SAMPLE

    def _plan_decode(self, writes: StepWrites) -> np.ndarray:
        """Request slots that compute their newest token in this step; rows for which there is no slot sit out."""
        table = self.table
        rows = np.flatnonzero(table.decoding & (table.length < table.limit))
        growing = rows[table.kv[rows] >= table.n_slots[rows]]
        if growing.size * self.config.page_size > self.pool.available:
            rows, growing, stuck = self.running.make_room(rows, len(self._sent))
            if stuck is not None:
                self._fail_for_room(stuck)
            self._settle()
        if growing.size:
            self.running.grow(growing, writes)
        self.running.cover_rows(rows, writes)
        return rows

    def _settle(self) -> bool:
        """Release what ended, put what was retracted back into the queue; returns whether there was any."""
        if not self.running.settle() and not self.running.retracted:
            return False
        self._prefill.due = True
        for request in self.running.retracted:
            self._waiting.add(request, self.stats.sent_step)
            if request.preempted:
                self.stats.preemptions += 1
                request.preempted = False
            else:
                self.stats.retractions += 1
                self.admission.on_retraction()
        self.running.retracted = []
        if self.table.n_free == self.table.max_reqs:
            self.admission.on_idle()
        return True

    def _at(self, slot: int) -> Request:
        request = self.running.by_slot[slot]
        assert request is not None
        return request

    def _fail_for_room(self, request: Request) -> None:
        held = int(self.table.kv[request.req_slot]) if request.req_slot >= 0 else len(request.ids)
        text = (
            f"the KV pool holds {self.pool.total} tokens and this request alone needs more: {request.n_prompt} prompt tokens and "
            f"{held + 1 - request.n_prompt} generated; lower max_tokens or start with a larger --pool-tokens"
        )
        self._close(request, "error", Refusal(400, "pool_exceeded", text))

    # --- masks

    def mask(self, step: Step) -> Mask:
        """The bitmasks of a step that needs them; all steps before it must have been applied."""
        rows, bits = [], []
        assert self._masks is not None and self._sent[0].step is step, "a mask must use the results of all earlier steps"
        for row in np.flatnonzero(self.table.masked[step.req_slot] & self.table.live[step.req_slot] & (step.emit == EMIT_SAMPLE)).tolist():
            slot = int(step.req_slot[row])
            rows.append(row)
            bits.append(self._masks.bits(self._at(slot).rid, self.table.ids[slot, : self.table.n_ids[slot]]))
        return Mask(step.step, ints(rows), ints(np.concatenate(bits)) if bits else ints())

    # --- results

    def apply(self, step: Step, result: Result) -> Out | None:
        """Take in the result of the oldest step in flight; returns what it means for the open choices.

        Raises ProtocolError when the result is of another step or does not have one id per row.
        """
        sent = self._sent.popleft()
        if sent.step is not step or result.step != step.step:
            raise ProtocolError(f"the worker sent the result of step {result.step} where that of step {sent.step.step} was due")
        if len(result.ids) != len(step.req_slot):
            raise ProtocolError(f"the result of step {step.step} has {len(result.ids)} ids for {len(step.req_slot)} rows")
        table, rows = self.table, step.req_slot
        table.inflight[rows] -= 1
        self.stats.applied_step = step.step
        live = table.live[rows]
        emits = step.emit == EMIT_SAMPLE
        if result.logprobs:
            self._pass_logprobs(step, result, live)
        counted = live & emits
        n_counted = int(np.count_nonzero(counted))
        self.stats.zombie_rows += int(np.count_nonzero(emits)) - n_counted
        if n_counted == len(rows):
            self._take_tokens(rows, result.ids)
        elif n_counted:
            self._take_tokens(rows[counted], result.ids[counted])
        for request, end in sent.prefill:
            self._chunk_done(request, end)
        self.running.applied(rows, step.kv_len)
        if self.config.check:
            self.check()
        return self.outbox.take_out()

    def _take_tokens(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        """One new token for each request in `slots`; ends those that it ends."""
        table = self.table
        positions = table.n_ids[slots]
        valid = tokens >= 0
        all_valid = bool(valid.all())
        if not all_valid and (tokens[~valid] != INVALID_TOKEN).any():
            raise ProtocolError(f"the worker sent token {int(tokens.min())} for a row that emits")
        table.ids[slots, positions] = tokens
        table.n_ids[slots] = positions + valid
        stops = self._eos[np.minimum(tokens, self._eos.size - 1)] & table.heeds_eos[slots]
        for i in np.flatnonzero(table.has_stop_ids[slots]).tolist():
            stops[i] |= int(tokens[i]) in self._at(int(slots[i])).stop_ids
        stops &= (positions >= table.eos_from[slots]) & valid
        full = positions + 1 >= table.limit[slots]
        if all_valid:
            self.outbox.tokens(table.idx[slots], tokens)
        else:
            self.outbox.tokens(table.idx[slots[valid]], tokens[valid])
        self.stats.output_tokens += int(np.count_nonzero(valid))
        for i in np.flatnonzero(stops | full | ~valid).tolist():
            request = self._at(int(slots[i]))
            if valid[i]:
                self._close(request, "stop" if stops[i] else "length")
            else:
                text = f"the model gave no valid distribution for token {int(positions[i]) - request.n_prompt} of the output"
                self._close(request, "error", Refusal(500, "invalid_distribution", text))

    def _chunk_done(self, request: Request, end: int) -> None:
        """Known tokens [0, end) of `request` are computed: others may share them."""
        if request.state is not State.RUNNING and request.state is not State.PARKED:
            return
        if request.score_from >= 1 and end >= request.score_from:
            request.score_from = end + 1 if end + 1 <= request.n_prompt - 1 else -1
        self.running.adopt(request, end)
        if end == request.n_known:
            self.running.prompt_done(request)
        if end == request.n_known and request.sampling.max_tokens == 0:
            self._close(request, "length")

    def _pass_logprobs(self, step: Step, result: Result, live: np.ndarray) -> None:
        for block in result.logprobs:
            if not 0 <= block.key < len(live):
                raise ProtocolError(f"the result of step {step.step} has logprobs of row {block.key}, and {len(live)} rows")
            if live[block.key] and result.ids[block.key] != INVALID_TOKEN:
                block.key = int(self.table.idx[step.req_slot[block.key]])
                self.outbox.logprobs(block)

    def _close(self, request: Request, reason: str, refusal: Refusal | None = None) -> None:
        """Tell the detokenizer that `request` ends here, and let go of it as soon as nothing of it is in flight."""
        error, status, code = (refusal.error, refusal.status, refusal.code) if refusal else (None, 500, None)
        self.outbox.close(Close(request.idx, reason, request.n_prompt, max(0, request.cached_tokens), error, status, code))
        del self._open[request.rid]
        self._prefill.due = True
        if request.state is State.WAITING:
            self._waiting.remove(request)
            request.move(State.GONE)
        else:
            self.running.end(request)

    # --- accounting

    def _flush(self) -> dict[str, int]:
        freed = self.pool.flush()
        return {"freed_tokens": freed, "running": len(self.running.requests), "waiting": len(self._waiting)}

    def snapshot(self) -> Stats:
        """The counters and gauges of this moment; the caller fills in what depends on the clock."""
        counts, stats = self.pool.counts(), self.stats
        stats.pool_free, stats.pool_evictable, stats.pool_locked = counts.free, counts.evictable, counts.locked
        window = self.pool.window_counts()
        stats.window_total, stats.window_free = window.total, window.free
        stats.window_evictable, stats.window_locked = window.evictable, window.locked
        stats.running = len(self.running.requests) + len(self.running.leaving)
        stats.waiting = len(self._waiting)
        stats.draining = bool(self.controls.shutdowns)
        return stats

    def check(self) -> None:
        """Raise AssertionError when free + evictable + locked = total does not hold, or a count disagrees with what it counts."""
        counts, table = self.pool.counts(), self.table
        held = [request for request in self.running.by_slot if request is not None]
        private = sum(int(table.n_slots[request.req_slot]) - request.n_tree for request in held)
        in_trees = sum(tree.size for tree in self.pool.trees)
        locked = sum(tree.locked for tree in self.pool.trees) + private
        assert counts.free + in_trees + private == counts.total, f"{counts}: {in_trees} in trees and {private} private"
        assert counts.locked == locked, f"{counts}: {locked} are in use"
        assert len(held) == len(self.running.requests) + len(self.running.leaving) == table.max_reqs - table.n_free
        if self.running.windows is not None:
            self.running.windows.check()
        named = sum(len(sent.step.req_slot) for sent in self._sent)
        assert named == int(table.inflight.sum()), f"{named} rows are in flight, {int(table.inflight.sum())} are counted"
