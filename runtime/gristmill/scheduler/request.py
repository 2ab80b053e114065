"""One choice of one request as the scheduler knows it, and the states that it goes through."""

from __future__ import annotations

from enum import Enum

import numpy as np

from gristmill.memory.radix_cache import Lease
from gristmill.messages import SamplingParams


class State(Enum):
    """waiting -> running -> ending -> gone; running -> parked -> waiting.

    PARKED: out of slots, planned no more, retracted when nothing of it is in flight.
    ENDING: closed, but steps in flight still name its slots.
    """

    WAITING = "waiting"
    RUNNING = "running"
    PARKED = "parked"
    ENDING = "ending"
    GONE = "gone"


_NEXT = {
    State.WAITING: {State.RUNNING, State.GONE},
    State.RUNNING: {State.PARKED, State.ENDING},
    State.PARKED: {State.WAITING, State.ENDING},
    State.ENDING: {State.GONE},
    State.GONE: set(),
}


class Request:
    """A request slot, a lease and private slots are held while it is running, parked or ending.

    Table positions, in order: what the tree owns is `tree_spans`; everything else in [0, n_slots) is private. The first span is the
    cached prefix, later ones were computed here and adopted. Between them may lie duplicates: computed here, but the
    tree had them meanwhile under other slots.
    """

    __slots__ = (
        "cached_tokens",
        "extra_key",
        "ids",
        "idx",
        "lease",
        "logprobs",
        "n_known",
        "n_prompt",
        "passed_after",
        "preempted",
        "priority",
        "queued_step",
        "req_slot",
        "rid",
        "sampling",
        "score_from",
        "seq",
        "state",
        "stop_ids",
        "tree_spans",
    )

    def __init__(
        self,
        rid: str,
        idx: int,
        seq: int,
        ids: np.ndarray,
        sampling: SamplingParams,
        *,
        priority: int,
        extra_key: str,
        logprobs: int,
        score_from: int,
    ) -> None:
        self.rid, self.idx, self.seq = rid, idx, seq
        self.ids = ids  # known ids while waiting; while it holds a request slot they are in the table
        self.n_prompt = len(ids)
        self.n_known = len(ids)  # known ids at the last admission: all of them are prefilled
        self.sampling, self.priority, self.extra_key, self.logprobs = sampling, priority, extra_key, logprobs
        self.score_from = score_from  # next prompt position to be scored, -1 when none is left
        self.stop_ids = frozenset(sampling.stop_token_ids)
        self.cached_tokens = -1  # at the first admission
        self.state = State.WAITING
        self.req_slot = -1
        self.lease = Lease(None, 0, 0)
        self.tree_spans: list[tuple[int, int]] = []
        self.queued_step, self.passed_after = 0, 0  # kept by the queue
        self.preempted = False  # parked for a request of higher priority, not for want of slots

    def move(self, state: State) -> None:
        """Go to `state`; anything but an arrow of the docstring above is a fault of the engine."""
        if state not in _NEXT[self.state]:
            raise RuntimeError(f"request {self.rid!r} cannot go from {self.state.value} to {state.value}")
        self.state = state

    @property
    def n_tree(self) -> int:
        """Table entries that the tree owns."""
        return sum(end - start for start, end in self.tree_spans)

    def is_private(self, n_slots: int) -> np.ndarray:
        """Which of the first `n_slots` table entries are this request's own."""
        private = np.ones(n_slots, dtype=bool)
        for start, end in self.tree_spans:
            private[start:end] = False
        return private
