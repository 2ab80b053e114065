"""The requests that hold slots: how they get them, grow, share them with the tree, and give them back when nothing in flight names them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gristmill.memory.radix_cache import Lease, Match, RadixCache
from gristmill.memory.req_table import ReqTable
from gristmill.scheduler.request import Request, State
from gristmill.scheduler.step_writes import StepWrites
from gristmill.scheduler.windows import Windows

LOOKAHEAD_TOKENS = 16  # slots that a decoding request gets at once while memory is plenty: fewer table writes per step


class Room(NamedTuple):
    """What can be decoded now: request slots `rows`, of which `growing` get a new page. `stuck` is alone and cannot grow."""

    rows: np.ndarray
    growing: np.ndarray
    stuck: Request | None = None


class Running:
    """Slots of the running, parked and ending requests: the only place where slots change hands."""

    def __init__(self, table: ReqTable, pool: RadixCache, lookahead_tokens: int = LOOKAHEAD_TOKENS, windows: Windows | None = None) -> None:
        self.table, self.pool, self.windows = table, pool, windows
        self.requests: dict[int, Request] = {}  # running, by request slot, in the order of their admission
        self.prefilling: list[Request] = []  # those of them with known tokens still to plan, oldest first
        self.leaving: list[Request] = []  # parked and ending
        self.retracted: list[Request] = []  # waiting again; the scheduler takes them from here
        self.by_slot: list[Request | None] = [None] * table.max_reqs
        self._lookahead = pool.pages(lookahead_tokens)

    def start(self, request: Request, match: Match, limit: int, writes: StepWrites) -> None:
        """Give `request` a request slot and slots for all its known tokens after the cached prefix `match`, which is leased already."""
        table, n, cached = self.table, len(request.ids), match.slots
        slot = table.take()
        n_slots = self.pool.pages(n)
        row = table.slots[slot]
        row[: len(cached)] = cached
        row[len(cached) : n_slots] = self.pool.take(n_slots - len(cached))
        table.ids[slot, :n] = request.ids
        table.n_slots[slot], table.n_ids[slot], table.length[slot] = n_slots, n, n
        table.kv[slot], table.limit[slot] = len(cached), limit
        table.live[slot] = True
        sampling = request.sampling
        table.eos_from[slot] = min(request.n_prompt + sampling.min_tokens, 2**31 - 1)
        table.heeds_eos[slot] = not sampling.ignore_eos
        table.has_stop_ids[slot] = bool(request.stop_ids)
        table.idx[slot] = request.idx
        request.move(State.RUNNING)
        request.req_slot, request.n_known, request.lease = slot, n, match.lease
        request.tree_spans = [(0, len(cached))] if len(cached) else []
        self.requests[slot] = self.by_slot[slot] = request
        self.prefilling.append(request)
        writes.add(slot, 0, row[: min(n_slots, table.width)].copy())
        if self.windows is not None:
            self.windows.begin(slot, match, limit, writes)

    def chunk(self, request: Request, n: int) -> int:
        """How many of the next `n` prompt tokens may be computed in this step for all that the window pool has."""
        return n if self.windows is None else self.windows.chunk(request.req_slot, n)

    def cover_chunk(self, request: Request, n: int, writes: StepWrites) -> None:
        """Make sure of window slots for the next `n` prompt tokens."""
        if self.windows is not None:
            self.windows.cover(request.req_slot, int(self.table.kv[request.req_slot]) + n, writes)

    def cover_rows(self, rows: np.ndarray, writes: StepWrites) -> None:
        """Make sure of window slots for one more token of each of `rows`."""
        if self.windows is not None:
            self.windows.cover_rows(rows, self._lookahead, writes)

    def prompt_done(self, request: Request) -> None:
        """All known tokens of `request` are applied: it needs window slots for a token at a time from now on."""
        if self.windows is not None:
            self.windows.prompt_done(request.req_slot, request.lease, request.n_known)

    def applied(self, rows: np.ndarray, kv_len: np.ndarray) -> None:
        """A step with these rows was applied: what fell below the windows is let go."""
        if self.windows is None:
            return
        for slot in self.windows.due(rows, kv_len):
            request = self.by_slot[slot]
            assert request is not None
            self.windows.trim(slot, request.lease)

    def grow(self, rows: np.ndarray, writes: StepWrites) -> None:
        """Give each of `rows` room for at least one more token; the pool has it."""
        table, page = self.table, self.pool.page_size
        starts = table.n_slots[rows]
        n = page
        if self.pool.allocator.free >= 4 * self._lookahead * rows.size and int(starts.max()) + self._lookahead <= table.width:
            n = self._lookahead
        blocks = self.pool.take(n * rows.size).reshape(rows.size, n)
        table.slots[rows[:, None], starts[:, None] + np.arange(n, dtype=np.int32)] = blocks
        table.n_slots[rows] = starts + n
        if int(starts.max()) + n <= table.width:
            writes.add_blocks(rows, starts, blocks)
        else:  # the last page of some reaches beyond the table
            for row, start, block in zip(rows.tolist(), starts.tolist(), blocks):
                writes.add(row, start, block[: table.width - start])

    def adopt(self, request: Request, n_tokens: int) -> None:
        """Offer the tree the whole pages of [0, n_tokens), positions whose step was applied and whose ids are known."""
        n = n_tokens // self.pool.page_size * self.pool.page_size
        if n <= request.lease.n_tokens:
            return
        slot = request.req_slot
        ids, slots = self.table.ids[slot, :n], self.table.slots[slot, :n]
        if self.windows is None:
            request.lease, n_present = self.pool.extend(request.lease, ids, slots, request.extra_key, request.priority)
        else:
            start, held = self.windows.held(slot, n)
            request.lease, n_present, taken = self.pool.extend_window(
                request.lease, ids, slots, start, held, request.extra_key, request.priority
            )
            self.windows.spans[slot] += taken
        if n_present < n:
            request.tree_spans.append((n_present, n))

    def park(self, request: Request) -> None:
        """Plan `request` no more; it is retracted when nothing of it is in flight."""
        request.move(State.PARKED)
        self._leave(request)

    def end(self, request: Request) -> None:
        """`request` is closed: its results no longer count, its slots are released when nothing of it is in flight."""
        was_running = request.state is State.RUNNING
        request.move(State.ENDING)
        self.table.live[request.req_slot] = False
        if was_running:
            self._leave(request)

    def _leave(self, request: Request) -> None:
        self.table.decoding[request.req_slot] = False
        del self.requests[request.req_slot]
        if request in self.prefilling:
            self.prefilling.remove(request)
        self.leaving.append(request)

    def settle(self) -> bool:
        """Release all that leaves and is not in flight; returns whether there was any."""
        gone = [request for request in self.leaving if not self.table.inflight[request.req_slot]]
        if not gone:
            return False
        self.leaving = [request for request in self.leaving if self.table.inflight[request.req_slot]]
        for request in gone:
            parked = request.state is State.PARKED
            self._release(request)
            request.move(State.WAITING if parked else State.GONE)
            if parked:
                self.retracted.append(request)
        return True

    def _release(self, request: Request) -> None:
        table, slot = self.table, request.req_slot
        n_ids = int(table.n_ids[slot])
        # valid KV: computed, and of a known token. A zombie row may have computed the last token's, never a known one's beyond it
        self.adopt(request, min(int(table.kv[slot]), n_ids))
        n_slots = int(table.n_slots[slot])
        private = table.slots[slot, :n_slots][request.is_private(n_slots)]
        request.ids = table.ids[slot, :n_ids].copy()
        if self.windows is not None:
            self.windows.release(slot, request.lease)
        self.pool.release(request.lease)
        self.pool.give(private)
        table.give(slot)
        self.by_slot[slot] = None
        request.req_slot, request.lease, request.tree_spans = -1, Lease(None, 0, 0), []

    def make_room(self, rows: np.ndarray, n_in_flight: int) -> Room:
        """Too few slots for all of `rows` to grow: park victims until the others will be able to.

        A victim that is in flight gives its slots back only after its last result, so until then some rows sit out.
        """
        table, page = self.table, self.pool.page_size
        while True:
            short = rows[table.kv[rows] >= table.n_slots[rows]]
            missing = short.size * page - self.pool.available
            if missing <= 0:
                return Room(rows, short)
            coming = sum(int(table.n_slots[request.req_slot]) for request in self.leaving)
            if coming >= missing:
                break
            if len(self.requests) == 1:
                if not self.leaving and not n_in_flight:
                    return Room(rows[:0], short[:0], stuck=next(iter(self.requests.values())))
                break
            victim = min(self.requests.values(), key=self.victim_key)
            rows = rows[rows != victim.req_slot]
            self.park(victim)
            self.settle()
        # who has generated most goes first: it is nearest to its end, and the order must not depend on slot numbers
        order = sorted(short.tolist(), key=lambda slot: self.victim_key(self.requests[slot]), reverse=True)
        growing = np.array(order[: self.pool.available // page], dtype=rows.dtype)
        return Room(rows[(table.kv[rows] < table.n_slots[rows]) | np.isin(rows, growing)], growing)

    def victim_key(self, request: Request) -> tuple[int, int, int]:
        """Smallest = parked first: low priority, then least output, then last come."""
        return request.priority, int(self.table.length[request.req_slot]) - request.n_prompt, -request.seq
