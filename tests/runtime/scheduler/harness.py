"""A scheduler with a scripted worker, for tests that are about one request's life rather than about random schedules."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from gristmill.messages import EMIT_SAMPLE, NO_TOKEN, Close, Message, Out, Reply, Result, SamplingParams, Step, Submit, ints
from gristmill.scheduler.scheduler import Scheduler, SchedulerConfig

EOS = 2


class Harness:
    """Plans, answers with `token(rid, position)`, and keeps what the detokenizer would see. `depth` steps may be in flight.

    The default token is the position plus 100, so outputs say themselves where they belong.
    """

    def __init__(self, depth: int = 1, **config: Any) -> None:
        settings: dict[str, Any] = {"pool_tokens": 1000, "max_reqs": 8, "max_context": 500, "eos_ids": (EOS,), "lookahead_tokens": 1}
        self.scheduler = Scheduler(SchedulerConfig(**{**settings, **config}, check=True))
        self.depth = depth
        self.pending: deque[Step] = deque()
        self.steps: list[Step] = []
        self.tokens: dict[str, list[int]] = {}
        self.closed: dict[str, Close] = {}
        self.replies: list[Reply] = []
        self.script: dict[tuple[str, int], int] = {}  # (rid, position) -> token
        self._rid: dict[int, str] = {}

    def submit(self, rid: str, prompt: int | list[int], *, priority: int = 0, key: str = "", score_from: int = -1, **sampling: Any) -> None:
        """`prompt`: ids, or how many ids that no other request has."""
        ids = [sum(map(ord, rid)) * 1000 + i for i in range(prompt)] if isinstance(prompt, int) else prompt
        params = SamplingParams(**{"max_tokens": 4, **sampling})
        self.tokens[rid] = []
        self.say(Submit(rid, ints(ids), params, priority=priority, extra_key=key, prompt_logprobs_from=score_from))

    def say(self, message: Message) -> None:
        self.scheduler.handle(message)
        self._listen(self.scheduler.take())

    def plan(self) -> Step | None:
        step = self.scheduler.plan()
        self._listen(self.scheduler.take())
        if step is not None:
            self.pending.append(step)
            self.steps.append(step)
        return step

    def answer(self) -> None:
        """Apply the result of the oldest step in flight."""
        step = self.pending.popleft()
        ids = np.full(len(step.req_slot), NO_TOKEN, dtype=np.int32)
        for row in np.flatnonzero(step.emit == EMIT_SAMPLE).tolist():
            request = self.scheduler.running.by_slot[int(step.req_slot[row])]
            assert request is not None
            position = int(step.kv_len[row])
            ids[row] = self.script.get((request.rid, position), position + 100)
        out = self.scheduler.apply(step, Result(step.step, ids))
        self._listen([out] if out is not None else [])

    def turn(self) -> bool:
        """Plan once, then apply until fewer than `depth` steps are in flight; False when there is nothing to do."""
        step = self.plan()
        if step is None and not self.pending:
            return False
        while self.pending and (step is None or len(self.pending) >= self.depth):
            self.answer()
            if step is None:
                break
        return True

    def run(self, limit: int = 5000) -> None:
        """Until nothing is left to do."""
        for _ in range(limit):
            if not self.turn():
                return
        raise AssertionError(f"not idle after {limit} turns")

    def _listen(self, messages: list[Any]) -> None:
        for message in messages:
            if isinstance(message, Reply):
                self.replies.append(message)
                continue
            assert isinstance(message, Out)
            self._rid.update({opened.idx: opened.rid for opened in message.open})
            for idx, token in zip(message.idx.tolist(), message.tok.tolist()):
                self.tokens[self._rid[idx]].append(token)
            for closed in message.close:
                self.closed[self._rid[closed.idx]] = closed

    def reason(self, rid: str) -> str | None:
        return self.closed[rid].reason if rid in self.closed else None

    def assert_idle(self) -> None:
        """Nothing is locked, and all slots are free or evictable."""
        counts = self.scheduler.pool.counts()
        assert counts.locked == 0
        assert counts.free + counts.evictable == counts.total
        assert not self.scheduler.n_in_flight


def expected(n_prompt: int, n: int) -> list[int]:
    """The default output of `n` tokens after a prompt of `n_prompt`."""
    return [n_prompt + i + 100 for i in range(n)]
