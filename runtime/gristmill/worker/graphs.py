"""Captured CUDA graphs of decode steps: a whole forward pass, from the request table to the logits, launched by one call.

A graph is made for a number of rows and serves steps of fewer rows too: the rest are padding rows, whose KV slot is -1 and whose length is
0, so that they read and store nothing. Graphs are captured when a step first needs them; all share one pool of memory, since one runs at a
time, and what they leave in it (the logits) is consumed before the next.
"""

from __future__ import annotations

import gc
import logging
import time
from typing import Any, NamedTuple

import numpy as np
import torch

from gristmill.attention.base import AttentionBackend
from gristmill.worker.batch import ForwardBatch
from gristmill.worker.tables import RequestTables

log = logging.getLogger(__name__)


def graph_sizes(most: int) -> list[int]:
    """Numbers of rows to capture, up to `most`: close together where a step is short."""
    sizes = [1, 2, *range(4, 33, 4), *range(40, 65, 8), *range(80, 257, 16), *range(288, most + 32, 32)]
    return [size for size in sizes if size < most] + [most]


class _Graph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    batch: ForwardBatch
    logits: torch.Tensor
    keep: Any  # buffers whose addresses the graph holds


class DecodeGraphs:
    """The graphs of one model on one device. `most_rows` and `most_kv_tokens` (over all rows) bound what they take."""

    def __init__(self, model: Any, backend: AttentionBackend, tables: RequestTables, most_rows: int, most_kv_tokens: int) -> None:
        self.model, self.backend, self.tables = model, backend, tables
        self.sizes = graph_sizes(most_rows)
        self.most_kv_tokens = most_kv_tokens
        backend.graph_kv_tokens = most_kv_tokens
        device = tables.device
        # what a replay reads: the first rows of these
        self._req_slots = torch.full((most_rows,), tables.padding_row, dtype=torch.int32, device=device)
        self._kv_lens = torch.zeros(most_rows, dtype=torch.int32, device=device)
        self._q_lens = torch.ones(most_rows, dtype=torch.int32, device=device)
        self._graphs: dict[int, _Graph] = {}
        self._pool: Any = None
        self._stream = torch.cuda.Stream()

    def size_for(self, rows: int, kv_tokens: int) -> int | None:
        """Rows of the graph that takes such a step, None when none does."""
        if not 0 < rows <= self.sizes[-1] or kv_tokens > self.most_kv_tokens:
            return None
        return next(size for size in self.sizes if size >= rows)

    def run(self, batch: ForwardBatch) -> torch.Tensor:
        """float32 logits of all rows of a decode batch that was padded to one of the sizes; valid until the next run."""
        rows = batch.num_tokens
        captured = self._graphs.get(rows)
        if captured is None:
            captured = self._graphs[rows] = self._capture(rows)
        self._req_slots[:rows].copy_(batch.req_slots)
        self._kv_lens[:rows].copy_(batch.kv_lens)
        self.backend.plan_graph(batch)
        captured.graph.replay()
        return captured.logits

    def capture_all(self) -> None:
        """Capture every size now, the largest first: its memory then serves the others."""
        for size in reversed(self.sizes):
            if size not in self._graphs:
                self._graphs[size] = self._capture(size)

    @property
    def captured(self) -> list[int]:
        return sorted(self._graphs)

    def _capture(self, rows: int) -> _Graph:
        started = time.monotonic()
        batch = self._padding_batch(rows)
        self._req_slots.fill_(self.tables.padding_row)
        self._kv_lens.zero_()
        self.backend.plan_graph(batch)
        self._stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            self._forward(batch)  # what is compiled or set up on a first call must be so before the capture
            self._stream.synchronize()
            gc.collect()  # a tensor freed by the collector in the midst of a capture would end it
            # another thread may wait for the results of the step before
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                logits = self._forward(batch)
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        self._pool = graph.pool()
        log.debug("captured a graph of %d rows in %.2f s", rows, time.monotonic() - started)
        return _Graph(graph, batch, logits, self.model.buffers_in_use)

    def _forward(self, batch: ForwardBatch) -> torch.Tensor:
        self.tables.look_up(batch)
        self.backend.prepare(batch, in_graph=True)
        logits: torch.Tensor = self.model.logits(self.model(batch, self.backend))
        return logits

    def _padding_batch(self, rows: int) -> ForwardBatch:
        return ForwardBatch(
            step=-1,
            num_tokens=rows,
            is_decode=True,
            req_slots=self._req_slots[:rows],
            q_lens=self._q_lens[:rows],
            kv_lens=self._kv_lens[:rows],
            req_to_token=self.tables.kv_slots[0],
            host_req_slots=np.full(rows, self.tables.padding_row, np.int32),
            host_q_lens=np.ones(rows, np.int32),
            host_kv_lens=np.zeros(rows, np.int32),
            window_req_to_token=self.tables.kv_slots[-1] if len(self.tables.kv_slots) > 1 else None,
        )
