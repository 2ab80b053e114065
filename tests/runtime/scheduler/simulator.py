"""Random schedules of the step protocol: the real Scheduler and event loop against a fake worker that knows what every slot must hold.

`python -m tests.runtime.scheduler.simulator FIRST LAST` runs the seeds [FIRST, LAST) and prints what happened in them. What is asserted is
in referee.py, who says what and when in servers.py, what token follows in model.py; here the ends meet, and every output is compared
with the request's solo run.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from unittest.mock import patch

from gristmill.memory.kv_event_reader import CacheMirror
from gristmill.memory.kv_events import KvEventBatch, to_event
from gristmill.memory.radix_cache import native_tree
from gristmill.messages import Abort, Control, Mask, Message, Out, Reply, Result, Step, Submit
from gristmill.scheduler import sharing
from gristmill.scheduler.loops import event_loop
from gristmill.scheduler.request import Request
from gristmill.scheduler.scheduler import Scheduler
from tests.runtime.scheduler.fake_worker import FakeWorker
from tests.runtime.scheduler.model import Case, FakeMasks, is_masked, is_penalized, solo
from tests.runtime.scheduler.referee import Referee, SpyTree
from tests.runtime.scheduler.servers import RandomServer

_CHANGING = (
    "drain",
    "send",
)  # moments after the scheduler released, planned or applied something: it is looked at, whatever the server says


@dataclass
class _Choice:
    """What the detokenizer saw of one request."""

    tokens: list[int] = field(default_factory=list)
    scored: list[int] = field(default_factory=list)
    n_logprobs: int = 0
    reason: str | None = None
    code: str | None = None
    cached: int = 0
    told_cached: int = -1


class Server(Protocol):
    """Who says what and when; see servers.py."""

    def at(self, io: FakeIO, moment: str) -> bool:
        """Say something to `io`, or nothing; returns whether it did. Called between any two actions of the loop."""
        ...

    def idle(self, io: FakeIO) -> bool:
        """Nothing is left to compute: say the next thing; False when there is none."""
        ...


class FakeIO:
    """The LoopIO of a schedule: lets the server speak between any two actions, runs the worker, listens as the detokenizer.

    The moments: `drain` at the top of a turn, `send` after a step was planned and sent, `mask` after its mask, `recv` before the worker
    runs the oldest step, `result` when its result is there and not applied, `publish` after each message for the detokenizer.
    """

    def __init__(self, case: Case, server: Server, scheduler: Scheduler, referee: Referee) -> None:
        self.case, self.server, self.scheduler, self.referee = case, server, scheduler, referee
        self.worker = FakeWorker(case)
        self.in_flight: deque[Step] = deque()
        self.submits: dict[str, Submit] = {}
        self.choices: dict[str, _Choice] = {}
        self.late: set[str] = set()  # submitted after the engine was told to end
        self.cut: set[str] = set()  # aborted while open, or open when the engine was told to end at once
        self.open: dict[int, str] = {}
        self.replies: list[Reply] = []
        self.controls: list[Control] = []
        self.mirror, self.n_kv_events = CacheMirror(), 0
        self.n_moments, self.n_idle, self.n_after_end = 0, 0, 0
        self.stopped = self.ended = False

    # --- the server

    def say(self, message: Message) -> None:
        if isinstance(message, Submit):
            self.submits[message.rid] = message
            self.choices[message.rid] = _Choice()
            if any(control.op == "shutdown" for control in self.controls):
                self.late.add(message.rid)
        elif isinstance(message, Abort):
            if message.rid in self.choices and self.choices[message.rid].reason is None:
                self.cut.add(message.rid)
        elif isinstance(message, Control):
            self.controls.append(message)
            if message.op == "shutdown" and not message.args.get("drain"):
                self.cut |= self.open_rids()
        self.scheduler.handle(message)

    def open_rids(self) -> set[str]:
        """Requests that the detokenizer does not know to be closed."""
        return {rid for rid, choice in self.choices.items() if choice.reason is None}

    def control(self, op: str, **args: Any) -> None:
        self.say(Control(len(self.controls) + 1, op, args))

    def _moment(self, name: str) -> bool:
        said = not self.ended and self.server.at(self, name)
        self.n_moments += 1
        if said or name in _CHANGING:
            self.referee.check(self.scheduler)
        return said

    # --- LoopIO

    def drain(self) -> None:
        self._follow_events()
        self._moment("drain")

    def _follow_events(self) -> None:
        """The mirror hears what the KV events say, and must have as much as the prefix cache, then."""
        changes = self.scheduler.pool.take_events()
        tree, page_size = self.scheduler.pool.tree, self.case.config.page_size
        if not self.case.config.kv_events or tree is None:
            assert not changes
            return
        if changes:
            self.n_kv_events += len(changes)
            self.mirror.apply(KvEventBatch(0.0, [to_event(change, page_size) for change in changes]))
        assert len(self.mirror.pages) * page_size == tree.size, "the KV events and the prefix cache do not agree"

    def compare_mirror(self) -> None:
        """Prompt by prompt, the mirror has what the prefix cache has."""
        self._follow_events()
        if self.case.config.kv_events and (tree := self.scheduler.pool.tree) is not None:
            for submit in self.submits.values():
                cached = tree.match_length(submit.ids, submit.extra_key)
                assert self.mirror.match_length(submit.ids, self.case.config.page_size, submit.extra_key) == cached

    def wait_input(self) -> None:
        if self.server.idle(self):
            self.n_idle = 0
        elif self.scheduler.controls.paused:
            self.control("continue")
        elif not self.open_rids() and len(self.replies) == len(self.controls):
            self.stopped = True
        else:
            self.n_idle += 1
            assert self.n_idle < 5, "the scheduler waits for input although a request is open or a control has no reply"

    def send_step(self, step: Step) -> None:
        self.referee.on_step(step, self.scheduler)
        self.worker.inbox.append(step)
        self.in_flight.append(step)
        self._moment("send")

    def send_mask(self, mask: Mask) -> None:
        self.worker.inbox.append(mask)
        self._moment("mask")

    def recv_result(self, return_on_input: bool) -> Result | None:
        if self._moment("recv") and return_on_input:
            return None
        result = self.worker.execute()
        self.in_flight.popleft()
        self.referee.on_result(result, self.worker)
        self._moment("result")
        return result

    def publish(self, messages: Sequence[Message]) -> None:
        for message in messages:
            if isinstance(message, Reply):
                self.replies.append(message)
                continue
            assert isinstance(message, Out)
            self._read_out(message)
            self._moment("publish")

    # --- the detokenizer

    def _read_out(self, out: Out) -> None:
        for opened in out.open:
            assert opened.idx not in self.open, f"idx {opened.idx} was given out while it is open"
            self.open[opened.idx] = opened.rid
        for idx, n_cached in zip(out.cached[::2].tolist(), out.cached[1::2].tolist()):
            choice = self.choices[self.open[idx]]
            assert not choice.tokens and choice.told_cached < 0, "what was cached is told once, and before the first token"
            choice.told_cached = n_cached
        for idx, token in zip(out.idx.tolist(), out.tok.tolist()):
            self.choices[self.open[idx]].tokens.append(token)
        for block in out.logprobs:
            choice, n_prompt = self.choices[self.open[block.key]], len(self.submits[self.open[block.key]].ids)
            if block.start >= n_prompt:
                assert block.ids[0] == choice.tokens[block.start - n_prompt]
                choice.n_logprobs += 1
            else:
                choice.scored += range(block.start, block.start + len(block.ids))
        for closed in out.close:
            choice = self.choices[self.open.pop(closed.idx)]
            choice.reason, choice.code, choice.cached = closed.reason, closed.code, closed.cached_tokens
            assert closed.reason != "error" or (closed.error and closed.code and closed.status in (400, 500, 503))

    # --- the end

    def finish(self) -> None:
        """After the loop: what is still in flight comes back and is thrown away, as when the engine ends at once."""
        self.ended, self.n_after_end = True, len(self.in_flight)
        self.publish(self.scheduler.take())
        while self.in_flight:
            step = self.in_flight.popleft()
            result = self.worker.execute()
            self.referee.on_result(result, self.worker)
            out = self.scheduler.apply(step, result)
            self.publish([out] if out is not None else [])
        assert self.scheduler.plan() is None, "a step is planned after the end"

    def verify(self) -> Counter[str]:
        """Every output equals the solo run, or a beginning of it where the request was cut short."""
        totals: Counter[str] = Counter()
        for rid, submit in self.submits.items():
            choice, n = self.choices[rid], len(submit.ids)
            tokens, reason = solo(submit, self.case)
            assert choice.reason is not None, f"request {rid} was never closed"
            assert choice.cached <= max(0, n - 1)
            assert choice.told_cached == choice.cached or (not choice.tokens and choice.cached == 0)
            totals[f"closed by {choice.code or choice.reason}"] += 1
            if choice.code in ("queue_full", "context_length_exceeded") or rid in self.late:
                assert not choice.tokens and (choice.code == "shutting_down" or rid not in self.late)
                continue
            if rid in self.cut or choice.code == "pool_exceeded":
                assert choice.tokens == tokens[: len(choice.tokens)], f"request {rid} is no beginning of its solo run"
                assert choice.reason in ("abort", "stop", reason) or choice.code in ("pool_exceeded", "shutting_down")
                continue
            assert (choice.tokens, choice.reason) == (tokens, reason), (
                f"request {rid}: {choice.tokens} {choice.reason}, alone {tokens} {reason}"
            )
            if submit.prompt_logprobs_from >= 1 and (tokens or reason != "error"):
                assert choice.scored == list(range(submit.prompt_logprobs_from, n)), f"request {rid} scored {choice.scored}"
                totals["scored prompts"] += 1
            if submit.logprobs >= 0:
                assert choice.n_logprobs == len(tokens)
            totals["masked"] += is_masked(rid)
            totals["penalized"] += is_penalized(submit.sampling) and len(tokens) > 2
        n_shutdowns = sum(control.op == "shutdown" for control in self.controls)  # those are answered by the process
        assert not self.open and len(self.replies) == len(self.controls) - n_shutdowns
        return totals


class WatchedScheduler(Scheduler):
    """The real one, with the referee present at the moment when it gives a request up."""

    referee: Referee

    def _fail_for_room(self, request: Request) -> None:
        self.referee.on_sole_failure(self)
        super()._fail_for_room(request)


_STATS = ("retractions", "preemptions", "prefix_waits", "cached_tokens", "chunks", "zombie_rows", "aborts", "output_tokens")


def run_case(case: Case, server: Server) -> Counter[str]:
    """Run `case` with what `server` says; returns what happened. Raises AssertionError or SlotError at the first broken rule."""
    referee = Referee(case.config, case.depth)
    scheduler = WatchedScheduler(case.config, FakeMasks(), lambda config: SpyTree(native_tree(config), referee))
    scheduler.referee = referee
    io = FakeIO(case, server, scheduler, referee)
    with patch.object(sharing, "MIN_SHARED_TOKENS", case.min_shared_tokens):
        event_loop(scheduler, io, case.depth)
    io.finish()
    referee.check(scheduler)
    io.compare_mirror()
    totals = io.verify()
    counts, stats = scheduler.pool.counts(), scheduler.stats
    assert counts.locked == 0 and not scheduler.n_in_flight, f"idle, yet {counts}"
    if scheduler.running.windows is not None:
        window = scheduler.pool.window_counts()
        assert window.locked == scheduler.running.windows.reservations.reserved == 0, f"idle, yet {window}"
        totals["window slots freed below a live window"] += referee.n_window_freed
        totals["with a window pool"] += 1
    for name in _STATS:
        totals[name] += getattr(stats, name)
    totals["put back"] += totals["retractions"] + totals["preemptions"]
    totals["steps"] += stats.sent_step
    totals["KV events"] += io.n_kv_events
    totals["moments"] += io.n_moments
    totals["results after the end"] += io.n_after_end
    totals["evicted"] += referee.n_evicted
    totals["duplicates"] += referee.n_duplicates
    totals["masked rows"] += io.worker.n_masked_rows
    totals["flushes"] += sum(bool(reply.result and "freed_tokens" in reply.result) for reply in io.replies)
    totals["pauses"] += sum(bool(reply.result and reply.result.get("paused")) for reply in io.replies)
    totals["stale prefixes kept over a flush"] += referee.n_retired
    totals[f"depth {case.depth}"] += 1
    return totals


def run_schedule(seed: int) -> Counter[str]:
    """Run the random schedule of `seed`."""
    case = Case.draw(seed)
    return run_case(case, RandomServer(case))


def main(first: int, last: int) -> None:
    totals: Counter[str] = Counter()
    for seed in range(first, last):
        try:
            totals += run_schedule(seed)
        except BaseException:
            print(f"seed {seed}: {Case.draw(seed)}", file=sys.stderr)
            raise
    for name, count in sorted(totals.items()):
        print(f"{count:>9} {name}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
