"""The worker's mirror of the request table: per request slot, which KV slot and which token stands at every position, on the device."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from gristmill.errors import ProtocolError
from gristmill.messages import NewReq, Step
from gristmill.worker.batch import ForwardBatch
from gristmill.worker.staging import to_device
from gristmill_kernels import dispatch
from gristmill_kernels import indices as _indices  # noqa: F401 (registers the implementations)

PADDING_SLOT = -1  # KV slot of padding rows: nothing is stored there


class RequestTables:
    """`tokens[slot, p]`: prompt ids, then the worker's own emitted ids; the newest is what PROTOCOL calls next_token[slot].
    `kv_slots[pool][slot, p]`: KV slot of position p, appended to by a Step's writes; live entries never change. Pool 1 is that of the
    sliding-window layers, if there is one: its entries below the window are stale and not read.

    Row `max_reqs` belongs to no request: it is that of padding rows, with KV slot -1 everywhere."""

    def __init__(self, max_reqs: int, max_context: int, n_pools: int = 1, device: str = "cpu") -> None:
        # one column more than the context: the token after the last position is stored and never read
        self.width = max_context + 1
        self.max_reqs, self.max_context, self.device = max_reqs, max_context, device
        self.padding_row = max_reqs
        self.tokens = self._table()
        self.kv_slots = [self._table() for _ in range(n_pools)]
        for table in self.kv_slots:
            table[self.padding_row] = PADDING_SLOT
        self._admitted = np.zeros(max_reqs, bool)
        self._write = dispatch.select("write_req_to_token", (device,))

    def _table(self) -> torch.Tensor:
        shape = (self.max_reqs + 1, self.width)
        if self.device == "cpu":  # zeros from calloc: memory is taken as rows are used
            return torch.from_numpy(np.zeros(shape, np.int32))
        return torch.zeros(shape, dtype=torch.int32, device=self.device)

    # --- what a step brings

    def load(self, step: Step, padded_to: int = 0) -> ForwardBatch | None:
        """Apply the step's new requests and writes; returns its rows (None when it has none), not yet looked up.

        A decode batch is filled up to `padded_to` rows with padding. Raises ProtocolError for what no scheduler may send.
        """
        arrays = [*self._new_tokens(step), *(array for pool in range(len(self.kv_slots)) for array in self._writes(step, pool))]
        self._check_write_count(step)
        n_tables = len(arrays)
        rows = self._rows(step, padded_to) if step.req_slot.size else None
        there = to_device([*arrays, *(rows.columns if rows else ())], self.device)
        for at, table in zip(range(0, n_tables, 4), (self.tokens, *self.kv_slots), strict=True):
            if arrays[at].size:
                self._write(table, *there[at : at + 4])
        if rows is None:
            return None
        req_slots, q_lens, kv_lens, *tokens = there[n_tables:]
        return ForwardBatch(
            step=step.step,
            num_tokens=rows.num_tokens,
            is_decode=rows.is_decode,
            req_slots=req_slots,
            q_lens=q_lens,
            kv_lens=kv_lens,
            req_to_token=self.kv_slots[0],
            host_req_slots=rows.columns[0],
            host_q_lens=rows.columns[1],
            host_kv_lens=rows.columns[2],
            owners=None if rows.is_decode else tokens[0],
            positions=torch.empty(0, dtype=torch.int32) if rows.is_decode else tokens[1],
            window_req_to_token=self.kv_slots[-1] if len(self.kv_slots) > 1 else None,
        )

    def _new_tokens(self, step: Step) -> list[np.ndarray]:
        """Runs for `tokens`: request slots, first positions, lengths, ids."""
        for new in step.new:
            self._admit(new)
        counts = [len(new.ids) for new in step.new]
        ids = np.concatenate([new.ids for new in step.new]) if step.new else np.empty(0, np.int32)
        return [_ints([new.req_slot for new in step.new]), np.zeros(len(counts), np.int32), _ints(counts), np.array(ids, np.int32)]

    def _admit(self, new: NewReq) -> None:
        if not 0 <= new.req_slot < self.max_reqs or len(new.ids) > self.max_context:
            raise ProtocolError(f"request slot {new.req_slot} with {len(new.ids)} ids does not fit {self.max_reqs} x {self.max_context}")
        self._admitted[new.req_slot] = True

    def _writes(self, step: Step, pool: int) -> list[np.ndarray]:
        """Runs for `kv_slots[pool]`, like `_new_tokens`."""
        ends = [0, *itertools.accumulate(write.n for write in step.writes)]
        chosen = [(write, start) for write, start in zip(step.writes, ends) if write.pool == pool]
        for write, _ in chosen:
            if not 0 <= write.req_slot < self.max_reqs or write.start < 0 or write.start + write.n > self.max_context:
                raise ProtocolError(f"step {step.step} writes positions [{write.start}, {write.start + write.n}) of pool {write.pool}")
        if len(chosen) == len(step.writes):
            slots = np.array(step.write_slots, np.int32)
        else:
            slots = np.concatenate([np.empty(0, np.int32), *(step.write_slots[at : at + write.n] for write, at in chosen)])
        columns = ([write.req_slot for write, _ in chosen], [write.start for write, _ in chosen], [write.n for write, _ in chosen])
        return [*map(_ints, columns), slots]

    def _check_write_count(self, step: Step) -> None:
        if any(not 0 <= write.pool < len(self.kv_slots) for write in step.writes):
            raise ProtocolError(f"step {step.step} writes to a pool that is not there: {[write.pool for write in step.writes]}")
        count = sum(write.n for write in step.writes)
        if count != step.write_slots.size:
            raise ProtocolError(f"step {step.step} holds {step.write_slots.size} slots for {count} written positions")

    def _rows(self, step: Step, padded_to: int) -> _Rows:
        slots, q_lens, kv_lens = (np.array(column, np.int32) for column in (step.req_slot, step.q_len, step.kv_len))
        if (q_lens < 1).any() or (q_lens > kv_lens).any() or (kv_lens > self.max_context).any():
            raise ProtocolError(f"step {step.step} has a row outside its request: q_len {q_lens.tolist()}, kv_len {kv_lens.tolist()}")
        if ((slots < 0) | (slots >= self.max_reqs)).any() or not self._admitted[slots].all():
            raise ProtocolError(f"step {step.step} has a request slot that was never admitted among {slots.tolist()}")
        if (q_lens == 1).all():
            extra = max(0, padded_to - len(slots))
            if extra:
                slots = np.concatenate([slots, np.full(extra, self.padding_row, np.int32)])
                q_lens, kv_lens = np.concatenate([q_lens, np.ones(extra, np.int32)]), np.concatenate([kv_lens, np.zeros(extra, np.int32)])
            return _Rows([slots, q_lens, kv_lens], len(slots), True)
        ends = q_lens.cumsum(dtype=np.int32)
        first = np.repeat(kv_lens - ends, q_lens)  # position minus index in the batch, per token
        positions = first + np.arange(ends[-1], dtype=np.int32)
        return _Rows([slots, q_lens, kv_lens, np.repeat(slots, q_lens), positions], int(ends[-1]), False)

    # --- what the tables say

    def look_up(self, batch: ForwardBatch) -> None:
        """Fill in the batch's ids, positions and KV slots. Runs on the device alone, so a captured graph may hold it."""
        owners = batch.req_slots if batch.owners is None else batch.owners
        if batch.is_decode:
            batch.positions = (batch.kv_lens - 1).clamp_(min=0)
        flat = owners.to(torch.int64).mul_(self.width).add_(batch.positions)
        batch.input_ids = self.tokens.view(-1).index_select(0, flat)
        batch.out_slots = self.kv_slots[0].view(-1).index_select(0, flat)
        if batch.window_req_to_token is not None:
            batch.window_out_slots = batch.window_req_to_token.view(-1).index_select(0, flat)

    def remember(self, slots: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> None:
        """Store the emitted `tokens` at `positions` of request `slots`, int32 vectors there; an invalid row goes on with token 0."""
        flat = slots.to(torch.int64).mul_(self.width).add_(positions)
        self.tokens.view(-1).index_copy_(0, flat, tokens.clamp(min=0))


class _Rows:
    """Columns to send to the device: request slots, query lengths, KV lengths, and of a mixed batch each token's slot and position."""

    __slots__ = ("columns", "is_decode", "num_tokens")

    def __init__(self, columns: list[np.ndarray], num_tokens: int, is_decode: bool) -> None:
        self.columns, self.num_tokens, self.is_decode = columns, num_tokens, is_decode


def _ints(values: list[int]) -> np.ndarray:
    return np.array(values, np.int32)
