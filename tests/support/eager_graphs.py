"""What worker/graphs.py does with captured graphs, step by step and without a GPU: for tests of backends' graph hooks on the CPU."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

from gristmill.worker.batch import ForwardBatch
from gristmill.worker.graphs import DecodeGraphs


class EagerGraphs(DecodeGraphs):
    """What would be replayed runs again, over the batch of the "capture": padding in its host arrays, real rows in its tensors."""

    def __init__(self, runner: Any, sizes: list[int]) -> None:
        with mock.patch("torch.cuda.Stream"):
            super().__init__(runner.model, runner.backend, runner.tables, runner.max_reqs, runner.pool.slots)
        self.sizes = sizes
        self.runs = 0
        self._batches: dict[int, ForwardBatch] = {}

    def run(self, batch: ForwardBatch) -> torch.Tensor:
        self.runs += 1
        rows = batch.num_tokens
        if rows not in self._batches:
            self._batches[rows] = static = self._padding_batch(rows)
            self._req_slots.fill_(self.tables.padding_row)
            self._kv_lens.zero_()
            self.backend.plan_graph(static)
            assert self._forward(static).isfinite().all(), "padding rows give NaN"
        self._req_slots[:rows].copy_(batch.req_slots)
        self._kv_lens[:rows].copy_(batch.kv_lens)
        self.backend.plan_graph(batch)
        return self._forward(self._batches[rows])
