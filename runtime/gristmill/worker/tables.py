"""The worker's mirror of the request table: per request slot, which KV slot and which token stands at every position.

On the CPU host and device memory are the same, so the tensors share memory with the numpy arrays that Steps are applied to.
"""

from __future__ import annotations

import numpy as np
import torch

from gristmill.errors import ProtocolError
from gristmill.messages import NewReq, Step
from gristmill.worker.batch import ForwardBatch


class RequestTables:
    """`tokens[slot, p]`: prompt ids, then the worker's own emitted ids; the newest is what PROTOCOL calls next_token[slot].
    `kv_slots[pool][slot, p]`: KV slot of position p, appended to by a Step's writes; live entries never change. Pool 1 is that of the
    sliding-window layers, if there is one: its entries below the window are stale and not read."""

    def __init__(self, max_reqs: int, max_context: int, n_pools: int = 1) -> None:
        # one column more than the context: the token after the last position is stored and never read
        self.width = max_context + 1
        self.max_reqs, self.max_context = max_reqs, max_context
        # zeros from calloc: memory is taken as rows are used
        self.tokens = np.zeros((max_reqs, self.width), np.int32)
        self.kv_slots = [np.zeros((max_reqs, self.width), np.int32) for _ in range(n_pools)]
        self._admitted = np.zeros(max_reqs, bool)
        self._req_to_token = [torch.from_numpy(slots) for slots in self.kv_slots]
        self._flat_tokens = self.tokens.reshape(-1)

    def admit(self, new: NewReq) -> None:
        if not 0 <= new.req_slot < self.max_reqs or len(new.ids) > self.max_context:
            raise ProtocolError(f"request slot {new.req_slot} with {len(new.ids)} ids does not fit {self.max_reqs} x {self.max_context}")
        self.tokens[new.req_slot, : len(new.ids)] = new.ids
        self._admitted[new.req_slot] = True

    def apply_writes(self, step: Step) -> None:
        offset = 0
        for write in step.writes:
            end = write.start + write.n
            if not 0 <= write.pool < len(self.kv_slots) or end > self.max_context:
                raise ProtocolError(f"step {step.step} writes positions [{write.start}, {end}) of pool {write.pool}")
            self.kv_slots[write.pool][write.req_slot, write.start : end] = step.write_slots[offset : offset + write.n]
            offset += write.n
        if offset != step.write_slots.size:
            raise ProtocolError(f"step {step.step} holds {step.write_slots.size} slots for {offset} written positions")

    def batch(self, step: Step) -> ForwardBatch:
        """The rows of `step`, looked up after its new requests and writes were applied."""
        slots, q_lens, kv_lens = (np.array(column, np.int32) for column in (step.req_slot, step.q_len, step.kv_len))
        if (q_lens < 1).any() or (q_lens > kv_lens).any() or (kv_lens > self.max_context).any():
            raise ProtocolError(f"step {step.step} has a row outside its request: q_len {q_lens.tolist()}, kv_len {kv_lens.tolist()}")
        if not self._admitted[slots].all():
            raise ProtocolError(f"step {step.step} has a request slot that was never admitted among {slots.tolist()}")
        is_decode = bool((q_lens == 1).all())
        if is_decode:
            positions, owners = kv_lens - 1, slots
        else:
            ends = q_lens.cumsum()
            first = np.repeat(kv_lens - ends.astype(np.int32), q_lens)  # position minus index in the batch, per token
            positions = first + np.arange(ends[-1], dtype=np.int32)
            owners = np.repeat(slots, q_lens)
        flat = owners.astype(np.int64) * self.width + positions
        out_slots = [torch.from_numpy(slots.reshape(-1)[flat]) for slots in self.kv_slots]
        return ForwardBatch(
            step=step.step,
            num_tokens=len(positions),
            is_decode=is_decode,
            input_ids=torch.from_numpy(self._flat_tokens[flat]),
            positions=torch.from_numpy(positions),
            out_slots=out_slots[0],
            req_slots=torch.from_numpy(slots),
            q_lens=torch.from_numpy(q_lens),
            kv_lens=torch.from_numpy(kv_lens),
            req_to_token=self._req_to_token[0],
            host_q_lens=q_lens,
            host_kv_lens=kv_lens,
            window_out_slots=out_slots[-1] if len(out_slots) > 1 else None,
            window_req_to_token=self._req_to_token[-1] if len(out_slots) > 1 else None,
        )
