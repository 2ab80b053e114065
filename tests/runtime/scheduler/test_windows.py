"""The pool of sliding-window layers: what is held, shared, given back, and read by steps in flight."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import numpy as np
import pytest

from gristmill.errors import GristmillError
from gristmill.memory.window import Reservations, WindowSpec
from gristmill.messages import Abort, Control, Result, Step
from tests.runtime.scheduler.harness import Harness, expected

DEPTHS = (1, 2, 3)


class WindowHarness(Harness):
    """A harness whose worker keeps the window pool's content, and checks at execution that every row reads what it must.

    The content of a position is a hash of all ids up to it, so a slot that was given to someone else too early is noticed.
    """

    def __init__(self, depth: int = 1, *, window: int, window_slots: int, **config: Any) -> None:
        super().__init__(depth, window=WindowSpec(window_slots, window), **config)
        self.window = window
        self.kv = np.zeros(window_slots, dtype=np.int64)
        self.tables = [np.full(2000, -1, dtype=np.int64) for _ in range(self.scheduler.config.max_reqs)]
        self.unexecuted: deque[Step] = deque()
        self.read: deque[np.ndarray] = deque()  # window slots of each step in flight
        self.most_locked = 0

    def plan(self) -> Step | None:
        step = super().plan()
        if step is not None:
            self.unexecuted.append(step)
            self.read.append(self._slots_read(step))
        self._assert_none_is_free()
        self.most_locked = max(self.most_locked, self.scheduler.pool.window_counts().locked)
        return step

    def answer(self) -> None:
        self._execute(self.unexecuted.popleft())
        self.read.popleft()
        super().answer()
        self._assert_none_is_free()

    def _slots_read(self, step: Step) -> np.ndarray:
        """Every window slot that a step names, as the scheduler planned it."""
        windows = self.scheduler.running.windows
        assert windows is not None
        rows = zip(step.req_slot.tolist(), step.q_len.tolist(), step.kv_len.tolist())
        return np.concatenate([windows.slots[slot, max(0, kv - q - self.window + 1) : kv] for slot, q, kv in rows])

    def _assert_none_is_free(self) -> None:
        allocator = self.scheduler.pool.window_allocator
        assert allocator is not None
        for slots in self.read:
            assert not np.isin(slots, allocator.free_slots()).any(), "a window slot that a step in flight names is free"

    def _execute(self, step: Step) -> None:
        offset = 0
        for write in step.writes:
            entries = step.write_slots[offset : offset + write.n]
            offset += write.n
            if write.pool == 1:
                self.tables[write.req_slot][write.start : write.start + write.n] = entries
        for slot, q_len, kv_len in zip(step.req_slot.tolist(), step.q_len.tolist(), step.kv_len.tolist()):
            request = self.scheduler.running.by_slot[slot]
            assert request is not None
            # ids of rows in flight follow the harness's rule: position + 100, unless the script says otherwise
            known = self.scheduler.table.ids[slot, : self.scheduler.table.n_ids[slot]].tolist()
            ids = known + [self.script.get((request.rid, p), p + 100) for p in range(len(known), kv_len)]
            contents = []
            h = hash(request.extra_key) & 0xFFFF
            for token in ids[:kv_len]:
                h = (h * 1000003 + token + 1) & 0x7FFFFFFFFFFFFFF
                contents.append(h)
            start, table = kv_len - q_len, self.tables[slot]
            self.kv[table[start:kv_len]] = contents[start:]
            first = max(0, start - self.window + 1)
            assert np.array_equal(self.kv[table[first:kv_len]], contents[first:]), f"step {step.step} reads a window that is not its own"

    def assert_idle(self) -> None:
        super().assert_idle()
        counts = self.scheduler.pool.window_counts()
        assert counts.locked == 0 and counts.free + counts.evictable == counts.total
        assert self.scheduler.running.windows is not None and self.scheduler.running.windows.reservations.reserved == 0


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("window", [1, 6, 16])
def test_a_long_request_holds_little_more_than_its_window(depth: int, page_size: int, window: int) -> None:
    harness = WindowHarness(depth, window=window, window_slots=100, page_size=page_size, chunk_tokens=8, max_context=400)
    harness.submit("a", 150, max_tokens=200)
    harness.run()
    assert harness.tokens["a"] == expected(150, 200)
    spec = Reservations(WindowSpec(100, window), page_size, page_size, 8)
    assert harness.most_locked <= spec.prefill(350) < 100
    counts = harness.scheduler.pool.counts()
    assert counts.evictable >= 340, "the full-attention part stays in the tree"
    harness.assert_idle()


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_prefix_is_shared_when_its_last_window_is_still_there(depth: int, page_size: int) -> None:
    harness = WindowHarness(depth, window=8, window_slots=200, page_size=page_size, max_context=400)
    harness.submit("a", list(range(60)), max_tokens=4)
    harness.run()
    harness.submit("b", [*range(60), 7, 7, 7], max_tokens=4)
    harness.run()
    assert harness.closed["b"].cached_tokens == 60
    assert harness.tokens["b"] == expected(63, 4)
    harness.assert_idle()


def test_when_the_window_of_a_prefix_is_gone_it_is_computed_again_and_the_tree_recovers() -> None:
    harness = WindowHarness(1, window=8, window_slots=60, max_context=400, chunk_tokens=8)
    harness.submit("a", list(range(50)), max_tokens=1)
    harness.run()
    for i in range(4):  # take all window slots for others
        harness.submit(f"x{i}", 50, max_tokens=1)
        harness.run()
    assert harness.scheduler.pool.tree is not None
    assert harness.scheduler.pool.tree.match_length(np.arange(50, dtype=np.int32)) == 50
    assert harness.scheduler.pool.probe(np.arange(50, dtype=np.int32), "") < 50
    for rid in ("b", "c"):
        harness.submit(rid, [*range(50), 1], max_tokens=2)
        harness.run()
    assert harness.closed["b"].cached_tokens == 0
    assert harness.closed["c"].cached_tokens == 50, "b gave the tree window slots for what it had"
    harness.assert_idle()


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_pool_for_one_request_serves_many_one_after_the_other(depth: int) -> None:
    harness = WindowHarness(depth, window=8, window_slots=60, chunk_tokens=8, max_context=400, pool_tokens=2000)
    for i in range(6):
        harness.submit(f"r{i}", 70 + i, max_tokens=30)
    harness.run()
    for i in range(6):
        assert harness.tokens[f"r{i}"] == expected(70 + i, 30)
    assert harness.scheduler.stats.retractions == 0, "the window pool is never a reason to retract"
    harness.assert_idle()


@pytest.mark.parametrize("depth", DEPTHS)
def test_preemption_waits_for_window_slots_too(depth: int) -> None:
    harness = WindowHarness(depth, window=8, window_slots=45, chunk_tokens=8, max_context=400, pool_tokens=2000)
    harness.submit("low", 30, max_tokens=100)
    for _ in range(8):
        harness.turn()
    harness.submit("high", 60, max_tokens=20, priority=10)
    harness.run()
    assert harness.scheduler.stats.preemptions == 1
    assert harness.tokens["high"] == expected(60, 20) and harness.tokens["low"] == expected(30, 100)
    harness.assert_idle()


@pytest.mark.parametrize("first", range(6))
def test_random_schedules_read_their_own_windows_and_lose_no_slot(first: int) -> None:
    n_retracted = n_cached = 0
    for seed in range(first * 25, first * 25 + 25):
        g = random.Random(seed)
        page = g.choice([1, 1, 2, 4])
        window = g.choice([1, 3, 8, 20])
        harness = WindowHarness(
            g.choice(DEPTHS),
            window=window,
            window_slots=g.choice([80, 120, 300]),
            page_size=page,
            pool_tokens=g.choice([130, 250, 600]),
            chunk_tokens=g.choice([0, 4, 9, 32]),
            mixed_chunks=g.random() < 0.7,
            radix_cache=g.random() < 0.9,
            eviction_policy=g.choice(["lru", "lfu", "fifo", "priority", "slru"]),
            policy=g.choice(["fcfs", "lpm", "dfs-weight"]),
            new_token_ratio=g.choice([0.0, 0.4]),
            lookahead_tokens=g.choice([1, 4]),
            preempt_threshold=1,
            max_context=120,
        )
        bases = [list(range(1000 * i, 1000 * i + 90)) for i in range(1, 4)]
        wanted: dict[str, tuple[int, int]] = {}
        aborted = set()
        for i in range(g.randrange(4, 14)):
            prompt = g.choice(bases)[: g.randrange(1, 90)]
            n = g.randrange(1, 30)
            wanted[f"r{i}"] = (len(prompt), min(n, 120 - len(prompt)))
            harness.submit(f"r{i}", prompt, max_tokens=n, priority=g.choice([0, 0, 1]))
            for _ in range(g.randrange(4)):
                harness.turn()
            if g.random() < 0.1:
                rid = g.choice(list(wanted))
                aborted.add(rid)
                harness.say(Abort(rid))
            if g.random() < 0.1:
                harness.say(Control(i, "flush"))
        harness.run()
        for rid, (n_prompt, n) in wanted.items():
            if harness.reason(rid) == "length":
                assert harness.tokens[rid] == expected(n_prompt, n), f"seed {seed}"
            else:
                assert rid in aborted or harness.closed[rid].code == "pool_exceeded", f"seed {seed}: {harness.closed[rid]}"
        harness.assert_idle()
        n_retracted += harness.scheduler.stats.retractions + harness.scheduler.stats.preemptions
        n_cached += harness.scheduler.stats.cached_tokens
    assert n_retracted > 0 and n_cached > 0


def test_a_pool_too_small_for_one_request_is_refused_with_the_numbers() -> None:
    with pytest.raises(GristmillError, match="the sliding-window pool holds 20 tokens and one request of a window of 16 needs"):
        WindowHarness(1, window=16, window_slots=20)


def test_a_result_of_another_size_is_noticed_before_windows_move() -> None:
    harness = WindowHarness(1, window=4, window_slots=80)
    harness.submit("a", 5, max_tokens=3)
    step = harness.plan()
    assert step is not None
    with pytest.raises(Exception, match="ids for 1 rows"):
        harness.scheduler.apply(step, Result(step.step, np.empty(0, dtype=np.int32)))
