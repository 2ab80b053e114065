"""Drives a ModelRunner with hand-made Steps: a scheduler of a dozen lines for tests that are about the worker alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gristmill.messages import LogprobBlock, Mask, NewReq, Result, SamplingParams, Step, Write, ints
from gristmill.options import Options
from gristmill.worker.runner import ModelRunner

GREEDY = SamplingParams(temperature=0.0)


@dataclass
class Row:
    """One running request: `done` tokens have their KV computed, `ids` are all known tokens."""

    req_slot: int
    ids: list[int]
    n_prompt: int
    sampling: SamplingParams
    eos_ids: tuple[int, ...] = ()
    logprobs: int = -1
    prompt_logprobs_from: int = -1
    done: int = 0
    pages: dict[int, int] = field(default_factory=dict)  # per pool, the page of the last position
    admitted: bool = False
    logits: list[torch.Tensor] = field(default_factory=list)  # raw logits of every sampled position
    blocks: list[LogprobBlock] = field(default_factory=list)


class DirectRunner:
    """Requests get slots in a scrambled order, so that nothing works by accident because slots equal positions."""

    def __init__(self, path: str | Path, *, seed: int = 0, **options: Any) -> None:
        settings = {"dtype": "float32", "pool_tokens": 2048, "max_running": 32, "threads": 2, **options}
        with torch.inference_mode():
            self.runner = ModelRunner(path, Options(**settings))
        rng = np.random.default_rng(seed)
        self._page_size = self.runner.pool.page_size
        pools = [self.runner.pool.slots, self.runner.pool.window_slots]
        self._free_pages = [rng.permutation(slots // self._page_size).tolist() for slots in pools if slots]
        self._req_slots = rng.permutation(self.runner.max_reqs).tolist()
        self.steps = 0

    def add(self, ids: Sequence[int], sampling: SamplingParams = GREEDY, **fields: Any) -> Row:
        return Row(self._req_slots.pop(), list(ids), len(ids), sampling, **fields)

    def step(self, rows: Sequence[Row], chunk: int = 0, mask: dict[int, np.ndarray] | None = None) -> Result:
        """Compute all known tokens of `rows`, at most `chunk` of each (0: no limit); sample the rows that have nothing left."""
        new, writes, write_slots, q_lens, kv_lens, emit = [], [], [], [], [], []
        for row in rows:
            if not row.admitted:
                row.admitted = True
                new.append(
                    NewReq(row.req_slot, row.n_prompt, ints(row.ids), row.sampling, row.eos_ids, row.logprobs, row.prompt_logprobs_from)
                )
            left = len(row.ids) - row.done
            n = min(left, chunk) if chunk else left
            for pool in range(len(self._free_pages)):
                writes.append(Write(pool, row.req_slot, row.done, n))
                write_slots += [self._kv_slot(row, pool, position) for position in range(row.done, row.done + n)]
            q_lens.append(n)
            kv_lens.append(row.done + n)
            emit.append(int(n == left))
        columns = {"q_len": ints(q_lens), "kv_len": ints(kv_lens), "emit": ints(emit)}
        step = Step(
            self.steps, ints([r.req_slot for r in rows]), **columns, new=new, writes=writes, write_slots=ints(write_slots),
            needs_mask=mask is not None,
        )  # fmt: skip
        self.steps += 1
        with torch.inference_mode():
            forwarded = self.runner.forward(step)
            logits = None if forwarded.logits is None else forwarded.logits.to("cpu", copy=True)
            result = self.runner.sample(forwarded, None if mask is None else self._mask(step.step, mask)).wait()
        emitted = 0
        for i, row in enumerate(rows):
            row.done = kv_lens[i]
            row.blocks += [block for block in result.logprobs if block.key == i]
            if emit[i]:
                row.logits.append(logits[emitted])
                row.ids.append(int(result.ids[i]))
                emitted += 1
        return result

    def _kv_slot(self, row: Row, pool: int, position: int) -> int:
        """The slot of `position`; called for one position after another."""
        within = position % self._page_size
        if within == 0:
            row.pages[pool] = self._free_pages[pool].pop()
        return row.pages[pool] * self._page_size + within

    def _mask(self, step: int, allowed: dict[int, np.ndarray]) -> Mask:
        vocab = self.runner.config.vocab_size
        words = -(-vocab // 32)
        bits = np.zeros((len(allowed), words * 32), np.uint8)
        for i, row in enumerate(allowed.values()):
            bits[i, :vocab] = row
        return Mask(step, ints(list(allowed)), np.packbits(bits, axis=1, bitorder="little").view("<i4").reshape(-1))

    def generate(self, rows: Sequence[Row], n_tokens: int, chunk: int = 0) -> None:
        """Run all of `rows` together until each has `n_tokens` generated ones."""
        while active := [row for row in rows if len(row.ids) < row.n_prompt + n_tokens]:
            self.step(active, chunk)
