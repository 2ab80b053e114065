"""The worker of the simulator: it computes no model, but knows what every slot must hold."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from gristmill.messages import EMIT_SAMPLE, NO_TOKEN, LogprobBlock, Mask, NewReq, Result, SamplingParams, Step, floats, ints
from tests.runtime.scheduler.model import ALL_TOKENS, Case, Counts, allowed, draw_token, extend_hash


class WorkerSequence:
    """What a worker holds for one request slot."""

    def __init__(self, ids: Sequence[int] = (), n_prompt: int = 0, sampling: SamplingParams | None = None) -> None:
        self.ids: list[int] = []
        self.hashes = np.zeros(400, dtype=np.int64)
        self.table = np.full(400, -1, dtype=np.int64)
        self.window_table = np.full(400, -1, dtype=np.int64)
        self.n_prompt, self.sampling = n_prompt, sampling or SamplingParams()
        self.logprobs = self.score_from = -1
        self.counts = Counts(ids[:n_prompt], ids[n_prompt:])
        for token in ids:
            self.append(token)

    def append(self, token: int) -> None:
        n = len(self.ids)
        self.hashes[n] = extend_hash(int(self.hashes[n - 1]) if n else 0, token)
        self.ids.append(token)


class FakeWorker:
    """Executes steps in order and as late as possible; asserts that every slot it reads holds what its table says.

    Penalty counts are built from NewReq and incremented by every row that emits, as on a device: one token too few or too many,
    or one that is taken for a prompt token, gives another output.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        self.sequences = [WorkerSequence() for _ in range(case.config.max_reqs)]
        self.kv = np.zeros(case.config.pool_tokens, dtype=np.int64)
        self.window = case.config.window.window if case.config.window is not None else 0
        self.window_kv = np.zeros(case.config.window.slots if case.config.window is not None else 0, dtype=np.int64)
        self.inbox: deque[Step | Mask] = deque()
        self.n_masked_rows = 0

    def admit(self, new: NewReq) -> WorkerSequence:
        """Forget all that is held for a request slot, and hold the request of a NewReq."""
        sequence = self.sequences[new.req_slot] = WorkerSequence(new.ids.tolist(), new.n_prompt, new.sampling)
        sequence.logprobs, sequence.score_from = new.logprobs, new.prompt_logprobs_from
        return sequence

    def execute(self) -> Result:
        """The result of the next step."""
        step = self.inbox.popleft()
        assert isinstance(step, Step), "a mask came where a step was due"
        masks: dict[int, int] = {}
        if step.needs_mask:
            mask = self.inbox.popleft()
            assert isinstance(mask, Mask) and mask.step == step.step, "the message after a step with needs_mask is its mask"
            masks = dict(zip(mask.rows.tolist(), mask.bits.tolist()))
            self.n_masked_rows += len(masks)
        for new in step.new:
            self.admit(new)
        offset = 0
        for write in step.writes:
            sequence = self.sequences[write.req_slot]
            table = sequence.window_table if write.pool else sequence.table
            table[write.start : write.start + write.n] = step.write_slots[offset : offset + write.n]
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
            if self.window:
                self._run_window(row, step, sequence, start, kv_len)
            blocks += self._score_prompt(row, sequence, start, kv_len)
            tokens.append(self._emit(row, sequence, kv_len, masks.get(row), blocks) if emit == EMIT_SAMPLE else NO_TOKEN)
        return Result(step.step, ints(tokens), logprobs=blocks)

    def _run_window(self, row: int, step: Step, sequence: WorkerSequence, start: int, kv_len: int) -> None:
        """The same for the layers that look back a window only."""
        first = max(0, start - self.window + 1)
        named = sequence.window_table[first:kv_len]
        assert named.min() >= 0, f"row {row} of step {step.step} has no window slot somewhere in [{first}, {kv_len})"
        self.window_kv[sequence.window_table[start:kv_len]] = sequence.hashes[start:kv_len]
        assert np.array_equal(self.window_kv[named], sequence.hashes[first:kv_len]), (
            f"row {row} of step {step.step} reads window KV that is not its own"
        )

    def _emit(self, row: int, sequence: WorkerSequence, kv_len: int, mask: int | None, blocks: list[LogprobBlock]) -> int:
        h = int(sequence.hashes[kv_len - 1])
        assert mask is None or mask == allowed(h), f"the mask of row {row} was made for another sequence"
        n_out = kv_len - sequence.n_prompt
        token = draw_token(h, sequence.sampling, n_out, ALL_TOKENS if mask is None else mask, sequence.counts, self.case)
        stored = max(token, 0)  # an invalid distribution leaves token 0 behind
        sequence.append(stored)
        sequence.counts.generated[stored] += 1
        if sequence.logprobs >= 0:
            blocks.append(LogprobBlock(row, kv_len, ints([token]), floats([-1.0])))
        return token

    def _score_prompt(self, row: int, sequence: WorkerSequence, start: int, end: int) -> list[LogprobBlock]:
        """Row position p scores the known token at p+1; the last one scores across the chunk border."""
        if sequence.score_from < 1:
            return []
        first, last = max(start + 1, sequence.score_from), min(end + 1, sequence.n_prompt)
        if first >= last:
            return []
        return [LogprobBlock(row, first, ints(sequence.ids[first:last]), floats([-1.0] * (last - first)))]
