"""In which order waiting requests are tried: pure functions of a snapshot of the queue. How many fit is admission's business."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


class QueueEntry(NamedTuple):
    """A waiting request as a policy sees it."""

    seq: int  # order of arrival; a retracted request keeps its own
    priority: int  # higher goes first
    n_tokens: int  # known tokens, prompt and generated ones
    n_cached: int  # leading tokens that the prefix cache holds now (0 where the policy does not ask)


class Policy(NamedTuple):
    """`order` returns the positions of the queue, first to be admitted first."""

    order: Callable[[Sequence[QueueEntry]], list[int]]
    needs_cached: bool


def fcfs(queue: Sequence[QueueEntry]) -> list[int]:
    """First come, first served, within a priority."""
    return sorted(range(len(queue)), key=lambda i: (-queue[i].priority, queue[i].seq))


def lpm(queue: Sequence[QueueEntry]) -> list[int]:
    """Longest cached prefix first, within a priority; ties in order of arrival. Raises the hit rate, may let others wait."""
    return sorted(range(len(queue)), key=lambda i: (-queue[i].priority, -queue[i].n_cached, queue[i].seq))


POLICIES: dict[str, Policy] = {
    "fcfs": Policy(fcfs, needs_cached=False),
    "lpm": Policy(lpm, needs_cached=True),
}
