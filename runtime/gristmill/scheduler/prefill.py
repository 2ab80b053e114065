"""Which prompt tokens a step computes: chunks of prompts that were begun, and what is admitted from the queue, by force if need be."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gristmill.memory.radix_cache import Match, RadixCache
from gristmill.memory.req_table import ReqTable
from gristmill.messages import NewReq, Stats
from gristmill.scheduler.admission import REMAINING_CLIP_TOKENS, Admission
from gristmill.scheduler.masks import MaskProvider
from gristmill.scheduler.outbox import Outbox
from gristmill.scheduler.queue import WaitingQueue
from gristmill.scheduler.request import Request, State
from gristmill.scheduler.running import Running
from gristmill.scheduler.sharing import Prefix, waits_for
from gristmill.scheduler.step_writes import StepWrites

ADMISSION_RETRY_STEPS = 16  # a blocked queue is tried again when something was released, or after this many steps
MAX_DEFERRED = 64  # requests that one plan may leave waiting for a shared prefix before it looks no further

Chunks = list[tuple[Request, int]]  # (request, tokens)


class Prefill:
    """Plans the prompt part of a step.

    Args:
        running: Requests that hold slots; those begun are continued, new ones are started there.
        queue: Waiting requests.
        admission: Budgets and estimates.
        masks: Says which requests have a grammar; None: none.
        outbox: Is told how much of a prompt was cached.
        stats: Counters to keep.
        eos_ids, max_context, preempt_threshold: See SchedulerConfig.
        fail_for_room: Closes a request that cannot run even alone.
    """

    def __init__(
        self,
        running: Running,
        queue: WaitingQueue,
        admission: Admission,
        masks: MaskProvider | None,
        outbox: Outbox,
        stats: Stats,
        *,
        eos_ids: tuple[int, ...],
        max_context: int,
        preempt_threshold: int,
        fail_for_room: Callable[[Request], None],
    ) -> None:
        self._running, self._queue, self._admission = running, queue, admission
        self._masks, self._outbox, self._stats = masks, outbox, stats
        self._eos_ids, self._max_context, self._preempt_threshold = eos_ids, max_context, preempt_threshold
        self._fail_for_room = fail_for_room
        self._table: ReqTable = running.table
        self._pool: RadixCache = running.pool
        self._computing: list[Request] = []  # started requests whose known tokens are not all in the tree yet
        self.due = True  # whether something changed since the queue was found blocked

    def plan(self, writes: StepWrites, new: list[NewReq]) -> Chunks:
        """The prompt chunks of this step: by priority, and within one the prompts that were begun before new ones."""
        begun = sorted(self._running.prefilling, key=lambda request: -request.priority)
        budget = self._admission.prefill_budget()
        rows: Chunks = []
        if begun and self._queue and self._queue.top_priority() > begun[-1].priority:
            top = self._queue.top_priority()
            urgent = [request for request in begun if request.priority >= top]
            budget = self._continue(urgent, budget, rows, writes)
            begun = begun[len(urgent) :]
            budget = self._admit(budget, rows, writes, new, above=begun[0].priority)
        budget = self._continue(begun, budget, rows, writes)
        self._admit(budget, rows, writes, new)
        return rows

    def _continue(self, begun: list[Request], budget: int, rows: Chunks, writes: StepWrites) -> int:
        """Chunks of `begun` prompts within `budget`; returns what is left of it."""
        for request in begun:
            if request.state is not State.RUNNING:  # preempted by this very plan
                continue
            n = self._admission.chunk(request.n_known - int(self._table.kv[request.req_slot]), budget, not rows)
            if not n:
                break
            if n := self._running.chunk(request, n):  # 0: it has to wait until window slots of steps in flight come back
                self._running.cover_chunk(request, n, writes)
                rows.append((request, n))
                budget -= n
        return budget

    def _admit(self, budget: int, rows: Chunks, writes: StepWrites, new: list[NewReq], above: int | None = None) -> int:
        """Start waiting requests (`above`: only those of a higher priority) within `budget`; returns what is left of it."""
        table = self._table
        if not self._queue or budget <= 0 or any(request.state is State.PARKED for request in self._running.leaving):
            return budget
        if not self.due and self._stats.sent_step % ADMISSION_RETRY_STEPS:
            return budget
        if not table.n_free and not self._may_preempt(self._queue.top_priority()):
            self.due = False
            return budget
        remaining = np.minimum(table.limit - table.length, REMAINING_CLIP_TOKENS)
        running_remaining = int(remaining[table.live].sum())
        self.due = above is not None
        self._computing = self._still_computing()
        n_deferred = 0
        for request in self._queue.ordered(self._stats.sent_step):
            if budget <= 0 or n_deferred == MAX_DEFERRED:
                self.due = True
                break
            if above is not None and request.priority <= above:
                break
            own = min(request.n_prompt + request.sampling.max_tokens - len(request.ids), REMAINING_CLIP_TOKENS)
            n = self._start(request, budget, not rows, own, running_remaining, writes, new)
            if n is None:
                break
            if n:
                rows.append((request, n))
                budget -= n
                running_remaining += own
            else:
                n_deferred += 1
        else:
            self.due |= bool(self._queue)  # the policy may know more of them
        return budget

    def _start(
        self, request: Request, budget: int, first: bool, own: int, running_remaining: int, writes: StepWrites, new: list[NewReq]
    ) -> int | None:
        """Admit `request` and return its tokens in this step. 0: it waits for a shared prefix, or had to be closed; the next one
        may be tried. None: it does not fit now, and nobody passes it."""
        table, pool = self._table, self._pool
        if not table.n_free:
            self.due |= self._preempt(request, 0, 0)
            return None
        # the last known token is always computed, and so is every position that scores a prompt token
        cacheable = len(request.ids) - 1
        if request.score_from >= 1:
            cacheable = min(cacheable, request.score_from - 1)
        match = pool.acquire(request.ids[:cacheable], request.extra_key)
        n_cached = match.lease.n_tokens
        if self._waits_for_prefix(request, cacheable, n_cached):
            pool.give_up(match)
            self._stats.prefix_waits += 1
            self.due = True
            return 0
        alone = table.n_free == table.max_reqs
        n = self._admission.chunk(len(request.ids) - n_cached, budget, first)
        missing = self._admission.missing(pool.pages(len(request.ids)) - n_cached, own, pool.available, running_remaining, alone)
        limit = min(request.n_prompt + request.sampling.max_tokens, self._max_context)
        windows = self._running.windows
        missing_window = windows.reservations.missing(limit) if windows is not None else 0
        if not n or missing > 0 or missing_window > 0:
            pool.give_up(match)
            if n and alone:
                self._fail_for_room(request)
                return 0
            # without budget it is tried in the next step, without room when some was made
            self.due = not n or self._preempt(request, missing, missing_window)
            return None
        return self._begin(request, match, limit, n, writes, new)

    def _begin(self, request: Request, match: Match, limit: int, n: int, writes: StepWrites, new: list[NewReq]) -> int:
        """Start `request` with the first `n` tokens after the cached prefix `match`, or as many as there may be window slots for."""
        self._running.start(request, match, limit, writes)
        n = self._running.chunk(request, n)
        self._running.cover_chunk(request, n, writes)
        self._queue.remove(request, admitted=True)
        if self._pool.enabled:
            self._computing.append(request)
        self._announce(request, match.lease.n_tokens, new)
        return n

    def _announce(self, request: Request, n_cached: int, new: list[NewReq]) -> None:
        """Tell the worker and the detokenizer about a request that was started."""
        self._table.masked[request.req_slot] = self._masks is not None and self._masks.wants(request.rid)
        if request.cached_tokens < 0:
            request.cached_tokens = n_cached
            self._stats.cached_tokens += n_cached
            self._outbox.cached(request.idx, n_cached)
        new.append(
            NewReq(
                request.req_slot,
                request.n_prompt,
                request.ids,
                request.sampling,
                eos_ids=tuple(sorted({*self._eos_ids, *request.stop_ids})) if request.sampling.min_tokens else (),
                logprobs=request.logprobs,
                prompt_logprobs_from=request.score_from,
            )
        )

    # --- sharing

    def _waits_for_prefix(self, request: Request, cacheable: int, n_cached: int) -> bool:
        """Whether another request is computing what `request` would compute next.

        Of one with a lower priority only what is planned counts: its next chunk may never come while higher ones keep coming.
        """
        prefixes = []
        for other in self._computing:
            n = other.n_known if other.priority >= request.priority else int(self._table.kv[other.req_slot])
            prefixes.append(Prefix(self._table.ids[other.req_slot, :n], other.extra_key))
        return waits_for(request.ids[: cacheable + 1], request.extra_key, n_cached, prefixes, self._pool.page_size)

    def _still_computing(self) -> list[Request]:
        """Started requests whose known tokens are not all in the tree yet, and will be."""
        pool = self._pool
        return [
            other
            for other in self._computing
            if other.state is State.RUNNING
            and other.lease.tree is pool.tree
            and other.lease.n_tokens + pool.page_size <= other.n_known  # until its last whole page was adopted
        ]

    # --- preemption

    def _may_preempt(self, priority: int) -> bool:
        """Whether a request of `priority` may put any running one back."""
        if not self._preempt_threshold or not self._running.requests:
            return False
        return min(request.priority for request in self._running.requests.values()) + self._preempt_threshold <= priority

    def _preempt(self, request: Request, missing: int, missing_window: int) -> bool:
        """Park requests of much lower priority until so many tokens of either pool and a request slot will be free for `request`.

        None is parked when all of them would not do. The rows that this step has for them still count: they leave the pool
        once nothing of them is in flight, and nobody is admitted before that.
        """
        if not self._may_preempt(request.priority):
            return False
        table, windows, chosen = self._table, self._running.windows, []
        victims = [other for other in self._running.requests.values() if other.priority + self._preempt_threshold <= request.priority]
        for victim in sorted(victims, key=self._running.victim_key):
            chosen.append(victim)
            slot = victim.req_slot
            remaining = min(int(table.limit[slot] - table.length[slot]), REMAINING_CLIP_TOKENS)
            missing -= int(table.n_slots[slot]) + self._admission.expected(remaining)
            missing_window -= int(windows.reserved[slot]) if windows is not None else 0
            if missing <= 0 and missing_window <= 0:
                for victim in chosen:
                    victim.preempted = True
                    self._running.park(victim)
                return True
        return False
