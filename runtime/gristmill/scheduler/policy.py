"""In which order waiting requests are tried: pure functions of a snapshot of the queue. How many fit is admission's business.

Every policy orders within a priority; higher priorities go first. Whatever a policy prefers, a request that was passed by
MAX_PASSED later ones is overdue and goes before all others of its priority, so none waits for ever.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

MAX_PASSED = 64


class QueueEntry(NamedTuple):
    """A waiting request as a policy sees it."""

    seq: int  # order of arrival; a retracted request keeps its own
    priority: int  # higher goes first
    n_tokens: int  # known tokens, prompt and generated ones
    n_cached: int = 0  # leading tokens that the prefix cache holds now (0 where the policy does not ask)
    path: tuple[int, ...] = ()  # nodes of the prefix tree on the way to the end of that prefix (empty where the policy does not ask)
    waited_steps: int = 0  # steps sent since it was queued
    service_steps: float = 1.0  # steps that computing the rest of its known tokens takes, at least 1
    passed: int = 0  # requests that came later and were admitted before it, at least


class Policy(NamedTuple):
    """`order` returns the positions of the queue, first to be admitted first. `is_arrival`: it is the order by priority and arrival."""

    order: Callable[[Sequence[QueueEntry]], list[int]]
    is_arrival: bool = False
    needs_cached: bool = False
    needs_path: bool = False


def _by(queue: Sequence[QueueEntry], key: Callable[[QueueEntry], Any]) -> list[int]:
    """Positions by priority, the overdue in order of arrival, then by `key`; ties in order of arrival."""

    def rank(position: int) -> tuple[Any, ...]:
        entry = queue[position]
        if entry.passed >= MAX_PASSED:
            return -entry.priority, 0, 0, entry.seq
        return -entry.priority, 1, key(entry), entry.seq

    return sorted(range(len(queue)), key=rank)


def fcfs(queue: Sequence[QueueEntry]) -> list[int]:
    """First come, first served."""
    return sorted(range(len(queue)), key=lambda i: (-queue[i].priority, queue[i].seq))


def lpm(queue: Sequence[QueueEntry]) -> list[int]:
    """Longest cached prefix first: raises the hit rate."""
    return _by(queue, lambda entry: -entry.n_cached)


def dfs_weight(queue: Sequence[QueueEntry]) -> list[int]:
    """Depth first through the prefix tree, into the subtree with most waiting requests first.

    Requests that share a prefix run together, so a prefix is read by all who want it before it is given up: the schedule of the
    RadixAttention paper (Zheng et al. 2023, section 3, theorem 3.1) made online, with the number waiting as the weight.
    """
    weight: dict[tuple[int, int], int] = defaultdict(int)  # (priority, node) -> requests that wait below it
    for entry in queue:
        for node in entry.path:
            weight[entry.priority, node] += 1

    def key(entry: QueueEntry) -> tuple[tuple[int, int], ...]:
        # children before the requests that end at their parent: (0, ...) sorts before (1, ...)
        steps = [(-weight[entry.priority, node], node) for node in entry.path]
        return (*steps, (1, 0))

    return _by(queue, key)


def shortest_prefill(queue: Sequence[QueueEntry]) -> list[int]:
    """Fewest tokens to compute first: lowest mean time to first token."""
    return _by(queue, lambda entry: entry.n_tokens - entry.n_cached)


def hrrn(queue: Sequence[QueueEntry]) -> list[int]:
    """Highest response ratio next, (waited + service) / service in steps: short prompts first, but waiting makes every prompt urgent.

    Brinch Hansen, "An analysis of response ratio scheduling", 1971.
    """
    return _by(queue, lambda entry: -(entry.waited_steps + entry.service_steps) / entry.service_steps)


POLICIES: dict[str, Policy] = {
    "fcfs": Policy(fcfs, is_arrival=True),
    "lpm": Policy(lpm, needs_cached=True),
    "dfs-weight": Policy(dfs_weight, needs_cached=True, needs_path=True),
    "shortest-prefill": Policy(shortest_prefill, needs_cached=True),
    "hrrn": Policy(hrrn, needs_cached=True),
}
