"""The waiting requests: who is there, and in which order the policy tries them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from gristmill.memory.radix_cache import RadixCache
from gristmill.scheduler.policy import Policy, QueueEntry
from gristmill.scheduler.request import Request

PROBED_REQUESTS = 128  # requests whose cached prefix a policy may know; looking up more would cost more than it gains


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
        self._priorities: Counter[int] = Counter()
        self._n_admitted = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def top_priority(self) -> int:
        """The highest priority that waits; something does."""
        return max(self._priorities)

    def add(self, request: Request, step: int) -> None:
        """`request` waits from now, when `step` steps were sent."""
        request.queued_step = step
        request.passed_after = self._n_admitted + len(self._requests)
        self._requests[request.seq] = request
        self._priorities[request.priority] += 1

    def remove(self, request: Request, admitted: bool = False) -> None:
        """`request` waits no longer."""
        del self._requests[request.seq]
        self._priorities[request.priority] -= 1
        if not self._priorities[request.priority]:
            del self._priorities[request.priority]
        self._n_admitted += admitted

    def ordered(self, step: int) -> list[Request]:
        """All of them in the order of the policy, when `step` steps were sent."""
        waiting = list(self._requests.values())
        if len(waiting) == 1:
            return waiting
        return [waiting[position] for position in self._policy.order(self.snapshot(step))]

    def snapshot(self, step: int) -> list[QueueEntry]:
        """What the policy sees, in no particular order."""
        return [self._entry(request, step, position < PROBED_REQUESTS) for position, request in enumerate(self._requests.values())]

    def _entry(self, request: Request, step: int, probed: bool) -> QueueEntry:
        n_cached, path = 0, np.empty(0, dtype=np.int64)
        if probed and self._policy.needs_path:
            n_cached, path = self._pool.probe_path(request.ids, request.extra_key)
        elif probed and self._policy.needs_cached:
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
