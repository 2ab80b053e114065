"""Orders of the waiting queue, from snapshots alone."""

from __future__ import annotations

import random

import pytest

from gristmill.scheduler.policy import MAX_PASSED, POLICIES, QueueEntry, dfs_weight, fcfs, hrrn, lpm, shortest_prefill

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


def test_shortest_prefill_counts_only_what_is_not_cached() -> None:
    queue = [
        QueueEntry(seq=0, priority=0, n_tokens=100, n_cached=0),
        QueueEntry(seq=1, priority=0, n_tokens=900, n_cached=890),
        QueueEntry(seq=2, priority=0, n_tokens=20, n_cached=0),
        QueueEntry(seq=3, priority=1, n_tokens=500, n_cached=0),
    ]
    assert shortest_prefill(queue) == [3, 1, 2, 0]


def test_dfs_weight_goes_into_the_most_wanted_subtree_and_finishes_it() -> None:
    #        1 (3 wait below)        2 (2 wait below)
    #       / \                      |
    #      3   4                     5
    queue = [
        QueueEntry(seq=0, priority=0, n_tokens=9, path=(2, 5)),
        QueueEntry(seq=1, priority=0, n_tokens=9, path=(1, 3)),
        QueueEntry(seq=2, priority=0, n_tokens=9, path=(1,)),
        QueueEntry(seq=3, priority=0, n_tokens=9, path=()),
        QueueEntry(seq=4, priority=0, n_tokens=9, path=(1, 4)),
        QueueEntry(seq=5, priority=0, n_tokens=9, path=(2, 5)),
    ]
    assert dfs_weight(queue) == [1, 4, 2, 0, 5, 3]


def test_dfs_weight_does_not_mix_subtrees_of_equal_weight() -> None:
    queue = [QueueEntry(seq=i, priority=0, n_tokens=9, path=(1 + i % 2, 3 + i % 4)) for i in range(8)]
    order = [queue[i].path[0] for i in dfs_weight(queue)]
    assert order == sorted(order)


def test_dfs_weight_weighs_each_priority_by_itself() -> None:
    queue = [
        QueueEntry(seq=0, priority=1, n_tokens=9, path=(1,)),
        QueueEntry(seq=1, priority=1, n_tokens=9, path=(2,)),
        QueueEntry(seq=2, priority=0, n_tokens=9, path=(2,)),
        QueueEntry(seq=3, priority=0, n_tokens=9, path=(2,)),
    ]
    assert dfs_weight(queue) == [0, 1, 2, 3]


def test_hrrn_prefers_short_prompts_until_a_long_one_has_waited() -> None:
    def queue(waited: int) -> list[QueueEntry]:
        return [
            QueueEntry(seq=0, priority=0, n_tokens=5000, service_steps=10.0, waited_steps=waited),
            QueueEntry(seq=1, priority=0, n_tokens=50, service_steps=1.0, waited_steps=1),
        ]

    assert hrrn(queue(1)) == [1, 0]
    assert hrrn(queue(9)) == [1, 0]
    assert hrrn(queue(11)) == [0, 1]


@pytest.mark.parametrize("name", POLICIES)
def test_who_was_passed_too_often_goes_first_in_its_priority(name: str) -> None:
    tempting = [QueueEntry(seq=10 + i, priority=0, n_tokens=40, n_cached=39, path=(1,)) for i in range(5)]
    overdue = QueueEntry(seq=1, priority=0, n_tokens=5000, service_steps=10.0, passed=MAX_PASSED)
    urgent = QueueEntry(seq=20, priority=1, n_tokens=5000, service_steps=10.0)
    queue = [*tempting, overdue, urgent]
    assert POLICIES[name].order(queue)[:2] == [6, 5]


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_returns_every_position_once_by_priority_and_whatever_the_order_of_the_snapshot(name: str) -> None:
    g = random.Random(5)
    queue = [
        QueueEntry(
            seq=i,
            priority=g.randrange(3),
            n_tokens=g.randrange(1, 100),
            n_cached=g.randrange(0, 2),
            path=tuple(g.randrange(1, 4) for _ in range(g.randrange(3))),
            waited_steps=g.randrange(50),
            service_steps=g.choice([1.0, 2.0, 7.0]),
            passed=g.choice([-3, 0, MAX_PASSED]),
        )
        for i in range(60)
    ]
    order = POLICIES[name].order(queue)
    assert sorted(order) == list(range(len(queue)))
    assert [queue[i].priority for i in order] == sorted((entry.priority for entry in queue), reverse=True)
    shuffled = g.sample(queue, len(queue))
    assert [shuffled[i].seq for i in POLICIES[name].order(shuffled)] == [queue[i].seq for i in order]
    assert POLICIES[name].order([]) == []
