"""Index lists that attention reads, built from the request table in one launch."""

from __future__ import annotations

import torch
from torch import Tensor

from gristmill_kernels._registry import select
from gristmill_kernels.checks import check_vector, is_dense, refuse_dtype, refuse_shape
from gristmill_kernels.schema import device_of


def _check_table(function: str, req_to_token: Tensor) -> None:
    if req_to_token.dtype is not torch.int32:
        raise refuse_dtype(function, "req_to_token", req_to_token, "int32")
    if req_to_token.ndim != 2 or not is_dense(req_to_token):
        raise refuse_shape(function, "req_to_token", req_to_token, "[R, C] with contiguous rows")


def kv_indices(
    req_to_token: Tensor,
    req_slots: Tensor,
    seq_lens: Tensor,
    *,
    kv_start: Tensor | None = None,
    indptr: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """CSR list of the slots that each request attends to: positions `kv_start[b]` to `seq_lens[b] - 1` of its row in the request table.

    Args:
        req_to_token: [R, C] int32, slot of every position of every request row.
        req_slots: [B] int32, row of each request.
        seq_lens: [B] int32, tokens of each request; kv_start[b] >= seq_lens[b] gives an empty list.
        kv_start: [B] int32, first position taken; 0 when None.
        indptr: [B + 1] int32, written. Allocated when None.
        out: int32, at least as long as the sum of the list lengths; what lies behind is left alone. When None it is allocated exactly,
            which on an accelerator waits for the device: pass it inside graphs.

    Returns:
        `(indptr, indices)`: the slots of request b are `indices[indptr[b]:indptr[b + 1]]`.

    Raises:
        TypeError, ValueError: a dtype, shape or device that does not fit, in one sentence.
        RuntimeError: positions beyond C, or `out` too short (on the CPU; a device kernel writes nothing out of bounds instead).
    """
    _check_table("kv_indices", req_to_token)
    check_vector("kv_indices", "req_slots", req_slots, torch.int32, None, req_to_token, "[B]")
    batch = req_slots.shape[0]
    check_vector("kv_indices", "seq_lens", seq_lens, torch.int32, batch, req_to_token, "[B]")
    if kv_start is not None:
        check_vector("kv_indices", "kv_start", kv_start, torch.int32, batch, req_to_token, "[B]")
    if indptr is None:
        indptr = torch.empty(batch + 1, dtype=torch.int32, device=req_to_token.device)
    else:
        check_vector("kv_indices", "indptr", indptr, torch.int32, batch + 1, req_to_token, "[B + 1]")
    if out is None:
        counts = seq_lens if kv_start is None else (seq_lens - kv_start).clamp(min=0)
        out = torch.empty(int(counts.sum()), dtype=torch.int32, device=req_to_token.device)
    else:
        check_vector("kv_indices", "out", out, torch.int32, None, req_to_token, "one-dimensional")
    if torch.compiler.is_compiling():
        torch.ops.gristmill.kv_indices(indptr, out, req_to_token, req_slots, seq_lens, kv_start)
    else:
        select("kv_indices", (device_of(req_to_token),))(indptr, out, req_to_token, req_slots, seq_lens, kv_start)
    return indptr, out


def qo_indptr(q_lens: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Running sum of the query lengths: row i of request b is row `indptr[b] + i` of q.

    Args:
        q_lens: [B] int32, query rows of each request, >= 0.
        out: [B + 1] int32. Allocated when None.

    Returns:
        `out`, beginning with 0.

    Raises:
        TypeError, ValueError: a dtype, shape or device that does not fit, in one sentence.
    """
    check_vector("qo_indptr", "q_lens", q_lens, torch.int32, None, q_lens, "[B]")
    if out is None:
        out = torch.empty(q_lens.shape[0] + 1, dtype=torch.int32, device=q_lens.device)
    else:
        check_vector("qo_indptr", "out", out, torch.int32, q_lens.shape[0] + 1, q_lens, "[B + 1]")
    if torch.compiler.is_compiling():
        torch.ops.gristmill.qo_indptr(out, q_lens)
    else:
        select("qo_indptr", (device_of(q_lens),))(out, q_lens)
    return out


def write_req_to_token(req_to_token: Tensor, req_slots: Tensor, starts: Tensor, lens: Tensor, slots: Tensor) -> None:
    """Write runs of slots into the request table, in place: request i gets the next `lens[i]` entries of `slots`, from position
    `starts[i]` on.

    Args:
        req_to_token: [R, C] int32, written.
        req_slots: [N] int32, row of each request.
        starts: [N] int32, first position written.
        lens: [N] int32, number of positions written.
        slots: [sum(lens)] int32, all runs one after another.

    Raises:
        TypeError, ValueError: a dtype, shape or device that does not fit, in one sentence.
        RuntimeError: positions beyond C, or fewer slots than the lens add up to (on the CPU).
    """
    _check_table("write_req_to_token", req_to_token)
    check_vector("write_req_to_token", "req_slots", req_slots, torch.int32, None, req_to_token, "[N]")
    count = req_slots.shape[0]
    check_vector("write_req_to_token", "starts", starts, torch.int32, count, req_to_token, "[N]")
    check_vector("write_req_to_token", "lens", lens, torch.int32, count, req_to_token, "[N]")
    check_vector("write_req_to_token", "slots", slots, torch.int32, None, req_to_token, "[sum(lens)]")
    if torch.compiler.is_compiling():
        torch.ops.gristmill.write_req_to_token(req_to_token, req_slots, starts, lens, slots)
    else:
        select("write_req_to_token", (device_of(req_to_token),))(req_to_token, req_slots, starts, lens, slots)
