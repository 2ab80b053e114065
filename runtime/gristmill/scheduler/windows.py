"""The window slots of the requests that run: what Running does for the full pool, for the pool of the sliding-window layers.

By position of one request, with `floor` = the newest applied position minus the window, in whole pages:

    [0, start)      freed, or the prefix cache's; no step reads it any more
    [start, end)    held: ranges in `spans` are the tree's and locked, the rest is private
    [end, ...)      not computed yet

`start` follows `floor` in portions, `end` what is planned. Rows of steps in flight read nothing below `floor`.
"""

from __future__ import annotations

import numpy as np

from gristmill.memory.radix_cache import Lease, Match, RadixCache
from gristmill.memory.req_table import ReqTable
from gristmill.memory.window import Reservations
from gristmill.scheduler.step_writes import StepWrites

WINDOW_POOL = 1  # Write.pool


class Windows:
    """Window slots by request slot. Every method is called by Running, in its own order of events.

    Args:
        table: The request table; `slots` here has the same shape.
        pool: Both pools and the tree over them.
        reservations: What each request may hold.
    """

    def __init__(self, table: ReqTable, pool: RadixCache, reservations: Reservations) -> None:
        self.reservations = reservations
        self._table, self._pool = table, pool
        self.slots = np.zeros_like(table.slots)
        self.start = np.zeros(table.max_reqs, dtype=np.int32)
        self.end = np.zeros(table.max_reqs, dtype=np.int32)
        self.applied = np.zeros(table.max_reqs, dtype=np.int32)  # positions whose step was applied
        self.reserved = np.zeros(table.max_reqs, dtype=np.int32)
        self.spans: list[list[tuple[int, int]]] = [[] for _ in range(table.max_reqs)]

    def chunk(self, slot: int, n: int) -> int:
        """How many of the next `n` prompt tokens of the request in `slot` may be computed now."""
        return self.reservations.chunk(int(self._table.kv[slot]), n, int(self.start[slot]), int(self.reserved[slot]))

    def begin(self, slot: int, match: Match, limit: int, writes: StepWrites) -> None:
        """A request of at most `limit` tokens starts with a cached prefix."""
        n = match.lease.n_tokens
        self.reserved[slot] = self.reservations.prefill(limit)
        self.reservations.reserved += int(self.reserved[slot])
        self.start[slot], self.end[slot], self.applied[slot] = match.window_start, n, n
        self.spans[slot] = [(match.window_start, n)] if n else []
        if n:
            self.slots[slot, match.window_start : n] = match.window_slots
            writes.add(slot, match.window_start, match.window_slots, WINDOW_POOL)

    def prompt_done(self, slot: int, lease: Lease, n_tokens: int) -> None:
        """All `n_tokens` known tokens are applied: from now on it grows a token at a time."""
        self.applied[slot] = n_tokens
        self.trim(slot, lease)
        reserved = min(int(self.reserved[slot]), self.reservations.decode(int(self._table.limit[slot])))
        self.reservations.reserved -= int(self.reserved[slot]) - reserved
        self.reserved[slot] = reserved

    def cover(self, slot: int, end: int, writes: StepWrites) -> None:
        """Slots for everything below position `end`, which a prompt chunk computes."""
        start, stop = int(self.end[slot]), self._pool.pages(end)
        if stop > start:
            self._add(slot, start, self._pool.take_window(stop - start), writes)

    def cover_rows(self, rows: np.ndarray, lookahead: int, writes: StepWrites) -> None:
        """Slots for one more token of each of `rows` (request slots), where they have none."""
        for slot in rows[self._table.kv[rows] >= self.end[rows]].tolist():
            n = lookahead if int(self.end[slot]) + lookahead <= self._table.width else self._pool.page_size
            self._add(slot, int(self.end[slot]), self._pool.take_window(n), writes)

    def _add(self, slot: int, start: int, taken: np.ndarray, writes: StepWrites) -> None:
        stop = start + len(taken)
        self.slots[slot, start:stop] = taken
        self.end[slot] = stop
        writes.add(slot, start, taken[: self._table.width - start], WINDOW_POOL)

    def due(self, rows: np.ndarray, kv_len: np.ndarray) -> list[int]:
        """The step of these rows was applied: request slots that hold a portion below their window."""
        self.applied[rows] = kv_len
        below = kv_len - self.reservations.window - self.start[rows]
        portion = self.reservations.trim_tokens + self._pool.page_size - 1  # at least one portion in whole pages
        return rows[below >= portion].tolist()

    def trim(self, slot: int, lease: Lease) -> None:
        """Let go of what is below the window of all steps in flight."""
        page = self._pool.page_size
        floor = max(0, int(self.applied[slot]) - self.reservations.window)
        self._let_go(slot, lease, floor // page * page)

    def held(self, slot: int, end: int) -> tuple[int, np.ndarray]:
        """(start, slots of [start, end)): what may be offered to the tree with a prefix of `end` tokens."""
        start = min(int(self.start[slot]), end)
        return start, self.slots[slot, start:end]

    def release(self, slot: int, lease: Lease) -> None:
        """The request leaves: everything goes back, before its lease does."""
        self._let_go(slot, lease, int(self.end[slot]))
        self.reservations.reserved -= int(self.reserved[slot])
        self.start[slot] = self.end[slot] = self.applied[slot] = self.reserved[slot] = 0

    def _let_go(self, slot: int, lease: Lease, to: int) -> None:
        start, to = int(self.start[slot]), min(to, int(self.end[slot]))
        if to <= start:
            return
        private = np.ones(to - start, dtype=bool)
        kept = []
        for first, last in self.spans[slot]:
            private[first - start : max(0, min(last, to) - start)] = False
            self._pool.unlock_window(lease, first, min(last, to))
            if last > to:
                kept.append((max(first, to), last))
        self.spans[slot] = kept
        self._pool.give_window(self.slots[slot, start:to][private])
        self.start[slot] = to

    def n_private(self) -> int:
        """Window slots that requests hold and the tree does not own."""
        in_tree = sum(last - first for spans in self.spans for first, last in spans)
        return int((self.end - self.start).sum()) - in_tree

    def check(self) -> None:
        """Raise AssertionError when the accounts of the window pool do not agree with each other."""
        counts, private = self._pool.window_counts(), self.n_private()
        in_trees = sum(tree.window_size for tree in self._pool.trees)
        locked = sum(tree.window_locked for tree in self._pool.trees) + private
        assert counts.free + in_trees + private == counts.total, f"window {counts}: {in_trees} in trees and {private} private"
        assert counts.locked == locked, f"window {counts}: {locked} are in use"
        held = self.end - self.start
        assert (held <= self.reserved).all(), f"requests hold {held.max()} window slots, {self.reserved} are reserved"
        assert int(self.reserved.sum()) == self.reservations.reserved <= counts.total
