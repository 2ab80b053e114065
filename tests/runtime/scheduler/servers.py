"""What the server of a schedule says and when: at random, or by a script."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gristmill.messages import Abort, Message, SamplingParams, Submit, ints
from tests.runtime.scheduler.model import VOCAB, Case

if TYPE_CHECKING:
    from tests.runtime.scheduler.simulator import FakeIO

Event = tuple[int, Message | tuple[str, dict[str, bool]]]  # (moment, what is said); controls as (op, args)


class RandomServer:
    """Draws submits, aborts and controls from the seed of the case. Requests arrive where the scheduler reads its input; the rest
    comes at any moment."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.random = random.Random(case.seed ^ 0x5EED)
        base = random.Random(case.seed ^ 0xBA5E)
        self.prefixes = [[base.randrange(VOCAB) for _ in range(24)] for _ in range(2)]
        self.n_submitted = 0

    def _submit(self) -> Submit:
        g, case = self.random, self.case
        prompt = g.choice(self.prefixes)[: g.randrange(0, 20)] + [g.randrange(VOCAB) for _ in range(g.randrange(1, 6))]
        if g.random() < 0.03:
            prompt = [1] * (case.config.pool_tokens + 1)
        penalized = g.random() < case.p_penalty
        sampling = SamplingParams(
            seed=g.randrange(3),
            max_tokens=g.choice([0, 1, 2, 5, 12, 30, 60]),
            min_tokens=g.choice([0, 0, 0, 3]),
            ignore_eos=g.random() < 0.1,
            stop_token_ids=(g.randrange(VOCAB),) if g.random() < 0.1 else (),
            presence_penalty=g.choice([0.0, 1.0]) if penalized else 0.0,
            frequency_penalty=g.choice([0.0, 1.0]) if penalized else 0.0,
            repetition_penalty=g.choice([1.0, 1.5]) if penalized else 1.0,
        )
        rid = f"{self.n_submitted}g" if g.random() < case.p_mask else f"{self.n_submitted}"
        self.n_submitted += 1
        return Submit(
            rid,
            ints(prompt),
            sampling,
            priority=g.choice(case.priorities),
            extra_key=g.choice(["", "", "", "a"]),
            logprobs=g.choice([-1, -1, 0]),
            prompt_logprobs_from=g.randrange(1, len(prompt) + 1) if g.random() < 0.15 else -1,
        )

    def at(self, io: FakeIO, moment: str) -> bool:
        g, said = self.random, False
        if moment in ("drain", "recv"):
            while self.n_submitted < self.case.n_requests and g.random() < self.case.p_arrival * 0.6:
                io.say(self._submit())
                said = True
        if io.submits and g.random() < self.case.p_abort:
            io.say(Abort(g.choice([*io.submits, "nobody"]), g.choice(["client", "stop"])))
            said = True
        if g.random() < self.case.p_control:
            io.control(g.choice(["flush", "flush", "flush", "pause", "no-such-op"]))
            said = True
        if io.scheduler.controls.paused and g.random() < 0.1:
            io.control("continue")
            said = True
        return said

    def idle(self, io: FakeIO) -> bool:
        if io.scheduler.controls.paused or self.n_submitted == self.case.n_requests:
            return False
        io.say(self._submit())
        return True


class ScriptedServer:
    """Says each message at its moment (their number since the start), or as soon as nothing is left to compute before that."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.events = deque(sorted(events, key=lambda event: event[0]))

    def at(self, io: FakeIO, moment: str) -> bool:
        said = False
        while self.events and self.events[0][0] <= io.n_moments:
            self._say_next(io)
            said = True
        return said

    def idle(self, io: FakeIO) -> bool:
        if io.scheduler.controls.paused or not self.events:
            return False
        self._say_next(io)
        return True

    def _say_next(self, io: FakeIO) -> None:
        message = self.events.popleft()[1]
        if isinstance(message, tuple):
            io.control(message[0], **message[1])
        else:
            io.say(message)
