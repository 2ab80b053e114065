"""Faults to plant in the scheduler: each is a mistake that a change could plausibly make, and the simulator must notice every one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np

from gristmill.errors import ProtocolError
from gristmill.memory.radix_cache import Lease, RadixCache
from gristmill.memory.req_table import ReqTable
from gristmill.memory.slots import SlotError
from gristmill.scheduler.admission import Admission
from gristmill.scheduler.prefill import Prefill
from gristmill.scheduler.request import Request, State
from gristmill.scheduler.running import Running
from gristmill.scheduler.scheduler import Scheduler
from gristmill.scheduler.windows import Windows
from tests.runtime.scheduler.fake_worker import FakeWorker

Fault = tuple[type, str, Callable[[Any], Callable[..., Any]]]  # class, method, what replaces it (given the original)


def _release_in_flight(settle: Any) -> Any:
    def faulty(self: Running) -> bool:
        inflight, self.table.inflight = self.table.inflight, np.zeros_like(self.table.inflight)
        try:
            return settle(self)
        finally:
            self.table.inflight = inflight

    return faulty


def _remap_to_tree(adopt: Any) -> Any:
    """Reads the tree's copy from now on and frees the own one, as if the table could change under a live request."""

    def faulty(self: Running, request: Request, n_tokens: int) -> None:
        adopt(self, request, n_tokens)
        if request.lease.tree is not None and request.lease.n_tokens and request.state is State.RUNNING:
            n, slot = request.lease.n_tokens, request.req_slot
            _, slots = request.lease.tree.match(self.table.ids[slot, :n], request.extra_key)
            mine = request.is_private(n)
            if len(slots) == n and mine.any():
                self.pool.give(self.table.slots[slot, :n][mine])
                self.table.slots[slot, :n] = slots
                request.tree_spans = [(0, n)]

    return faulty


def _adopt_unapplied(advance: Any) -> Any:
    def faulty(self: Scheduler, request: Request, n: int) -> Any:
        row = advance(self, request, n)
        self.running.adopt(request, row[2])
        return row

    return faulty


def _adopt_duplicates(extend: Any) -> Any:
    """Believes that the tree took everything that was offered: duplicates leak."""
    return lambda self, lease, ids, slots, *args: (extend(self, lease, ids, slots, *args)[0], lease.n_tokens)


def _share_everything(is_private: Any) -> Any:
    return lambda self, n_slots: np.ones(n_slots, dtype=bool)


def _count_zombies(end: Any) -> Any:
    def faulty(self: Running, request: Request) -> None:
        slot, live = request.req_slot, bool(self.table.live[request.req_slot])
        end(self, request)
        self.table.live[slot] = live

    return faulty


def _drop_parked_results(park: Any) -> Any:
    def faulty(self: Running, request: Request) -> None:
        park(self, request)
        self.table.live[request.req_slot] = False

    return faulty


def _one_token_too_many(start: Any) -> Any:
    return lambda self, request, match, limit, writes: start(self, request, match, limit + 1, writes)


def _forget_the_lock(acquire: Any) -> Any:
    def faulty(self: RadixCache, ids: np.ndarray, extra_key: str) -> Any:
        match = acquire(self, ids, extra_key)
        self.release(match.lease)
        return match._replace(lease=match.lease._replace(node=0))

    return faulty


def _flush_in_use(flush: Any) -> Any:
    """Frees prefixes that live requests still read."""

    def faulty(self: RadixCache) -> int:
        freed = flush(self)
        for tree in self._retired:
            self.give(tree.all_slots())  # type: ignore[attr-defined]
        self._retired.clear()
        return freed

    return faulty


def _apply_by_slot(apply: Any) -> Any:
    """Takes the results in the order of request slots instead of rows."""

    def faulty(self: Scheduler, step: Any, result: Any) -> Any:
        result.ids = result.ids[np.argsort(np.argsort(step.req_slot))]
        return apply(self, step, result)

    return faulty


def _mask_without_newest(mask: Any) -> Any:
    def faulty(self: Scheduler, step: Any) -> Any:
        self.table.n_ids[step.req_slot] -= 1
        try:
            return mask(self, step)
        finally:
            self.table.n_ids[step.req_slot] += 1

    return faulty


def _cache_what_is_scored(start: Any) -> Any:
    def faulty(self: Prefill, request: Request, *args: Any) -> Any:
        score_from, request.score_from = request.score_from, -1
        try:
            return start(self, request, *args)
        finally:
            request.score_from = score_from

    return faulty


def _give_up_too_early(make_room: Any) -> Any:
    return lambda self, rows, n_in_flight: make_room(self, rows, 0)


def _forget_output_on_retraction(release: Any) -> Any:
    def faulty(self: Running, request: Request) -> None:
        release(self, request)
        request.ids = request.ids[: max(request.n_prompt, len(request.ids) - 1)]

    return faulty


def _keep_req_slot_busy(give: Any) -> Any:
    def faulty(self: ReqTable, slot: int) -> None:
        give(self, slot)
        if slot == 1:
            self._free.pop()

    return faulty


def _always_fits(missing: Any) -> Any:
    return lambda self, *args: 0


def _heed_eos_too_late(start: Any) -> Any:
    def faulty(self: Running, request: Request, *args: Any) -> None:
        start(self, request, *args)
        self.table.eos_from[request.req_slot] += 1

    return faulty


def _keep_counts(admit: Any) -> Any:
    """A new request in a request slot is penalized for what the one before it generated."""

    def faulty(self: FakeWorker, new: Any) -> Any:
        before = self.sequences[new.req_slot].counts
        sequence = admit(self, new)
        for token, n in enumerate(before.generated):
            sequence.counts.generated[token] += n
        return sequence

    return faulty


def _output_is_prompt(announce: Any) -> Any:
    def faulty(self: Prefill, request: Request, n_cached: int, new: list[Any]) -> None:
        announce(self, request, n_cached, new)
        new[-1].n_prompt = len(request.ids)

    return faulty


def _forget_output_on_preemption(release: Any) -> Any:
    def faulty(self: Running, request: Request) -> None:
        release(self, request)
        if request.preempted:
            request.ids = request.ids[: max(request.n_prompt, len(request.ids) - 1)]

    return faulty


def _wait_for_ever(waits: Any) -> Any:
    """Who waited for a prefix once goes on waiting when nobody computes it any more."""
    waiting: set[int] = set()

    def faulty(self: Prefill, request: Request, *args: Any) -> bool:
        if waits(self, request, *args):
            waiting.add(id(request))
        return id(request) in waiting

    return faulty


def _forget_the_lock_of_what_was_extended(move: Any) -> Any:
    def faulty(self: RadixCache, lease: Lease, tree: Any, node: int, n_tokens: int) -> Lease:
        tree.unlock(lease.node)
        return Lease(tree, 0, n_tokens)

    return faulty


def _trim_what_is_planned(due: Any) -> Any:
    """Lets window slots go by what is planned instead of by what was applied: steps in flight still read them."""

    def faulty(self: Windows, rows: np.ndarray, kv_len: np.ndarray) -> Any:
        return due(self, rows, self._table.kv[rows])

    return faulty


def _keep_adopted_window_slots(extend: Any) -> Any:
    def faulty(self: RadixCache, *args: Any) -> Any:
        lease, n_present, taken = extend(self, *args)
        return lease, n_present, taken[:-1]

    return faulty


def _starve_decoding(plan: Any) -> Any:
    def faulty(self: Scheduler) -> Any:
        self._prefill_streak = 0
        return plan(self)

    return faulty


def _start_new_prompts_first(go_on: Any) -> Any:
    def faulty(self: Prefill, begun: Any, budget: int, rows: Any, writes: Any) -> int:
        return budget if self._stats.sent_step % 4 else go_on(self, begun, budget, rows, writes)

    return faulty


def _leave_a_row_out(plan_decode: Any) -> Any:
    def faulty(self: Scheduler, writes: Any) -> np.ndarray:
        rows = plan_decode(self, writes)
        return rows[1:] if len(rows) > 1 and self.stats.sent_step % 3 == 0 else rows

    return faulty


def _tell_of_no_flush(flush: Any) -> Any:
    def faulty(self: RadixCache) -> int:
        freed = flush(self)
        self._cleared = False
        return freed

    return faulty


def _lose_an_event(take_events: Any) -> Any:
    """Tells of the flush alone, and not of what the new tree took in before it was asked."""

    def faulty(self: RadixCache) -> Any:
        events = take_events(self)
        return events[:1] if events and events[0][0] == "cleared" else events

    return faulty


def _mask_all_alike(mask: Any) -> Any:
    """Makes the bits of each masked row from those of the first."""

    def faulty(self: Scheduler, step: Any) -> Any:
        result = mask(self, step)
        n = len(result.rows)
        if n > 1:
            result.bits = np.tile(result.bits[: result.bits.size // n], n)
        return result

    return faulty


FAULTS: dict[str, Fault] = {
    "slots are released while steps in flight name them": (Running, "settle", _release_in_flight),
    "a live table entry is remapped to the tree's copy": (Running, "adopt", _remap_to_tree),
    "positions are adopted before their step is applied": (Scheduler, "_advance_prefill", _adopt_unapplied),
    "duplicates are taken for adopted": (RadixCache, "extend", _adopt_duplicates),
    "what the tree adopted is freed with the request": (Request, "is_private", _share_everything),
    "results of zombie rows count": (Running, "end", _count_zombies),
    "the last result of a parked request is dropped": (Running, "park", _drop_parked_results),
    "a row is planned past max_tokens": (Running, "start", _one_token_too_many),
    "a cached prefix is not locked": (RadixCache, "acquire", _forget_the_lock),
    "a flush frees what is in use": (RadixCache, "flush", _flush_in_use),
    "results are matched by request slot": (Scheduler, "apply", _apply_by_slot),
    "a mask is made without the newest token": (Scheduler, "mask", _mask_without_newest),
    "positions that score the prompt are taken from the cache": (Prefill, "_start", _cache_what_is_scored),
    "the sole request fails although its step is in flight": (Running, "make_room", _give_up_too_early),
    "a retracted request loses its newest token": (Running, "_release", _forget_output_on_retraction),
    "a request slot is lost": (ReqTable, "give", _keep_req_slot_busy),
    "requests start without room": (Admission, "missing", _always_fits),
    "the first EOS that may end a request is ignored": (Running, "start", _heed_eos_too_late),
    "penalty counts are not reset": (FakeWorker, "admit", _keep_counts),
    "a resumed request takes its output for prompt": (Prefill, "_announce", _output_is_prompt),
    "a preempted request loses its newest token": (Running, "_release", _forget_output_on_preemption),
    "a request that waits for a prefix is never tried again": (Prefill, "_waits_for_prefix", _wait_for_ever),
    "a leaf that a request extended is not locked": (RadixCache, "_move", _forget_the_lock_of_what_was_extended),
    "window slots are freed below what is planned": (Windows, "due", _trim_what_is_planned),
    "a window slot that the tree adopted stays the request's": (RadixCache, "extend_window", _keep_adopted_window_slots),
    "prompts starve those who decode": (Scheduler, "_plan", _starve_decoding),
    "begun prompts are left out": (Prefill, "_continue", _start_new_prompts_first),
    "a row with slots sits out": (Scheduler, "_plan_decode", _leave_a_row_out),
    "a flush is no KV event": (RadixCache, "flush", _tell_of_no_flush),
    "KV events after a flush are lost": (RadixCache, "take_events", _lose_an_event),
    "all rows of a step get the mask of the first": (Scheduler, "mask", _mask_all_alike),
}


NOTICED = (AssertionError, SlotError, ProtocolError, ValueError, KeyError, IndexError)  # not what a fault raises that was badly planted


@contextmanager
def planted(name: str) -> Iterator[None]:
    """The scheduler with one fault."""
    owner, method, make = FAULTS[name]
    with patch.object(owner, method, make(getattr(owner, method))):
        yield
