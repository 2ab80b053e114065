"""Preemption, shared prefixes and starvation: who is computed when, in small schedules."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from gristmill.messages import Abort
from gristmill.scheduler.policy import MAX_PASSED
from gristmill.scheduler.scheduler import MAX_PREFILL_STREAK
from gristmill.scheduler.sharing import MIN_SHARED_TOKENS, Prefix, waits_for
from tests.runtime.scheduler.harness import Harness, expected

DEPTHS = (1, 2, 3)
SHARED = list(range(1000, 1000 + 2 * MIN_SHARED_TOKENS))


def started_at(harness: Harness, rid: str) -> int:
    """The number of the step that first named `rid` (its prompt must be unlike all others)."""
    first = sum(map(ord, rid)) * 1000
    return next(step.step for step in harness.steps for new in step.new if new.ids[0] == first)


# --- preemption


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("chunk_tokens", [0, 8])
def test_a_high_priority_puts_a_low_one_back_and_both_end_as_alone(depth: int, chunk_tokens: int) -> None:
    harness = Harness(depth, pool_tokens=120, chunk_tokens=chunk_tokens, new_token_ratio=0.0)
    for rid in ("a", "b", "c"):
        harness.submit(rid, 30, max_tokens=10)
    while len(harness.scheduler.running.requests) < 3:
        harness.turn()
    harness.submit("high", 40, max_tokens=5, priority=10)
    before = harness.scheduler.stats.sent_step
    harness.run()
    assert harness.scheduler.stats.preemptions > 0
    assert started_at(harness, "high") <= before + depth + 1
    assert harness.tokens["high"] == expected(40, 5)
    for rid in ("a", "b", "c"):
        assert harness.tokens[rid] == expected(30, 10)
    harness.assert_idle()


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_request_slot_is_taken_from_the_lowest_priority_with_least_output(depth: int) -> None:
    harness = Harness(depth, max_reqs=3)
    harness.submit("old", 5, max_tokens=60)
    for _ in range(8):
        harness.turn()
    harness.submit("middle", 5, max_tokens=60, priority=4)
    harness.submit("young", 5, max_tokens=60)
    for _ in range(8):
        harness.turn()
    harness.submit("high", 5, max_tokens=3, priority=15)
    for _ in range(depth + 2):
        harness.turn()
    waiting = [request.rid for request in harness.scheduler._waiting]
    assert waiting == ["young"]
    harness.run()
    assert [harness.tokens[rid] for rid in ("old", "middle", "young", "high")] == [expected(5, n) for n in (60, 60, 60, 3)]
    assert harness.scheduler.stats.preemptions == 1 and harness.scheduler.stats.retractions == 0


@pytest.mark.parametrize(("threshold", "priority"), [(10, 9), (0, 1000), (5, 4)])
def test_below_the_threshold_nobody_is_put_back(threshold: int, priority: int) -> None:
    harness = Harness(2, max_reqs=1, preempt_threshold=threshold)
    harness.submit("low", 5, max_tokens=20)
    harness.turn()
    harness.submit("high", 5, max_tokens=3, priority=priority)
    harness.run()
    assert harness.scheduler.stats.preemptions == 0
    assert started_at(harness, "high") > 20


@pytest.mark.parametrize("depth", DEPTHS)
def test_when_all_victims_together_would_not_make_room_none_is_put_back(depth: int) -> None:
    harness = Harness(depth, pool_tokens=100, new_token_ratio=0.0)
    harness.submit("equal", 60, max_tokens=15, priority=20)
    harness.submit("low", 10, max_tokens=15)
    harness.turn()
    harness.submit("high", 70, max_tokens=2, priority=20)
    harness.run()
    assert harness.scheduler.stats.preemptions == 0
    assert harness.tokens["high"] == expected(70, 2)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("turns", range(6))
def test_aborting_either_side_of_a_preemption_at_any_moment_leaks_nothing(depth: int, turns: int) -> None:
    for victim in ("low", "high"):
        harness = Harness(depth, max_reqs=1, chunk_tokens=4)
        harness.submit("low", 9, max_tokens=30)
        harness.turn()
        harness.submit("high", 9, max_tokens=3, priority=10)
        for _ in range(turns):
            harness.turn()
        harness.say(Abort(victim))
        harness.run()
        other = "high" if victim == "low" else "low"
        assert harness.tokens[other] == expected(9, 3 if other == "high" else 30)
        harness.assert_idle()


def test_a_high_priority_prompt_is_not_held_up_by_the_chunks_of_a_long_low_one() -> None:
    harness = Harness(2, chunk_tokens=8)
    harness.submit("long", 200, max_tokens=1)
    harness.turn()
    harness.submit("high", 8, max_tokens=1, priority=1)
    before = harness.scheduler.stats.sent_step
    harness.run()
    assert started_at(harness, "high") == before + 1
    assert harness.tokens["long"] == expected(200, 1)


def test_equal_priorities_share_a_step_in_the_order_they_were_begun() -> None:
    harness = Harness(1, chunk_tokens=8)
    harness.submit("long", 20, max_tokens=1)
    harness.submit("short", 3, max_tokens=1)
    harness.run()
    assert [step.q_len.tolist() for step in harness.steps] == [[8], [8], [4, 3]]


# --- shared prefixes


def test_waiting_pays_only_for_enough_whole_pages_of_the_same_namespace() -> None:
    ids = np.arange(100, dtype=np.int32)
    same, other = Prefix(ids[:80], ""), Prefix(np.arange(1, 101, dtype=np.int32), "")
    assert waits_for(ids, "", 0, [other, same])
    assert not waits_for(ids, "", 0, [other])
    assert not waits_for(ids, "adapter", 0, [same])
    assert waits_for(ids, "", 80 - MIN_SHARED_TOKENS, [same])
    assert not waits_for(ids, "", 81 - MIN_SHARED_TOKENS, [same])
    assert not waits_for(ids, "", 80 - MIN_SHARED_TOKENS, [same], page_size=5), "35 tokens are the least in pages of 5"
    assert not waits_for(ids[:MIN_SHARED_TOKENS], "", 0, [same]), "its last token is computed in any case"
    assert waits_for(ids[: MIN_SHARED_TOKENS + 1], "", 0, [same])


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_common_prefix_is_computed_once_by_requests_that_come_together(depth: int, page_size: int) -> None:
    harness = Harness(depth, page_size=page_size)
    for i in range(5):
        harness.submit(f"r{i}", [*SHARED, i, i, i, i], max_tokens=3)
    harness.run()
    n = len(SHARED) + 4
    cached = [harness.closed[f"r{i}"].cached_tokens for i in range(5)]
    assert cached == [0] + [len(SHARED)] * 4
    assert all(harness.tokens[f"r{i}"] == expected(n, 3) for i in range(5))
    assert harness.scheduler.stats.prefix_waits >= 4
    computed = sum(int(step.q_len.sum()) for step in harness.steps)
    assert computed == n + 4 * 4 + 5 * 2, "one whole prompt, four tails, two decode rows each"
    harness.assert_idle()


def test_a_request_that_shares_nothing_is_not_held_up_by_one_that_waits() -> None:
    harness = Harness(2, chunk_tokens=200)
    harness.submit("a", [*SHARED, 1], max_tokens=2)
    harness.submit("b", [*SHARED, 2], max_tokens=2)
    harness.submit("c", 10, max_tokens=2)
    harness.plan()
    assert len(harness.steps[0].new) == 2
    harness.run()
    assert [harness.tokens[rid] for rid in "abc"] == [expected(n, 2) for n in (65, 65, 10)]


@pytest.mark.parametrize("depth", DEPTHS)
def test_when_the_one_that_computes_it_is_aborted_another_takes_over(depth: int) -> None:
    harness = Harness(depth, chunk_tokens=8)
    for rid in "abc":
        harness.submit(rid, [*SHARED, ord(rid)], max_tokens=2)
    harness.turn()
    harness.say(Abort("a"))
    harness.run()
    assert harness.tokens["b"] == harness.tokens["c"] == expected(len(SHARED) + 1, 2)
    assert harness.closed["c"].cached_tokens > len(SHARED) - MIN_SHARED_TOKENS
    harness.assert_idle()


@pytest.mark.parametrize("depth", DEPTHS)
def test_it_does_not_wait_for_chunks_that_higher_priorities_may_hold_up_for_ever(depth: int) -> None:
    harness = Harness(depth, chunk_tokens=8)
    harness.submit("low", [*SHARED, 1], max_tokens=2)
    harness.turn()
    harness.submit("other", 300, max_tokens=2, priority=1)
    harness.submit("high", [*SHARED, 2], max_tokens=2, priority=1)
    for i in range(20):
        harness.submit(f"more {i}", 50, max_tokens=2, priority=1)
    harness.run()
    order = list(harness.closed)
    assert order.index("high") < order.index("more 0") < order.index("low")
    assert harness.tokens["high"] == harness.tokens["low"] == expected(len(SHARED) + 1, 2)
    harness.assert_idle()


@pytest.mark.parametrize("depth", DEPTHS)
def test_it_waits_for_a_lower_priority_that_is_all_planned(depth: int) -> None:
    harness = Harness(depth)
    harness.submit("low", [*SHARED, 1], max_tokens=2)
    harness.plan()
    harness.submit("high", [*SHARED, 2], max_tokens=2, priority=1)
    harness.run()
    assert harness.closed["high"].cached_tokens == len(SHARED)


def test_scoring_its_prompt_it_does_not_wait_for_what_it_computes_anyway() -> None:
    harness = Harness(1)
    harness.submit("a", [*SHARED, 1], max_tokens=2)
    harness.submit("b", [*SHARED, 2], max_tokens=2, score_from=1)
    harness.plan()
    assert len(harness.steps[0].new) == 2


def test_without_radix_cache_nobody_waits() -> None:
    harness = Harness(1, radix_cache=False)
    for rid in "abc":
        harness.submit(rid, [*SHARED, ord(rid)], max_tokens=2)
    harness.plan()
    assert len(harness.steps[0].new) == 3


# --- bounds on waiting


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "dfs-weight", "shortest-prefill", "hrrn"])
def test_a_long_prompt_starts_amid_an_endless_supply_of_better_ones(policy: str) -> None:
    """Each newcomer is short and shares a cached prefix, so every policy but fcfs prefers it."""
    harness = Harness(2, policy=policy, max_reqs=2, new_token_ratio=0.0)
    harness.submit("warm", list(range(10)), max_tokens=1)
    harness.run()
    names = itertools.count()
    for _ in range(4):
        harness.submit(f"n{next(names)}", list(range(12)), max_tokens=2)
    harness.submit("long", 300, max_tokens=1)
    for _ in range(3 * MAX_PASSED):
        harness.submit(f"n{next(names)}", list(range(12)), max_tokens=2)
        harness.turn()
        if harness.reason("long"):
            break
    assert harness.tokens["long"] == expected(300, 1)
    harness.run()


@pytest.mark.parametrize("mixed", [True, False])
def test_decode_is_never_starved_by_an_endless_supply_of_prompts(mixed: bool) -> None:
    harness = Harness(2, chunk_tokens=8, mixed_chunks=mixed, max_reqs=32)
    harness.submit("old", 5, max_tokens=30)
    harness.turn()
    for i in range(400):
        harness.submit(f"n{i}", 8, max_tokens=1)
        harness.turn()
        if harness.reason("old"):
            break
    with_row = [step.step for step in harness.steps if 0 in step.req_slot.tolist()][:30]
    gaps = np.diff(with_row)
    assert len(with_row) == 30
    assert gaps.max() == (1 if mixed else MAX_PREFILL_STREAK + 1)


def test_a_prompt_is_never_starved_by_decode_rows() -> None:
    harness = Harness(2, chunk_tokens=4, mixed_chunks=False)
    for i in range(6):
        harness.submit(f"d{i}", 3, max_tokens=60)
    for _ in range(6):
        harness.turn()
    before = harness.scheduler.stats.sent_step
    harness.submit("prompt", 40, max_tokens=1)
    harness.run()
    rows = [step.step for step in harness.steps if step.q_len.max() == 4 and step.step > before]
    assert len(rows) == 10
    assert rows[-1] - before <= 10 + 2 + 10 // MAX_PREFILL_STREAK
