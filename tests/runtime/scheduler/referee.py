"""The rules of the step protocol, checked from the outside: from the messages, and from who owns which slot after every plan and apply.

It keeps its own tables, its own count of what is in flight and its own record of which KV is known to be computed, so that no
bookkeeping of the scheduler vouches for itself. Numbers in messages are the invariants of the protocol.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from gristmill.memory.radix_cache import Tree
from gristmill.messages import EMIT_SAMPLE, Result, Step
from gristmill.scheduler.scheduler import MAX_PREFILL_STREAK, Scheduler, SchedulerConfig
from tests.runtime.scheduler.model import extend_hash


@dataclass
class _Known:
    """What the steps said so far about the request in one request slot."""

    ids: list[int] = field(default_factory=list)
    n_prompt: int = 0
    max_tokens: int = 0
    table: list[int] = field(default_factory=list)
    window_table: list[int] = field(default_factory=list)  # -1 below where the first entry is
    planned: int = -1  # positions planned, -1 before the first row
    emits: int = 0
    left_out: int = 0  # steps in a row that could have had a row of it

    def may_emit(self, max_context: int) -> bool:
        return len(self.ids) + self.emits < min(self.n_prompt + self.max_tokens, max_context)


class _Unapplied(NamedTuple):
    step: int
    req_slots: np.ndarray
    slots: np.ndarray  # every slot that a row reads or writes
    window_slots: np.ndarray
    computed: list[tuple[int, int, int]]  # (req_slot, start, end)


class Referee:
    """Watches one schedule. Invariants 1 to 7, 9 (with the worker) and 12; 8, 10 and 13 are about things this engine does not have yet."""

    def __init__(self, config: SchedulerConfig, depth: int) -> None:
        self.config = config
        self.known = [_Known() for _ in range(config.max_reqs)]
        self.unapplied: deque[_Unapplied] = deque()
        self.last_step = 0
        self.applied = np.zeros(config.pool_tokens, dtype=np.int64)  # KV content by slot, of applied steps only
        self.window = config.window.window if config.window is not None else 0
        self.window_applied = np.zeros(config.window.slots if config.window is not None else 0, dtype=np.int64)
        self.n_window_freed = 0
        self.n_evicted = self.n_duplicates = self.n_retired = 0
        self.decode_bound = 0 if config.mixed_chunks else MAX_PREFILL_STREAK
        # a prompt may have to wait for window slots of steps in flight
        self.prompt_bound = (0 if config.mixed_chunks else 1) + (depth if config.window is not None else 0)
        self.most_decode_waits = self.most_prompt_waits = 0

    # --- messages

    def on_step(self, step: Step, scheduler: Scheduler) -> None:
        """A step goes out to the workers."""
        assert step.step == self.last_step + 1, f"1: step {step.step} follows {self.last_step}"
        self.last_step = step.step
        in_flight = {slot for sent in self.unapplied for slot in sent.req_slots.tolist()}
        rows = step.req_slot.tolist()
        assert len(set(rows)) == len(rows), "a request has two rows in one step"
        for new in step.new:
            assert new.req_slot not in in_flight, f"3: request slot {new.req_slot} was given to another request while in flight"
            assert new.req_slot in rows
            known = self.known[new.req_slot] = _Known(new.ids.tolist(), new.n_prompt, new.sampling.max_tokens)
            assert known.n_prompt + known.max_tokens >= len(known.ids)
        offset = 0
        for write in step.writes:
            known = self.known[write.req_slot]
            table = known.window_table if write.pool else known.table
            if write.pool and not table:
                table += [-1] * write.start
            assert write.start == len(table), f"4: entries from {write.start} of a table of {len(table)} are written"
            table += step.write_slots[offset : offset + write.n].tolist()
            assert len(table) <= self.config.max_context
            offset += write.n
        computed, named, window_named = [], [], []
        for slot, q_len, kv_len, emit in zip(rows, step.q_len.tolist(), step.kv_len.tolist(), step.emit.tolist()):
            known, start = self.known[slot], kv_len - q_len
            assert known.planned in (-1, start), f"rows of request slot {slot} skip from {known.planned} to {start}"
            assert 0 <= start < kv_len <= len(known.table), f"10: row [{start}, {kv_len}) has slots for {len(known.table)}"
            if known.planned < 0 and start:
                self._cached_prefix(known, start)
            known.planned = kv_len
            known.emits += emit == EMIT_SAMPLE
            n_total = len(known.ids) + known.emits
            assert n_total <= known.n_prompt + known.max_tokens, "6: a row is planned past max_tokens"
            assert n_total <= self.config.max_context, "6: a row is planned past the context"
            assert emit == EMIT_SAMPLE or kv_len <= len(known.ids)
            computed.append((slot, start, kv_len))
            named += known.table[:kv_len]
            if self.window:
                read = known.window_table[max(0, start - self.window + 1) : kv_len]
                assert kv_len <= len(known.window_table) and min(read) >= 0, f"row [{start}, {kv_len}) has no window slots somewhere"
                window_named += read
        self.unapplied.append(_Unapplied(step.step, step.req_slot, np.array(named), np.array(window_named, dtype=np.int64), computed))
        self._count_left_out(set(rows), scheduler)

    def _count_left_out(self, rows: set[int], scheduler: Scheduler) -> None:
        """Nobody who could go on is left out for long: a decoding request with a slot by prompts, a begun prompt by decoding requests
        and by prompts of no higher priority."""
        by_slot, known_ids = scheduler.running.by_slot, [len(known.ids) for known in self.known]
        prompts = [slot for slot in rows if self.known[slot].planned - 1 < known_ids[slot]]
        urgent = max((request.priority for slot in prompts if (request := by_slot[slot])), default=0)
        for slot, request in scheduler.running.requests.items():
            known = self.known[slot]
            if slot in rows:
                known.left_out = 0
            elif known.planned < len(known.ids):
                known.left_out = 0 if prompts and urgent > request.priority else known.left_out + 1
                self.most_prompt_waits = max(self.most_prompt_waits, known.left_out)
                assert known.left_out <= self.prompt_bound, f"a begun prompt was left out {known.left_out} times in a row"
            elif known.planned < len(known.table) and known.may_emit(self.config.max_context):
                known.left_out += 1
                self.most_decode_waits = max(self.most_decode_waits, known.left_out)
                assert known.left_out <= self.decode_bound, f"a decoding request was left out {known.left_out} times in a row"

    def _cached_prefix(self, known: _Known, end: int) -> None:
        assert end < len(known.ids), "the last known token must be computed"
        h = 0
        for position, (token, slot) in enumerate(zip(known.ids[:end], known.table[:end])):
            h = extend_hash(h, token)
            assert self.applied[slot] == h, "5: a cached slot does not hold the applied KV of its prefix"
            if self.window and position >= end - self.window:
                assert self.window_applied[known.window_table[position]] == h, "5: a cached window slot does not hold the applied KV"

    def on_result(self, result: Result, worker: Any) -> None:
        """The worker answered; the scheduler applies this next."""
        sent = self.unapplied.popleft()
        assert result.step == sent.step
        for req_slot, start, end in sent.computed:
            sequence = worker.sequences[req_slot]
            self.applied[sequence.table[start:end]] = sequence.hashes[start:end]
            if self.window:
                self.window_applied[sequence.window_table[start:end]] = sequence.hashes[start:end]

    def on_sole_failure(self, scheduler: Scheduler) -> None:
        """A request is failed for want of slots."""
        assert not self.unapplied, "7: a request fails for want of slots while steps are in flight"
        assert len(scheduler.running.requests) <= 1 and not scheduler.running.leaving, (
            "7: a request fails for want of slots but is not alone"
        )

    # --- ownership

    def check(self, scheduler: Scheduler) -> None:
        """Between any two actions: who owns every slot, and that nothing in use is free."""
        pool, table = scheduler.pool, scheduler.table
        free = pool.allocator.free_slots()
        in_trees = [tree.all_slots() for tree in pool.trees]
        self.n_retired = max(self.n_retired, len(in_trees) - 1)
        private, tables = [], []
        for request in scheduler.running.by_slot:
            if request is None:
                continue
            slot = request.req_slot
            row = table.slots[slot, : table.n_slots[slot]]
            private.append(row[request.is_private(len(row))])
            tables.append(row)
            sent = self.known[slot].table
            assert len(sent) == min(len(row), table.width) and row[: len(sent)].tolist() == sent, "4: a live table entry changed"
        everything = np.concatenate([free, *in_trees, *private])
        assert len(everything) == pool.total and (np.bincount(everything) == 1).all(), (
            "12: the slots of free, trees and requests are not all slots, once"
        )
        if self.unapplied:
            is_free = np.zeros(pool.total, dtype=bool)
            is_free[free] = True
            for step in self.unapplied:
                assert not is_free[step.slots].any(), f"3: a slot that step {step.step} names is free"
                for req_slot in step.req_slots.tolist():
                    assert scheduler.running.by_slot[req_slot] is not None, (
                        f"3: step {step.step} names the released request slot {req_slot}"
                    )
        if tables:
            uses = np.bincount(np.concatenate(tables), minlength=pool.total)
            for slots in in_trees:
                uses[slots] = 0
            assert uses.max() <= 1, "a slot is in two live tables and not in the tree"
        for tree in pool.trees:
            tree.check()  # type: ignore[attr-defined]
        if self.window:
            self._check_windows(scheduler)

    def _check_windows(self, scheduler: Scheduler) -> None:
        """The same for the window pool."""
        pool, windows = scheduler.pool, scheduler.running.windows
        assert windows is not None and pool.window_allocator is not None
        free = pool.window_allocator.free_slots()
        in_trees = [tree.all_window_slots() for tree in pool.trees]  # type: ignore[attr-defined]
        private = []
        for request in scheduler.running.by_slot:
            if request is None:
                continue
            slot = request.req_slot
            start, end = int(windows.start[slot]), int(windows.end[slot])
            row, mine = windows.slots[slot, start:end], np.ones(end - start, dtype=bool)
            for first, last in windows.spans[slot]:
                mine[max(0, first - start) : max(0, last - start)] = False
            private.append(row[mine])
            sent = self.known[slot].window_table
            self.n_window_freed += start > 0
            assert len(sent) == min(end, scheduler.table.width) and row[: len(sent) - start].tolist() == sent[start:], (
                "4: an entry of a live window table changed"
            )
        everything = np.concatenate([free, *in_trees, *private])
        assert len(everything) == pool.window_allocator.total and (np.bincount(everything) == 1).all(), (
            "12: the window slots of free, trees and requests are not all window slots, once"
        )
        is_free = np.zeros(pool.window_allocator.total, dtype=bool)
        is_free[free] = True
        for step in self.unapplied:
            assert not is_free[step.window_slots].any(), f"4: a window slot that step {step.step} reads is free"


class SpyTree:
    """A tree that tells the referee what it adopts; everything else goes through."""

    def __init__(self, tree: Tree, referee: Referee) -> None:
        self._tree, self._referee = tree, referee

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tree, name)

    def insert(self, ids: np.ndarray, slots: np.ndarray, extra_key: str = "", priority: int = 0) -> tuple[int, int]:
        held = set(self._tree.all_slots().tolist())  # type: ignore[attr-defined]
        node, n_present = self._tree.insert(ids, slots, extra_key, priority)
        self._check_insert(ids, slots, n_present, held)
        return node, n_present

    def insert_window(
        self, ids: np.ndarray, slots: np.ndarray, window_start: int, window_slots: np.ndarray, extra_key: str = "", priority: int = 0
    ) -> tuple[int, int, np.ndarray]:
        held = set(self._tree.all_slots().tolist())  # type: ignore[attr-defined]
        window_held = set(self._tree.all_window_slots().tolist())  # type: ignore[attr-defined]
        node, n_present, taken = self._tree.insert_window(ids, slots, window_start, window_slots, extra_key, priority)
        self._check_insert(ids, slots, n_present, held)
        hashes, h = [], 0
        for token in ids.tolist():
            h = extend_hash(h, token)
            hashes.append(h)
        for start, end in zip(taken[::2].tolist(), taken[1::2].tolist()):
            for position in range(start, end):
                slot = int(window_slots[position - window_start])
                assert slot not in window_held, f"5: window slot {slot} is adopted twice"
                assert self._referee.window_applied[slot] == hashes[position], f"5: window position {position} is adopted before its step"
        return node, n_present, taken

    def _check_insert(self, ids: np.ndarray, slots: np.ndarray, n_present: int, held: set[int]) -> None:
        h = 0
        for position, (token, slot) in enumerate(zip(ids.tolist(), slots.tolist())):
            h = extend_hash(h, token)
            if position >= n_present:
                assert slot not in held, f"5: slot {slot} is adopted twice"
                assert self._referee.applied[slot] == h, f"5: position {position} is adopted before its step was applied"
            else:
                self._referee.n_duplicates += slot not in held

    def evict(self, num_tokens: int) -> np.ndarray:
        freed = self._tree.evict(num_tokens)
        self._referee.n_evicted += len(freed)
        return freed
