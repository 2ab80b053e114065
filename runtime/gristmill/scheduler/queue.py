"""The waiting requests: who is there, and in which order the policy tries them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

import numpy as np

from gristmill.memory.radix_cache import RadixCache
from gristmill.scheduler.policy import Policy, QueueEntry
from gristmill.scheduler.request import Request

CONSIDERED_REQUESTS = 128  # the policy orders so many at a time, the first by priority and arrival: more would cost more than it gains


class WaitingQueue:
    """Requests by order of arrival; one that comes back keeps its place.

    Args:
        policy: Gives the order from a snapshot.
        pool: Asked for cached prefixes where the policy wants to know.
        prefill_tokens: Prompt tokens that a step computes at most, for the estimate of service times.
    """

    def __init__(self, policy: Policy, pool: RadixCache, prefill_tokens: int) -> None:
        self._policy, self._pool, self._prefill_tokens = policy, pool, prefill_tokens
        self._requests: dict[int, Request] = {}  # by seq
        self._order: list[tuple[int, int]] = []  # (-priority, seq), sorted
        self._n_admitted = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def top_priority(self) -> int:
        """The highest priority that waits; something does."""
        return -self._order[0][0]

    def add(self, request: Request, step: int) -> None:
        """`request` waits from now, when `step` steps were sent."""
        request.queued_step = step
        request.passed_after = self._n_admitted + len(self._requests)
        self._requests[request.seq] = request
        insort(self._order, (-request.priority, request.seq))

    def remove(self, request: Request, admitted: bool = False) -> None:
        """`request` waits no longer."""
        del self._requests[request.seq]
        del self._order[bisect_left(self._order, (-request.priority, request.seq))]
        self._n_admitted += admitted

    def ordered(self, step: int) -> list[Request]:
        """The next CONSIDERED_REQUESTS in the order of the policy, when `step` steps were sent."""
        considered = [self._requests[seq] for _, seq in self._order[:CONSIDERED_REQUESTS]]
        if len(considered) == 1 or self._policy.is_arrival:
            return considered
        return [considered[position] for position in self._policy.order([self._entry(request, step) for request in considered])]

    def _entry(self, request: Request, step: int) -> QueueEntry:
        n_cached, path = 0, np.empty(0, dtype=np.int64)
        if self._policy.needs_path:
            n_cached, path = self._pool.probe_path(request.ids, request.extra_key)
        elif self._policy.needs_cached:
            n_cached = self._pool.probe(request.ids, request.extra_key)
        return QueueEntry(
            request.seq,
            request.priority,
            len(request.ids),
            n_cached,
            tuple(path.tolist()),
            step - request.queued_step,
            max(1.0, (len(request.ids) - n_cached) / self._prefill_tokens),
            self._n_admitted - request.passed_after,
        )
