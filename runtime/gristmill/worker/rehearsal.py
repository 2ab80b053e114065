"""The largest steps that can come, run once at start-up: what they need of the device's memory is then known, and kernels are compiled."""

from __future__ import annotations

from typing import Any

import numpy as np

from gristmill.messages import EMIT_SAMPLE, NewReq, SamplingParams, Step, Write, ints


def run(runner: Any, tokens: int) -> None:
    """A prefill step of `tokens` tokens and a decode step of all rows, with logprobs and sampling, through `runner`."""
    most, context = runner.max_reqs, runner.max_context
    lengths = [min(context, tokens - at) for at in range(0, tokens, context)][:most]
    sampling = SamplingParams(temperature=1.0, top_p=0.9, seed=1)
    for step in (_prefill(lengths, sampling, runner), _decode(most, sampling, runner)):
        runner.sample(runner.forward(step)).wait()


def _prefill(lengths: list[int], sampling: SamplingParams, runner: Any) -> Step:
    new = [NewReq(slot, n, np.zeros(n, np.int32), sampling, logprobs=20) for slot, n in enumerate(lengths)]
    return _step(0, lengths, lengths, [EMIT_SAMPLE] * len(lengths), new, runner)


def _decode(rows: int, sampling: SamplingParams, runner: Any) -> Step:
    new = [NewReq(slot, 1, np.zeros(1, np.int32), sampling, logprobs=20) for slot in range(rows)]
    return _step(1, [1] * rows, [1] * rows, [EMIT_SAMPLE] * rows, new, runner)


def _step(number: int, q_lens: list[int], kv_lens: list[int], emit: list[int], new: list[NewReq], runner: Any) -> Step:
    pools = len(runner.tables.kv_slots)
    writes, slots = [], []
    for pool in range(pools):
        for slot, n in enumerate(q_lens):
            writes.append(Write(pool, slot, 0, n))
            slots.append(np.arange(n, dtype=np.int32))  # all rows in the same slots, in whole pages: nobody looks at the results
    return Step(
        number, ints(range(len(q_lens))), ints(q_lens), ints(kv_lens), ints(emit), new=new, writes=writes, write_slots=np.concatenate(slots)
    )
