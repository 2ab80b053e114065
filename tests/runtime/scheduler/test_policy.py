"""Orders of the waiting queue, from snapshots alone."""

from __future__ import annotations

import pytest

from gristmill.scheduler.policy import POLICIES, QueueEntry, fcfs, lpm

QUEUE = [
    QueueEntry(seq=3, priority=0, n_tokens=10, n_cached=8),
    QueueEntry(seq=1, priority=0, n_tokens=50, n_cached=0),
    QueueEntry(seq=4, priority=2, n_tokens=5, n_cached=0),
    QueueEntry(seq=2, priority=0, n_tokens=10, n_cached=8),
    QueueEntry(seq=5, priority=2, n_tokens=5, n_cached=4),
]


def test_fcfs_is_the_order_of_arrival_within_a_priority() -> None:
    assert fcfs(QUEUE) == [2, 4, 1, 3, 0]


def test_lpm_prefers_the_longest_cached_prefix_within_a_priority() -> None:
    assert lpm(QUEUE) == [4, 2, 3, 0, 1]


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_returns_every_position_once(name: str) -> None:
    assert sorted(POLICIES[name].order(QUEUE)) == list(range(len(QUEUE)))
    assert POLICIES[name].order([]) == []
