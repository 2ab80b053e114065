"""Index lists that attention reads, built from the request table in one launch, and slots for new tokens when slots come in pages."""

from __future__ import annotations

import torch
from torch import Tensor

from gristmill_kernels._registry import select
from gristmill_kernels.checks import check_vector, is_dense, refuse_device, refuse_dtype, refuse_shape, refuse_value, same_device
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


def _check_matrix(function: str, argument: str, tensor: Tensor, like: Tensor, rows: int, columns: int | None, right: str) -> None:
    """int32 [rows, columns] (any number of columns when None) with dense rows, on the device of `like`."""
    if tensor.dtype is not torch.int32:
        raise refuse_dtype(function, argument, tensor, "int32")
    if tensor.ndim != 2 or tensor.shape[0] != rows or (columns is not None and tensor.shape[1] != columns) or not is_dense(tensor):
        raise refuse_shape(function, argument, tensor, f"{right} with contiguous rows")
    if not same_device(tensor, like):
        raise refuse_device(function, argument, tensor, like)


def _check_page_size(function: str, page_size: int) -> None:
    if page_size < 1:
        raise refuse_value(function, "page_size", page_size, "at least 1")


def window_kv_indices(
    req_to_token: Tensor,
    req_slots: Tensor,
    seq_lens: Tensor,
    window_left: int,
    *,
    q_lens: Tensor | None = None,
    slot_map: Tensor | None = None,
    indptr: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """CSR list of the slots that the newest rows of each request can see through a sliding window: positions
    `max(0, seq_lens[b] - q_lens[b] - window_left)` to `seq_lens[b] - 1`.

    The lists end where the full ones end, so attention with the same `window_left` over them gives what it gives over the full lists.

    Args:
        req_to_token: [R, C] int32, slot of every position of every request row.
        req_slots: [B] int32, row of each request.
        seq_lens: [B] int32, tokens of each request, the new ones included.
        window_left: tokens that a row sees before its own; negative for no window.
        q_lens: [B] int32, query rows of each request; 1 when None (decode).
        slot_map: [S] int32, slot in the window layers' own pool of every slot of the full pool (-1: none, a hole). None: one pool. A
            negative entry of the table stays as it is.
        indptr: [B + 1] int32, written. Allocated when None.
        out: int32, at least as long as the sum of the list lengths; what lies behind is left alone. When None it is allocated exactly,
            which on an accelerator waits for the device: pass it inside graphs.

    Returns:
        `(indptr, indices)`: the slots of request b are `indices[indptr[b]:indptr[b + 1]]`.

    Raises:
        TypeError, ValueError: a dtype, shape or device that does not fit, in one sentence.
        RuntimeError: positions beyond C, a slot beyond slot_map, or `out` too short (on the CPU; a device kernel reads and writes nothing
            out of bounds instead).
    """
    _check_table("window_kv_indices", req_to_token)
    check_vector("window_kv_indices", "req_slots", req_slots, torch.int32, None, req_to_token, "[B]")
    batch = req_slots.shape[0]
    check_vector("window_kv_indices", "seq_lens", seq_lens, torch.int32, batch, req_to_token, "[B]")
    if q_lens is not None:
        check_vector("window_kv_indices", "q_lens", q_lens, torch.int32, batch, req_to_token, "[B]")
    if slot_map is not None:
        check_vector("window_kv_indices", "slot_map", slot_map, torch.int32, None, req_to_token, "[S]")
    if indptr is None:
        indptr = torch.empty(batch + 1, dtype=torch.int32, device=req_to_token.device)
    else:
        check_vector("window_kv_indices", "indptr", indptr, torch.int32, batch + 1, req_to_token, "[B + 1]")
    if out is None:
        counts = seq_lens.clamp(min=0)
        if window_left >= 0:
            reach = window_left + (1 if q_lens is None else q_lens.long())
            counts = torch.minimum(counts.long(), reach if isinstance(reach, Tensor) else torch.full_like(counts, reach, dtype=torch.int64))
        out = torch.empty(int(counts.clamp(min=0).sum()), dtype=torch.int32, device=req_to_token.device)
    else:
        check_vector("window_kv_indices", "out", out, torch.int32, None, req_to_token, "one-dimensional")
    if torch.compiler.is_compiling():
        torch.ops.gristmill.window_kv_indices(indptr, out, req_to_token, req_slots, seq_lens, q_lens, slot_map, window_left)
    else:
        op = select("window_kv_indices", (device_of(req_to_token),))
        op(indptr, out, req_to_token, req_slots, seq_lens, q_lens, slot_map, window_left)
    return indptr, out


def page_table(req_to_token: Tensor, req_slots: Tensor, seq_lens: Tensor, page_size: int, *, out: Tensor | None = None) -> Tensor:
    """Dense table of the pages of each request, for attention that reads pages: `out[b, i] = req_to_token[req_slots[b], i * page_size] //
    page_size` for the `ceil(seq_lens[b] / page_size)` pages of request b.

    The slots of a page must be consecutive and begin at a multiple of `page_size`, as `alloc_extend` makes them.

    Args:
        req_to_token: [R, C] int32, slot of every position of every request row.
        req_slots: [B] int32, row of each request.
        seq_lens: [B] int32, tokens of each request; a length <= 0 has no page.
        page_size: tokens in a page, >= 1.
        out: [B, M] int32 with room for the longest request, any row stride; entries behind the last page of a request are left alone, so a
            table kept between steps holds old pages there. When None it is allocated, just wide enough and zeroed, which on an accelerator
            waits for the device: pass it inside graphs.

    Returns:
        `out`. A negative slot gives page -1.

    Raises:
        TypeError, ValueError: a dtype, shape, size or device that does not fit, in one sentence.
        RuntimeError: positions beyond C, or `out` too narrow (on the CPU; a device kernel reads and writes nothing out of bounds instead).
    """
    _check_table("page_table", req_to_token)
    check_vector("page_table", "req_slots", req_slots, torch.int32, None, req_to_token, "[B]")
    batch = req_slots.shape[0]
    check_vector("page_table", "seq_lens", seq_lens, torch.int32, batch, req_to_token, "[B]")
    _check_page_size("page_table", page_size)
    if out is None:
        longest = max(0, int(seq_lens.max())) if batch else 0
        out = torch.zeros(batch, -(-longest // page_size), dtype=torch.int32, device=req_to_token.device)
    else:
        _check_matrix("page_table", "out", out, req_to_token, batch, None, f"[B, M] = ({batch}, M)")
    if torch.compiler.is_compiling():
        torch.ops.gristmill.page_table(out, req_to_token, req_slots, seq_lens, page_size)
    else:
        select("page_table", (device_of(req_to_token),))(out, req_to_token, req_slots, seq_lens, page_size)
    return out


def last_page_len(seq_lens: Tensor, page_size: int, *, out: Tensor | None = None) -> Tensor:
    """Tokens in the last page of each request: `(seq_lens - 1) % page_size + 1`, and 0 for a length <= 0.

    Args:
        seq_lens: [B] int32, tokens of each request.
        page_size: tokens in a page, >= 1.
        out: [B] int32. Allocated when None.

    Returns:
        `out`.

    Raises:
        TypeError, ValueError: a dtype, shape, size or device that does not fit, in one sentence.
    """
    check_vector("last_page_len", "seq_lens", seq_lens, torch.int32, None, seq_lens, "[B]")
    _check_page_size("last_page_len", page_size)
    if out is None:
        out = torch.empty_like(seq_lens)
    else:
        check_vector("last_page_len", "out", out, torch.int32, seq_lens.shape[0], seq_lens, "[B]")
    if torch.compiler.is_compiling():
        torch.ops.gristmill.last_page_len(out, seq_lens, page_size)
    else:
        select("last_page_len", (device_of(seq_lens),))(out, seq_lens, page_size)
    return out


def mla_indices(
    req_to_token: Tensor,
    req_slots: Tensor,
    seq_lens: Tensor,
    page_size: int = 1,
    *,
    indptr: Tensor | None = None,
    out: Tensor | None = None,
    last_page_len: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """CSR list of the pages of each request with the length of its last one, as MLA kernels take them (FlashInfer's
    `BatchMLAPagedAttentionWrapper`, aiter's `mla_decode_fwd`): `indices[indptr[b] + i] = req_to_token[req_slots[b], i * page_size] //
    page_size`.

    With page_size 1 the pages are slots and the lists those of `kv_indices`, which `mla_decode` reads.

    Args:
        req_to_token: [R, C] int32, slot of every position of every request row.
        req_slots: [B] int32, row of each request.
        seq_lens: [B] int32, tokens of each request, the rows of this step included; a length <= 0 has no page.
        page_size: tokens in a page, >= 1; the slots of a page are consecutive and begin at a multiple of it.
        indptr: [B + 1] int32, written: counts pages. Allocated when None.
        out: int32, at least as long as the pages number; what lies behind is left alone. When None it is allocated exactly, which on an
            accelerator waits for the device: pass it inside graphs.
        last_page_len: [B] int32, written: tokens in the last page, 0 for an empty request. Allocated when None.

    Returns:
        `(indptr, indices, last_page_len)`.

    Raises:
        TypeError, ValueError: a dtype, shape, size or device that does not fit, in one sentence.
        RuntimeError: positions beyond C, or `out` too short (on the CPU; a device kernel reads and writes nothing out of bounds instead).
    """
    _check_table("mla_indices", req_to_token)
    check_vector("mla_indices", "req_slots", req_slots, torch.int32, None, req_to_token, "[B]")
    batch = req_slots.shape[0]
    check_vector("mla_indices", "seq_lens", seq_lens, torch.int32, batch, req_to_token, "[B]")
    _check_page_size("mla_indices", page_size)
    if indptr is None:
        indptr = torch.empty(batch + 1, dtype=torch.int32, device=req_to_token.device)
    else:
        check_vector("mla_indices", "indptr", indptr, torch.int32, batch + 1, req_to_token, "[B + 1]")
    if out is None:
        counts = (seq_lens.clamp(min=0).long() + (page_size - 1)) // page_size
        out = torch.empty(int(counts.sum()), dtype=torch.int32, device=req_to_token.device)
    else:
        check_vector("mla_indices", "out", out, torch.int32, None, req_to_token, "one-dimensional")
    if last_page_len is None:
        last_page_len = torch.empty_like(seq_lens)
    else:
        check_vector("mla_indices", "last_page_len", last_page_len, torch.int32, batch, req_to_token, "[B]")
    if torch.compiler.is_compiling():
        torch.ops.gristmill.mla_indices(indptr, out, last_page_len, req_to_token, req_slots, seq_lens, page_size)
    else:
        op = select("mla_indices", (device_of(req_to_token),))
        op(indptr, out, last_page_len, req_to_token, req_slots, seq_lens, page_size)
    return indptr, out, last_page_len


def draft_kv_indices(
    req_to_token: Tensor,
    req_slots: Tensor,
    prefix_lens: Tensor,
    steps: int,
    topk: int,
    *,
    draft_slots: Tensor | None = None,
    indptr: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """CSR lists for all steps of a multi-step draft at once: in step s, branch t of request b sees the prefix of the request and its own
    draft tokens 0 to s.

    Layout. Row s of `indptr` and of `indices` is one CSR list of `B * topk` branches in the order b * topk + t. Branch r = b * topk + t has
    `prefix_lens[b] + s + 1` entries at `indices[s, indptr[s, r]:indptr[s, r + 1]]`: `req_to_token[req_slots[b], :prefix_lens[b]]`, then
    `draft_slots[b, t, :s + 1]`; so `indptr[s, r] = topk * sum(prefix_lens[:b]) + t * prefix_lens[b] + r * (s + 1)`. Without
    `draft_slots` the draft tokens of branch t are the table's positions `prefix_lens[b] + t * steps + i`, where engines with one token a
    page keep them.

    Args:
        req_to_token: [R, C] int32, slot of every position of every request row.
        req_slots: [B] int32, row of each request.
        prefix_lens: [B] int32, tokens before the draft; a negative length counts as 0.
        steps: draft steps, >= 1.
        topk: branches of a request, >= 1.
        draft_slots: [B, topk, steps] int32, contiguous: the slot of every draft token.
        indptr: [steps, B * topk + 1] int32, any row stride, written. Allocated when None.
        out: [steps, L] int32, any row stride, with L at least topk * sum(prefix_lens) + B * topk * steps; what lies behind the lists is
            left alone. When None it is allocated exactly, which on an accelerator waits for the device: pass it inside graphs.

    Returns:
        `(indptr, indices)`.

    Raises:
        TypeError, ValueError: a dtype, shape, size or device that does not fit, in one sentence.
        RuntimeError: positions beyond C, or `out` too narrow (on the CPU; a device kernel reads and writes nothing out of bounds instead).

    Source: the multi-step draft of EAGLE (Li et al. 2024) as batched by SGLang.
    """
    _check_table("draft_kv_indices", req_to_token)
    check_vector("draft_kv_indices", "req_slots", req_slots, torch.int32, None, req_to_token, "[B]")
    batch = req_slots.shape[0]
    check_vector("draft_kv_indices", "prefix_lens", prefix_lens, torch.int32, batch, req_to_token, "[B]")
    for argument, value in (("steps", steps), ("topk", topk)):
        if value < 1:
            raise refuse_value("draft_kv_indices", argument, value, "at least 1")
    if draft_slots is not None:
        if draft_slots.dtype is not torch.int32:
            raise refuse_dtype("draft_kv_indices", "draft_slots", draft_slots, "int32")
        if draft_slots.shape != (batch, topk, steps) or not draft_slots.is_contiguous():
            right = f"contiguous [B, topk, steps] = ({batch}, {topk}, {steps})"
            raise refuse_shape("draft_kv_indices", "draft_slots", draft_slots, right)
        if not same_device(draft_slots, req_to_token):
            raise refuse_device("draft_kv_indices", "draft_slots", draft_slots, req_to_token)
    branches = batch * topk
    if indptr is None:
        indptr = torch.empty(steps, branches + 1, dtype=torch.int32, device=req_to_token.device)
    else:
        right = f"[steps, B * topk + 1] = ({steps}, {branches + 1})"
        _check_matrix("draft_kv_indices", "indptr", indptr, req_to_token, steps, branches + 1, right)
    if out is None:
        length = topk * int(prefix_lens.clamp(min=0).sum()) + branches * steps
        out = torch.empty(steps, length, dtype=torch.int32, device=req_to_token.device)
    else:
        _check_matrix("draft_kv_indices", "out", out, req_to_token, steps, None, f"[steps, L] = ({steps}, L)")
    if torch.compiler.is_compiling():
        torch.ops.gristmill.draft_kv_indices(indptr, out, req_to_token, req_slots, prefix_lens, draft_slots, steps, topk)
    else:
        op = select("draft_kv_indices", (device_of(req_to_token),))
        op(indptr, out, req_to_token, req_slots, prefix_lens, draft_slots, steps, topk)
    return indptr, out


def alloc_extend(
    prefix_lens: Tensor,
    new_lens: Tensor,
    last_slots: Tensor,
    free_pages: Tensor,
    page_size: int,
    *,
    out: Tensor | None = None,
    num_pages: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Slots for the tokens at positions `[prefix_lens[b], new_lens[b])` of each request, when slots come in pages.

    Definition. Page g is the slots `[g * page_size, (g + 1) * page_size)`. Let `first[b] = ceil(prefix_lens[b] / page_size)` and
    `need[b] = max(0, ceil(new_lens[b] / page_size) - first[b])` for a request with `new_lens[b] > prefix_lens[b]`, 0 for the others.
    Request b takes `free_pages[sum(need[:b]):][:need[b]]`. Position p of it gets

        last_slots[b] + 1 + p - prefix_lens[b]    if p < first[b] * page_size (the rest of its partial page), otherwise
        free_pages[sum(need[:b]) + p // page_size - first[b]] * page_size + p % page_size     (new pages, in order)

    and the slots are written to `out` one request after another, each in order of position.

    Args:
        prefix_lens: [B] int32, tokens that have slots already, >= 0.
        new_lens: [B] int32, tokens afterwards; a request with new_lens[b] <= prefix_lens[b] (padding) gets nothing.
        last_slots: [B] int32, slot of the token at prefix_lens[b] - 1; ignored (any value) when prefix_lens[b] is a multiple of page_size.
        free_pages: int32, page numbers, taken from the front.
        page_size: tokens in a page, >= 1.
        out: int32, at least as long as the new tokens number; what lies behind is left alone. When None it is allocated exactly, which on
            an accelerator waits for the device: pass it inside graphs.
        num_pages: [1] int32, written: how many pages were needed. Allocated when None.

    Returns:
        `(slots, num_pages)`; the caller drops the first `num_pages` entries of free_pages.

    Raises:
        TypeError, ValueError: a dtype, shape, size or device that does not fit, in one sentence.
        RuntimeError: too few free pages, `out` too short, a negative prefix, or a page whose slots int32 cannot name (on the CPU, where
            nothing is written then). A device kernel gives a token without a page slot -1 and reports all pages needed in num_pages.

    Source: paged allocation as in vLLM (Kwon et al. 2023, section 4.3); the order is that of SGLang's allocator with page_size > 1.
    """
    check_vector("alloc_extend", "prefix_lens", prefix_lens, torch.int32, None, prefix_lens, "[B]")
    batch = prefix_lens.shape[0]
    check_vector("alloc_extend", "new_lens", new_lens, torch.int32, batch, prefix_lens, "[B]")
    check_vector("alloc_extend", "last_slots", last_slots, torch.int32, batch, prefix_lens, "[B]")
    check_vector("alloc_extend", "free_pages", free_pages, torch.int32, None, prefix_lens, "one-dimensional")
    _check_page_size("alloc_extend", page_size)
    if out is None:
        total = int((new_lens.long() - prefix_lens).clamp(min=0).sum())
        out = torch.empty(total, dtype=torch.int32, device=prefix_lens.device)
    else:
        check_vector("alloc_extend", "out", out, torch.int32, None, prefix_lens, "one-dimensional")
    if num_pages is None:
        num_pages = torch.empty(1, dtype=torch.int32, device=prefix_lens.device)
    else:
        check_vector("alloc_extend", "num_pages", num_pages, torch.int32, 1, prefix_lens, "[1]")
    if torch.compiler.is_compiling():
        torch.ops.gristmill.alloc_extend(out, num_pages, prefix_lens, new_lens, last_slots, free_pages, page_size)
    else:
        op = select("alloc_extend", (device_of(prefix_lens),))
        op(out, num_pages, prefix_lens, new_lens, last_slots, free_pages, page_size)
    return out, num_pages


def alloc_decode(
    new_lens: Tensor,
    last_slots: Tensor,
    free_pages: Tensor,
    page_size: int,
    *,
    out: Tensor | None = None,
    num_pages: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One slot for the token at position `new_lens[b] - 1` of each request, when slots come in pages: `alloc_extend` with
    `prefix_lens = new_lens - 1`, but with one entry per request.

    Definition. With p = new_lens[b] - 1: `out[b] = last_slots[b] + 1` if p is not a multiple of page_size; otherwise
    `free_pages[n] * page_size`, n being the number of requests before b that needed a page. A request with new_lens[b] <= 0 (padding)
    gets -1 and takes no page.

    Args:
        new_lens: [B] int32, tokens of each request, the new one included.
        last_slots: [B] int32, slot of the token at new_lens[b] - 2; ignored (any value) when a new page begins.
        free_pages: int32, page numbers, taken from the front.
        page_size: tokens in a page, >= 1.
        out: [B] int32. Allocated when None.
        num_pages: [1] int32, written: how many pages were needed. Allocated when None.

    Returns:
        `(slots, num_pages)`; the caller drops the first `num_pages` entries of free_pages.

    Raises:
        TypeError, ValueError: a dtype, shape, size or device that does not fit, in one sentence.
        RuntimeError: too few free pages, or a page whose slots int32 cannot name (on the CPU, where nothing is written then). A device
            kernel gives a token without a page slot -1 and reports all pages needed in num_pages.
    """
    check_vector("alloc_decode", "new_lens", new_lens, torch.int32, None, new_lens, "[B]")
    batch = new_lens.shape[0]
    check_vector("alloc_decode", "last_slots", last_slots, torch.int32, batch, new_lens, "[B]")
    check_vector("alloc_decode", "free_pages", free_pages, torch.int32, None, new_lens, "one-dimensional")
    _check_page_size("alloc_decode", page_size)
    if out is None:
        out = torch.empty_like(new_lens)
    else:
        check_vector("alloc_decode", "out", out, torch.int32, batch, new_lens, "[B]")
    if num_pages is None:
        num_pages = torch.empty(1, dtype=torch.int32, device=new_lens.device)
    else:
        check_vector("alloc_decode", "num_pages", num_pages, torch.int32, 1, new_lens, "[1]")
    if torch.compiler.is_compiling():
        torch.ops.gristmill.alloc_decode(out, num_pages, new_lens, last_slots, free_pages, page_size)
    else:
        select("alloc_decode", (device_of(new_lens),))(out, num_pages, new_lens, last_slots, free_pages, page_size)
    return out, num_pages
