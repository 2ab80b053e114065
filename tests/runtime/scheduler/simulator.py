"""Random schedules of the step protocol: the real Scheduler and event loop against a fake worker that knows what every slot must hold.

`python -m tests.runtime.scheduler.simulator FIRST LAST` runs the seeds [FIRST, LAST) and prints what happened in them. What is asserted is
in referee.py; here are the schedules, the worker, and the comparison of every output with the request's solo run.
"""

from __future__ import annotations

import random
import sys
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from gristmill.memory.radix_cache import native_tree
from gristmill.messages import (
    EMIT_SAMPLE,
    INVALID_TOKEN,
    NO_TOKEN,
    Abort,
    Control,
    LogprobBlock,
    Mask,
    Message,
    Out,
    Reply,
    Result,
    SamplingParams,
    Step,
    Submit,
    floats,
    ints,
)
from gristmill.scheduler.loops import event_loop
from gristmill.scheduler.request import Request
from gristmill.scheduler.scheduler import Scheduler, SchedulerConfig
from tests.runtime.scheduler.referee import Referee, SpyTree

VOCAB = 8
EOS = 0
_ALL = (1 << VOCAB) - 1
_HASH = 0x9E3779B97F4A7C15


def mix(*values: int) -> int:
    """A 62-bit hash, the same in every process."""
    h = 0
    for value in values:
        h = ((h ^ (value + 0x7F4A7C15)) * _HASH + 0x632BE59BD9B4E019) & (2**64 - 1)
        h ^= h >> 29
    return h >> 2


def extend_hash(h: int, token: int) -> int:
    """The hash of a sequence from that of the sequence before its last token: what the KV of that token depends on."""
    return mix(h, token)


@dataclass(frozen=True)
class Case:
    """The fixed parameters of one schedule."""

    seed: int
    depth: int
    config: SchedulerConfig
    n_requests: int
    eos_permille: int
    invalid_permille: int
    p_arrival: float
    p_abort: float
    p_control: float

    @staticmethod
    def draw(seed: int) -> Case:
        g = random.Random(seed)
        page = g.choice([1, 1, 2, 3, 4, 8])
        pool = g.choice([24, 40, 60, 200])
        config = SchedulerConfig(
            pool_tokens=pool + g.randrange(page),
            max_reqs=g.choice([2, 5, 12]),
            max_context=g.choice([24, 33, 64, 300]),
            page_size=page,
            eos_ids=(EOS,),
            max_queued=g.choice([6, 100, 100, 100]),
            chunk_tokens=g.choice([0, 1, 3, 7, 100]),
            mixed_chunks=g.random() < 0.7,
            radix_cache=g.random() < 0.85,
            policy=g.choice(["fcfs", "lpm"]),
            vocab_size=VOCAB,
            lookahead_tokens=g.choice([1, 1, 4, 16]),
            new_token_ratio=g.choice([0.0, 0.0, 0.4]),
            check=True,
        )
        return Case(
            seed=seed,
            depth=g.choice([1, 2, 2, 3]),
            config=config,
            n_requests=g.randrange(6, 20),
            eos_permille=g.choice([0, 30, 150]),
            invalid_permille=g.choice([0, 0, 10]),
            p_arrival=g.choice([0.15, 0.5, 1.0]),
            p_abort=g.choice([0.0, 0.01, 0.05]),
            p_control=g.choice([0.0, 0.0, 0.03]),
        )


def allowed(h: int) -> int:
    """The mask (bit set = allowed) of a grammar request after the sequence of hash `h`; never empty."""
    return mix(h, 77) & _ALL or _ALL


def draw_token(h: int, sampling: SamplingParams, n_out: int, mask: int, case: Case) -> int:
    """The next token after a sequence of hash `h`: a function of nothing else but the request's own parameters."""
    x = mix(h, sampling.seed)
    if (x >> 20) % 1000 < case.invalid_permille:
        return INVALID_TOKEN
    token = EOS if (x >> 8) % 1000 < case.eos_permille else 1 + x % (VOCAB - 1)
    banned = {EOS, *sampling.stop_token_ids} if n_out < sampling.min_tokens else set()
    for offset in range(VOCAB):
        candidate = (token + offset) % VOCAB
        if mask >> candidate & 1 and candidate not in banned:
            return candidate
    return token  # nothing is left; the ban gives way


def is_masked(rid: str) -> bool:
    return rid.endswith("g")


class FakeMasks:
    """Grammars of the requests whose id ends in "g": the mask depends on the whole sequence, so one token too few gives another."""

    def wants(self, rid: str) -> bool:
        return is_masked(rid)

    def bits(self, rid: str, ids: np.ndarray) -> np.ndarray:
        h = 0
        for token in ids.tolist():
            h = extend_hash(h, token)
        return ints([allowed(h)])


def solo(submit: Submit, case: Case) -> tuple[list[int], str]:
    """(tokens, close reason) of the request alone in an endless pool."""
    sampling, out, h = submit.sampling, [], 0
    for token in submit.ids.tolist():
        h = extend_hash(h, token)
    limit = min(len(submit.ids) + sampling.max_tokens, case.config.max_context)
    while len(submit.ids) + len(out) < limit:
        token = draw_token(h, sampling, len(out), allowed(h) if is_masked(submit.rid) else _ALL, case)
        if token == INVALID_TOKEN:
            return out, "error"
        out.append(token)
        h = extend_hash(h, token)
        ends = (token == EOS and not sampling.ignore_eos) or token in sampling.stop_token_ids
        if ends and len(out) > sampling.min_tokens:
            return out, "stop"
    return out, "length"


@dataclass
class _Sequence:
    """What a worker holds for one request slot."""

    ids: list[int] = field(default_factory=list)
    hashes: np.ndarray = field(default_factory=lambda: np.zeros(400, dtype=np.int64))
    table: np.ndarray = field(default_factory=lambda: np.full(400, -1, dtype=np.int64))
    n_prompt: int = 0
    sampling: SamplingParams = field(default_factory=SamplingParams)
    logprobs: int = -1
    score_from: int = -1

    def append(self, token: int) -> None:
        n = len(self.ids)
        self.hashes[n] = extend_hash(int(self.hashes[n - 1]) if n else 0, token)
        self.ids.append(token)


class FakeWorker:
    """Executes steps in order and as late as possible; asserts that every slot it reads holds what its table says."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.sequences = [_Sequence() for _ in range(case.config.max_reqs)]
        self.kv = np.zeros(case.config.pool_tokens, dtype=np.int64)
        self.inbox: deque[Step | Mask] = deque()

    def execute(self) -> Result:
        """The result of the next step."""
        step = self.inbox.popleft()
        assert isinstance(step, Step), "a mask came where a step was due"
        masks: dict[int, int] = {}
        if step.needs_mask:
            mask = self.inbox.popleft()
            assert isinstance(mask, Mask) and mask.step == step.step, "the message after a step with needs_mask is its mask"
            masks = dict(zip(mask.rows.tolist(), mask.bits.tolist()))
        for new in step.new:
            sequence = self.sequences[new.req_slot] = _Sequence(
                n_prompt=new.n_prompt, sampling=new.sampling, logprobs=new.logprobs, score_from=new.prompt_logprobs_from
            )
            for token in new.ids.tolist():
                sequence.append(token)
        offset = 0
        for write in step.writes:
            self.sequences[write.req_slot].table[write.start : write.start + write.n] = step.write_slots[offset : offset + write.n]
            offset += write.n
        assert offset == len(step.write_slots)
        tokens, blocks = [], []
        for row, (slot, q_len, kv_len, emit) in enumerate(zip(*(a.tolist() for a in (step.req_slot, step.q_len, step.kv_len, step.emit)))):
            sequence = self.sequences[slot]
            start = kv_len - q_len
            assert 0 <= start < kv_len <= len(sequence.ids), (
                f"row {row} of step {step.step} covers [{start}, {kv_len}) of {len(sequence.ids)}"
            )
            self.kv[sequence.table[start:kv_len]] = sequence.hashes[start:kv_len]
            read = self.kv[sequence.table[:kv_len]]
            assert np.array_equal(read, sequence.hashes[:kv_len]), f"row {row} of step {step.step} reads KV that is not its own"
            blocks += self._score_prompt(row, sequence, start, kv_len)
            tokens.append(self._emit(row, sequence, kv_len, masks.get(row), blocks) if emit == EMIT_SAMPLE else NO_TOKEN)
        return Result(step.step, ints(tokens), logprobs=blocks)

    def _emit(self, row: int, sequence: _Sequence, kv_len: int, mask: int | None, blocks: list[LogprobBlock]) -> int:
        h = int(sequence.hashes[kv_len - 1])
        assert mask is None or mask == allowed(h), f"the mask of row {row} was made for another sequence"
        token = draw_token(h, sequence.sampling, kv_len - sequence.n_prompt, _ALL if mask is None else mask, self.case)
        sequence.append(max(token, 0))  # an invalid distribution leaves token 0 behind
        if sequence.logprobs >= 0:
            blocks.append(LogprobBlock(row, kv_len, ints([token]), floats([-1.0])))
        return token

    def _score_prompt(self, row: int, sequence: _Sequence, start: int, end: int) -> list[LogprobBlock]:
        """Row position p scores the known token at p+1; the last one scores across the chunk border."""
        if sequence.score_from < 1:
            return []
        first, last = max(start + 1, sequence.score_from), min(end + 1, sequence.n_prompt)
        if first >= last:
            return []
        return [LogprobBlock(row, first, ints(sequence.ids[first:last]), floats([-1.0] * (last - first)))]


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


class FakeIO:
    """The LoopIO of a schedule: draws what the server says, runs the worker, listens as the detokenizer."""

    def __init__(self, case: Case, scheduler: Scheduler, referee: Referee) -> None:
        self.case, self.scheduler, self.referee = case, scheduler, referee
        self.random = random.Random(case.seed ^ 0x5EED)
        self.worker = FakeWorker(case)
        self.submits: dict[str, Submit] = {}
        self.choices: dict[str, _Choice] = {}
        self.aborted: dict[str, str] = {}
        self.open: dict[int, str] = {}
        self.n_controls, self.replies, self.idle, self.stopped = 0, [], 0, False
        base = random.Random(case.seed ^ 0xBA5E)
        self.prefixes = [[base.randrange(VOCAB) for _ in range(24)] for _ in range(2)]

    # --- the server

    def _say(self, message: Message) -> None:
        self.scheduler.handle(message)

    def _arrive(self) -> None:
        g, n = self.random, len(self.submits)
        prompt = g.choice(self.prefixes)[: g.randrange(0, 20)] + [g.randrange(VOCAB) for _ in range(g.randrange(1, 6))]
        if g.random() < 0.03:
            prompt = [1] * (self.case.config.pool_tokens + 1)
        sampling = SamplingParams(
            seed=g.randrange(3),
            max_tokens=g.choice([0, 1, 2, 5, 12, 30, 60]),
            min_tokens=g.choice([0, 0, 0, 3]),
            ignore_eos=g.random() < 0.1,
            stop_token_ids=(g.randrange(VOCAB),) if g.random() < 0.1 else (),
        )
        rid = f"{n}g" if g.random() < 0.15 else f"{n}"
        self.submits[rid] = Submit(
            rid,
            ints(prompt),
            sampling,
            priority=g.choice([0, 0, 0, 1]),
            extra_key=g.choice(["", "", "", "a"]),
            logprobs=g.choice([-1, -1, 0]),
            prompt_logprobs_from=g.randrange(1, len(prompt) + 1) if g.random() < 0.15 else -1,
        )
        self.choices[rid] = _Choice()
        self._say(self.submits[rid])

    def _abort(self) -> None:
        g = self.random
        rid = g.choice([*self.submits, "nobody"])
        reason = g.choice(["client", "stop"])
        if rid in self.choices and self.choices[rid].reason is None:
            self.aborted.setdefault(rid, reason)
        self._say(Abort(rid, reason))

    def _control(self) -> None:
        self.n_controls += 1
        self._say(Control(self.n_controls, self.random.choice(["flush", "flush", "flush", "pause", "no-such-op"])))

    def _events(self) -> bool:
        """Let the server say something, or nothing; returns whether it did."""
        g, before = self.random, (len(self.submits), self.n_controls, len(self.aborted))
        while len(self.submits) < self.case.n_requests and g.random() < self.case.p_arrival * 0.6:
            self._arrive()
        if self.submits and g.random() < self.case.p_abort:
            self._abort()
        if g.random() < self.case.p_control:
            self._control()
        if self.scheduler.controls.paused and g.random() < 0.3:
            self.n_controls += 1
            self._say(Control(self.n_controls, "continue"))
        return before != (len(self.submits), self.n_controls, len(self.aborted))

    # --- LoopIO

    def drain(self) -> None:
        self.referee.check(self.scheduler)
        self._events()

    def wait_input(self) -> None:
        if len(self.submits) == self.case.n_requests and all(choice.reason for choice in self.choices.values()):
            self.stopped = True
            return
        if self.scheduler.controls.paused:
            self.n_controls += 1
            self._say(Control(self.n_controls, "continue"))
        elif len(self.submits) < self.case.n_requests:
            self._arrive()
            self.idle = 0
        else:
            self.idle += 1
            assert self.idle < 5, "the scheduler waits for input although requests are open"

    def send_step(self, step: Step) -> None:
        self.referee.on_step(step, self.worker.sequences)
        self.worker.inbox.append(step)
        self.referee.check(self.scheduler)

    def send_mask(self, mask: Mask) -> None:
        self.worker.inbox.append(mask)

    def recv_result(self, return_on_input: bool) -> Result | None:
        if self._events() and return_on_input:
            return None
        result = self.worker.execute()
        self.referee.on_result(result, self.worker)
        return result

    def publish(self, messages: Sequence[Message]) -> None:
        for message in messages:
            if isinstance(message, Reply):
                self.replies.append(message)
                continue
            assert isinstance(message, Out)
            self._read_out(message)

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
            if choice.code in ("queue_full", "context_length_exceeded"):
                assert not choice.tokens
                continue
            if rid in self.aborted or choice.code == "pool_exceeded":
                assert choice.tokens == tokens[: len(choice.tokens)], f"request {rid} is no beginning of its solo run"
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
        assert not self.open and len(self.replies) == self.n_controls
        return totals


class WatchedScheduler(Scheduler):
    """The real one, with the referee present at the moment when it gives a request up."""

    referee: Referee

    def _fail_for_room(self, request: Request) -> None:
        self.referee.on_sole_failure(self)
        super()._fail_for_room(request)


def run_schedule(seed: int) -> Counter[str]:
    """Run the schedule of `seed`; returns what happened in it. Raises AssertionError or SlotError at the first broken rule."""
    case = Case.draw(seed)
    referee = Referee(case.config)
    scheduler = WatchedScheduler(case.config, FakeMasks(), lambda page_size: SpyTree(native_tree(page_size), referee))
    scheduler.referee = referee
    io = FakeIO(case, scheduler, referee)
    event_loop(scheduler, io, case.depth)
    referee.check(scheduler)
    totals = io.verify()
    counts, stats = scheduler.pool.counts(), scheduler.stats
    assert counts.locked == 0 and not scheduler.n_in_flight, f"idle, yet {counts}"
    for name in ("retractions", "cached_tokens", "chunks", "zombie_rows", "aborts", "output_tokens"):
        totals[name] += getattr(stats, name)
    totals["steps"] += stats.sent_step
    totals["evicted"] += referee.n_evicted
    totals["duplicates"] += referee.n_duplicates
    totals["flushes"] += sum(bool(reply.result and "freed_tokens" in reply.result) for reply in io.replies)
    totals["stale prefixes kept over a flush"] += referee.n_retired
    totals[f"depth {case.depth}"] += 1
    return totals


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
