"""What a step asks of a worker, in numbers: the terms of the simulator's cost model, and what a trace says of a step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gristmill.messages import Step


class StepWork(NamedTuple):
    """A row of one token is a decode row (the last token of a prompt, computed alone, costs the same)."""

    prefill_tokens: int
    decode_rows: int
    decode_kv_tokens: int  # KV read by decode rows
    prefill_pairs: int  # (query, key) pairs that the attention of prompt chunks computes


def work_of(step: Step) -> StepWork:
    """The work of `step`."""
    q, kv = step.q_len.astype(np.int64), step.kv_len.astype(np.int64)
    chunks = q > 1
    q_chunks, kv_chunks = q[chunks], kv[chunks]
    return StepWork(
        prefill_tokens=int(q_chunks.sum()),
        decode_rows=int(q.size - q_chunks.size),
        decode_kv_tokens=int(kv.sum() - kv_chunks.sum()),
        prefill_pairs=int((q_chunks * kv_chunks - q_chunks * (q_chunks - 1) // 2).sum()),  # causal: query i of a chunk sees kv-q+1+i keys
    )
