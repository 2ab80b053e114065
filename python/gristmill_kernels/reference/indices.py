"""CSR index lists from the request table, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def kv_indices(indptr: Tensor, indices: Tensor, req_to_token: Tensor, req_slots: Tensor, seq_lens: Tensor, kv_start: Tensor | None) -> None:
    starts = [0] * len(seq_lens) if kv_start is None else kv_start.tolist()
    rows, lens = req_slots.tolist(), seq_lens.tolist()
    pieces = [req_to_token[row, start : max(start, end)] for row, start, end in zip(rows, starts, lens)]
    counts = [len(piece) for piece in pieces]
    for length, start, count in zip(lens, starts, counts):
        if count != max(0, length - start) or start < 0:
            raise RuntimeError(
                f"kv_indices: positions [{start}, {length}) reach beyond the {req_to_token.shape[1]} columns of req_to_token"
            )
    if sum(counts) > len(indices):
        raise RuntimeError(f"kv_indices: indices has room for {len(indices)} entries, but the requests have {sum(counts)}")
    indptr[0] = 0
    indptr[1:] = torch.tensor(counts, dtype=torch.int32).cumsum(0)
    if pieces:
        indices[: sum(counts)] = torch.cat(pieces)


def qo_indptr(out: Tensor, q_lens: Tensor) -> None:
    out[0] = 0
    out[1:] = q_lens.cumsum(0)


def write_req_to_token(req_to_token: Tensor, req_slots: Tensor, starts: Tensor, lens: Tensor, slots: Tensor) -> None:
    offset = 0
    for row, start, length in zip(req_slots.tolist(), starts.tolist(), lens.tolist()):
        if start < 0 or length < 0 or start + length > req_to_token.shape[1]:
            raise RuntimeError(
                f"write_req_to_token: positions [{start}, {start + length}) reach beyond the {req_to_token.shape[1]} columns"
            )
        if offset + length > len(slots):
            raise RuntimeError(f"write_req_to_token: slots has {len(slots)} entries, but the lens add up to more")
        req_to_token[row, start : start + length] = slots[offset : offset + length]
        offset += length
