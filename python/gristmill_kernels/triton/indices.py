"""Triton kernels of the index lists. Where a request's list begins depends on the requests before it; every program adds up their lengths
itself, which for some thousand requests takes less than a second launch would. Sums are int64: wrapped ones would lead out of bounds."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gristmill_kernels.triton import launch
from gristmill_kernels.triton.launch import AotCase, Kernel, Op, Options, supports_any

# Lengths added up, and entries copied, at once.
_BATCH_BLOCK, _CHUNK = 1024, 2048
_OPTIONS = Options(num_warps=4, num_stages=1)
_MAX_INT32 = 2**31 - 1


@triton.jit
def _bounds(seq_lens, starts, q_lens, request, mask, window_left, PAGE: tl.constexpr, WINDOW: tl.constexpr):
    """(first position, number of entries) of the lists of some requests; the entries are PAGE positions apart."""
    end = tl.maximum(tl.load(seq_lens + request, mask=mask, other=0), 0)
    first = tl.zeros_like(end)
    if starts is not None:
        first = tl.load(starts + request, mask=mask, other=0)
    if WINDOW:
        first_row = tl.load(seq_lens + request, mask=mask, other=0).to(tl.int64)
        if q_lens is not None:
            first_row -= tl.load(q_lens + request, mask=mask, other=0)
        else:
            first_row -= 1
        first = tl.minimum(tl.maximum(first_row - window_left, 0), end).to(tl.int32)
    length = tl.where(first < 0, 0, tl.maximum(end - first, 0))  # a negative start is an error, and gives nothing
    return first, tl.where(mask, length // PAGE + (length % PAGE > 0).to(tl.int32), 0)


@triton.jit
def _lists_kernel(
    indptr, indices, table, req_slots, seq_lens, starts, q_lens, slot_map, last_page_len,
    table_row: tl.int64, num_rows: tl.int32, num_columns: tl.int32, num_requests: tl.int32, room: tl.int32, num_mapped: tl.int32,
    window_left: tl.int32,
    PAGE: tl.constexpr, WINDOW: tl.constexpr, BATCH_BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    request, part = tl.program_id(0), tl.program_id(1)
    before = tl.zeros((BATCH_BLOCK,), tl.int64)
    for begin in range(0, request, BATCH_BLOCK):
        others = begin + tl.arange(0, BATCH_BLOCK)
        _, counts = _bounds(seq_lens, starts, q_lens, others, others < request, window_left, PAGE, WINDOW)
        before += counts
    offset = tl.sum(before, axis=0)
    there = request < num_requests
    first, count = _bounds(seq_lens, starts, q_lens, request, there, window_left, PAGE, WINDOW)
    if part == 0:
        tl.store(indptr + request + 1, (offset + count).to(tl.int32), mask=there)
        tl.store(indptr, 0, mask=request == 0)
        if last_page_len is not None:
            length = tl.maximum(tl.load(seq_lens + request, mask=there, other=0), 0)
            tl.store(last_page_len + request, tl.where(length > 0, (length - 1) % PAGE + 1, 0), mask=there)
    row = tl.load(req_slots + request, mask=there, other=-1)
    inside = (row >= 0) & (row < num_rows)
    source = table + row.to(tl.int64) * table_row
    for begin in range(part * CHUNK, tl.minimum(count, num_columns), tl.num_programs(1) * CHUNK):
        entry = begin + tl.arange(0, CHUNK)
        position = first.to(tl.int64) + entry.to(tl.int64) * PAGE
        to = offset + entry
        mask = inside & (entry < count) & (position < num_columns) & (to < room)
        slot = tl.load(source + position, mask=mask, other=0)
        if slot_map is not None:
            mapped = tl.load(slot_map + slot, mask=mask & (slot >= 0) & (slot < num_mapped), other=-1)
            slot = tl.where(slot >= 0, mapped, slot)
        if last_page_len is not None:  # a list of pages
            slot = tl.where(slot >= 0, slot // PAGE, -1)
        tl.store(indices + to, slot, mask=mask)


@triton.jit
def _running_sum_kernel(out, lens, count: tl.int32, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    before = tl.zeros((BLOCK,), tl.int64)
    for begin in range(0, block * BLOCK, BLOCK):
        before += tl.load(lens + begin + tl.arange(0, BLOCK))
    place = block * BLOCK + tl.arange(0, BLOCK)
    own = tl.load(lens + place, mask=place < count, other=0)
    tl.store(out + place + 1, (tl.cumsum(own, axis=0) + tl.sum(before, axis=0)).to(tl.int32), mask=place < count)
    tl.store(out, 0, mask=block == 0)


@triton.jit
def _write_kernel(
    table, req_slots, starts, lens, slots,
    table_row: tl.int64, num_rows: tl.int32, num_columns: tl.int32, num_slots: tl.int32,
    BATCH_BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    run, part = tl.program_id(0), tl.program_id(1)
    before = tl.zeros((BATCH_BLOCK,), tl.int64)
    for begin in range(0, run, BATCH_BLOCK):
        others = begin + tl.arange(0, BATCH_BLOCK)
        before += tl.maximum(tl.load(lens + others, mask=others < run, other=0), 0)
    offset = tl.sum(before, axis=0)
    row, start, length = tl.load(req_slots + run), tl.load(starts + run).to(tl.int64), tl.load(lens + run)
    inside = (row >= 0) & (row < num_rows) & (start >= 0)
    for begin in range(part * CHUNK, tl.minimum(length, num_columns), tl.num_programs(1) * CHUNK):
        entry = begin + tl.arange(0, CHUNK)
        mask = inside & (entry < length) & (start + entry < num_columns) & (offset + entry < num_slots)
        slot = tl.load(slots + offset + entry, mask=mask, other=0)
        tl.store(table + row.to(tl.int64) * table_row + start + entry, slot, mask=mask)


@triton.jit
def _page_table_kernel(
    out, table, req_slots, seq_lens,
    out_row: tl.int64, table_row: tl.int64, num_rows: tl.int32, num_columns: tl.int32, room: tl.int32,
    PAGE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    length = tl.maximum(tl.load(seq_lens + request), 0).to(tl.int64)
    row = tl.load(req_slots + request)
    page = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    position = page.to(tl.int64) * PAGE
    mask = (row >= 0) & (row < num_rows) & (position < length) & (position < num_columns) & (page < room)
    slot = tl.load(table + row.to(tl.int64) * table_row + position, mask=mask, other=0)
    tl.store(out + request.to(tl.int64) * out_row + page, tl.where(slot >= 0, slot // PAGE, -1), mask=mask)


@triton.jit
def _last_page_len_kernel(out, seq_lens, count: tl.int32, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    length = tl.load(seq_lens + place, mask=place < count, other=0)
    tl.store(out + place, tl.where(length > 0, (length - 1) % PAGE + 1, 0), mask=place < count)


@triton.jit
def _draft_kernel(
    indptr, indices, table, req_slots, prefix_lens, draft_slots,
    indptr_row: tl.int64, indices_row: tl.int64, table_row: tl.int64,
    num_rows: tl.int32, num_columns: tl.int32, num_branches: tl.int32, room: tl.int32, steps: tl.int32,
    TOPK: tl.constexpr, BATCH_BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    branch, step, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    request, own_branch = branch // TOPK, branch % TOPK
    before = tl.zeros((BATCH_BLOCK,), tl.int64)
    for begin in range(0, request, BATCH_BLOCK):
        others = begin + tl.arange(0, BATCH_BLOCK)
        before += tl.maximum(tl.load(prefix_lens + others, mask=others < request, other=0), 0)
    there = branch < num_branches
    prefix = tl.maximum(tl.load(prefix_lens + request, mask=there, other=0), 0).to(tl.int64)
    # Branches before this one have the prefixes of earlier requests TOPK times, own_branch times this one's, and step + 1 own tokens each.
    offset = (tl.sum(before, axis=0) * TOPK + prefix * own_branch) + branch.to(tl.int64) * (step + 1)
    ends = indptr + step.to(tl.int64) * indptr_row
    if part == 0:
        tl.store(ends + branch + 1, (offset + prefix + step + 1).to(tl.int32), mask=there)
        tl.store(ends, 0, mask=branch == 0)
    row = tl.load(req_slots + request, mask=there, other=-1)
    inside = there & (row >= 0) & (row < num_rows)
    source = table + row.to(tl.int64) * table_row
    count = tl.where(inside, tl.maximum(tl.minimum(prefix + step + 1, room - offset), 0), 0).to(tl.int32)
    for begin in range(part * CHUNK, count, tl.num_programs(2) * CHUNK):
        entry = begin + tl.arange(0, CHUNK)
        mask = entry < count
        of_prefix = entry < prefix
        if draft_slots is None:  # the draft tokens of branch t are positions prefix + t * steps + i
            position = entry.to(tl.int64) + tl.where(of_prefix, 0, own_branch * steps)
            mask = mask & (position < num_columns)
            slot = tl.load(source + position, mask=mask, other=0)
        else:
            mask = mask & ((entry >= prefix) | (entry < num_columns))
            slot = tl.load(source + entry, mask=mask & of_prefix, other=0)
            own = tl.load(draft_slots + branch.to(tl.int64) * steps + (entry - prefix), mask=mask & (entry >= prefix), other=0)
            slot = tl.where(of_prefix, slot, own)
        tl.store(indices + step.to(tl.int64) * indices_row + offset + entry, slot, mask=mask)


@triton.jit
def _page_slot(free_pages, index, within, mask, num_free, PAGE: tl.constexpr):
    """Slot `within` of the free page number `index`; -1 where there is none, or none that int32 can name."""
    page = tl.load(free_pages + index, mask=mask & (index < num_free), other=-1).to(tl.int64)
    return tl.where((page >= 0) & ((page + 1) * PAGE <= 2147483648), page * PAGE + within, -1)


@triton.jit
def _extension(prefix_lens, new_lens, request, mask, PAGE: tl.constexpr):
    """(prefix, new tokens, new pages) of some requests; nothing where the length does not grow."""
    prefix = tl.load(prefix_lens + request, mask=mask, other=0)
    length = tl.load(new_lens + request, mask=mask, other=0)
    grows = (length > prefix) & (prefix >= 0)
    # Written without prefix + PAGE, which might not fit.
    old_pages = prefix // PAGE + (prefix % PAGE > 0).to(tl.int32)
    pages = length // PAGE + (length % PAGE > 0).to(tl.int32)
    return prefix, tl.where(grows, length - prefix, 0), tl.where(grows, pages - old_pages, 0)


@triton.jit
def _alloc_extend_kernel(
    out, num_pages, prefix_lens, new_lens, last_slots, free_pages,
    num_requests: tl.int32, room: tl.int32, num_free: tl.int32,
    PAGE: tl.constexpr, BATCH_BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    request, part = tl.program_id(0), tl.program_id(1)
    tokens_before = tl.zeros((BATCH_BLOCK,), tl.int64)
    pages_before = tl.zeros((BATCH_BLOCK,), tl.int64)
    for begin in range(0, request, BATCH_BLOCK):
        others = begin + tl.arange(0, BATCH_BLOCK)
        _, tokens, pages = _extension(prefix_lens, new_lens, others, others < request, PAGE)
        tokens_before += tokens
        pages_before += pages
    there = request < num_requests
    prefix, count, pages = _extension(prefix_lens, new_lens, request, there, PAGE)
    offset = tl.sum(tokens_before, axis=0)
    first_free = tl.sum(pages_before, axis=0)
    if part == 0:
        tl.store(num_pages, (first_free + pages).to(tl.int32), mask=request + 1 >= num_requests)
    last = tl.load(last_slots + request, mask=there, other=0)
    old_pages = prefix // PAGE + (prefix % PAGE > 0).to(tl.int32)
    for begin in range(part * CHUNK, tl.minimum(count, room), tl.num_programs(1) * CHUNK):
        entry = begin + tl.arange(0, CHUNK)
        mask = (entry < count) & (offset + entry < room)
        position = prefix + entry
        in_old_page = position // PAGE < old_pages
        new_slot = _page_slot(
            free_pages, first_free + position // PAGE - old_pages, position % PAGE, mask & (in_old_page == 0), num_free, PAGE
        )
        tl.store(out + offset + entry, tl.where(in_old_page, last + 1 + entry, new_slot).to(tl.int32), mask=mask)


@triton.jit
def _alloc_decode_kernel(
    out, num_pages, new_lens, last_slots, free_pages,
    num_requests: tl.int32, num_free: tl.int32,
    PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    before = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, block * BLOCK, BLOCK):
        length = tl.load(new_lens + begin + tl.arange(0, BLOCK))
        before += ((length > 0) & ((length - 1) % PAGE == 0)).to(tl.int32)
    request = block * BLOCK + tl.arange(0, BLOCK)
    there = request < num_requests
    length = tl.load(new_lens + request, mask=there, other=0)
    begins_page = (length > 0) & ((length - 1) % PAGE == 0)
    needed = begins_page.to(tl.int32)
    taken = tl.sum(before, axis=0) + tl.cumsum(needed, axis=0)
    new_slot = _page_slot(free_pages, taken - 1, 0, begins_page, num_free, PAGE)
    last = tl.load(last_slots + request, mask=there, other=0)
    slot = tl.where(length <= 0, -1, tl.where(begins_page, new_slot, last + 1))
    tl.store(out + request, slot.to(tl.int32), mask=there)
    total = tl.sum(before, axis=0) + tl.sum(needed, axis=0)
    tl.store(num_pages, total, mask=(block + 1) * BLOCK >= num_requests)


_lists = Kernel(_lists_kernel)
_running_sum = Kernel(_running_sum_kernel)
_write = Kernel(_write_kernel)
_page_table = Kernel(_page_table_kernel)
_last_page_len = Kernel(_last_page_len_kernel)
_draft = Kernel(_draft_kernel)
_alloc_extend = Kernel(_alloc_extend_kernel)
_alloc_decode = Kernel(_alloc_decode_kernel)


def _parts(device: torch.device, lists: int, longest: int) -> int:
    """Programs that share one list: enough for the longest possible one, but not many more in all than the device runs at once."""
    return max(1, min(launch.cdiv(longest, _CHUNK), launch.cdiv(8 * launch.facts(device).num_processors, max(1, lists))))


def _csr(
    indptr: Tensor, indices: Tensor, req_to_token: Tensor, req_slots: Tensor, seq_lens: Tensor,
    starts: Tensor | None = None, q_lens: Tensor | None = None, slot_map: Tensor | None = None, last_page_len: Tensor | None = None,
    page_size: int = 1, window_left: int = -1,
) -> None:  # fmt: skip
    requests = req_slots.shape[0]
    rows, columns = req_to_token.shape
    pointers = (indptr, indices, req_to_token, req_slots, seq_lens, starts, q_lens, slot_map, last_page_len)
    sizes = (rows, columns, requests, indices.shape[0], 0 if slot_map is None else slot_map.shape[0], min(window_left, _MAX_INT32))
    grid = (max(1, requests), _parts(indptr.device, requests, launch.cdiv(columns, page_size)), 1)
    constants = (page_size, window_left >= 0, _BATCH_BLOCK, _CHUNK)
    _lists(grid, (*pointers, req_to_token.stride(0), *sizes), constants, _OPTIONS)


def kv_indices(indptr: Tensor, indices: Tensor, req_to_token: Tensor, req_slots: Tensor, seq_lens: Tensor, kv_start: Tensor | None) -> None:
    _csr(indptr, indices, req_to_token, req_slots, seq_lens, starts=kv_start)


def window_kv_indices(
    indptr: Tensor,
    indices: Tensor,
    req_to_token: Tensor,
    req_slots: Tensor,
    seq_lens: Tensor,
    q_lens: Tensor | None,
    slot_map: Tensor | None,
    window_left: int,
) -> None:
    _csr(indptr, indices, req_to_token, req_slots, seq_lens, q_lens=q_lens, slot_map=slot_map, window_left=window_left)


def mla_indices(
    indptr: Tensor, indices: Tensor, last_page_len: Tensor, req_to_token: Tensor, req_slots: Tensor, seq_lens: Tensor, page_size: int
) -> None:
    _csr(indptr, indices, req_to_token, req_slots, seq_lens, last_page_len=last_page_len, page_size=page_size)


def qo_indptr(out: Tensor, q_lens: Tensor) -> None:
    count = q_lens.shape[0]
    _running_sum((max(1, launch.cdiv(count, _BATCH_BLOCK)), 1, 1), (out, q_lens, count), (_BATCH_BLOCK,), _OPTIONS)


def write_req_to_token(req_to_token: Tensor, req_slots: Tensor, starts: Tensor, lens: Tensor, slots: Tensor) -> None:
    runs, longest = req_slots.shape[0], min(req_to_token.shape[1], slots.shape[0])
    sizes = (*req_to_token.shape, slots.shape[0])
    grid = (runs, _parts(req_to_token.device, runs, longest), 1)
    _write(grid, (req_to_token, req_slots, starts, lens, slots, req_to_token.stride(0), *sizes), (_BATCH_BLOCK, _CHUNK), _OPTIONS)


def page_table(out: Tensor, req_to_token: Tensor, req_slots: Tensor, seq_lens: Tensor, page_size: int) -> None:
    requests, room = out.shape
    chunk = min(_CHUNK, launch.next_power_of_2(room))
    args = (out, req_to_token, req_slots, seq_lens, out.stride(0), req_to_token.stride(0), *req_to_token.shape, room)
    _page_table((requests, launch.cdiv(room, chunk), 1), args, (page_size, chunk), _OPTIONS)


def last_page_len(out: Tensor, seq_lens: Tensor, page_size: int) -> None:
    count = seq_lens.shape[0]
    _last_page_len((launch.cdiv(count, _BATCH_BLOCK), 1, 1), (out, seq_lens, count), (page_size, _BATCH_BLOCK), _OPTIONS)


def draft_kv_indices(
    indptr: Tensor,
    indices: Tensor,
    req_to_token: Tensor,
    req_slots: Tensor,
    prefix_lens: Tensor,
    draft_slots: Tensor | None,
    steps: int,
    topk: int,
) -> None:
    branches = req_slots.shape[0] * topk
    strides = (indptr.stride(0), indices.stride(0), req_to_token.stride(0))
    sizes = (*req_to_token.shape, branches, indices.shape[1], steps)
    parts = _parts(indptr.device, branches * steps, req_to_token.shape[1] + steps)
    args = (indptr, indices, req_to_token, req_slots, prefix_lens, draft_slots, *strides, *sizes)
    _draft((max(1, branches), steps, parts), args, (topk, _BATCH_BLOCK, _CHUNK), _OPTIONS)


def alloc_extend(
    out: Tensor, num_pages: Tensor, prefix_lens: Tensor, new_lens: Tensor, last_slots: Tensor, free_pages: Tensor, page_size: int
) -> None:
    requests, room = prefix_lens.shape[0], out.shape[0]
    args = (out, num_pages, prefix_lens, new_lens, last_slots, free_pages, requests, room, free_pages.shape[0])
    grid = (max(1, requests), _parts(out.device, requests, room), 1)
    _alloc_extend(grid, args, (page_size, _BATCH_BLOCK, _CHUNK), _OPTIONS)


def alloc_decode(out: Tensor, num_pages: Tensor, new_lens: Tensor, last_slots: Tensor, free_pages: Tensor, page_size: int) -> None:
    requests = new_lens.shape[0]
    args = (out, num_pages, new_lens, last_slots, free_pages, requests, free_pages.shape[0])
    _alloc_decode((max(1, launch.cdiv(requests, _BATCH_BLOCK)), 1, 1), args, (page_size, _BATCH_BLOCK), _OPTIONS)


_FUNCTIONS = (
    kv_indices, window_kv_indices, mla_indices, qo_indptr, write_req_to_token, page_table, last_page_len, draft_kv_indices, alloc_extend,
    alloc_decode,
)  # fmt: skip
OPS = {function.__name__: Op(function, supports_any) for function in _FUNCTIONS}

_INT = torch.int32
AOT = [
    AotCase("kv", _lists, (*(_INT,) * 6, None, None, None), (1, False, _BATCH_BLOCK, _CHUNK), _OPTIONS),
    AotCase("window", _lists, (*(_INT,) * 5, None, _INT, _INT, None), (1, True, _BATCH_BLOCK, _CHUNK), _OPTIONS),
    AotCase("pages64", _lists, (*(_INT,) * 5, None, None, None, _INT), (64, False, _BATCH_BLOCK, _CHUNK), _OPTIONS),
    AotCase("", _running_sum, (_INT,) * 2, (_BATCH_BLOCK,), _OPTIONS),
    AotCase("", _write, (_INT,) * 5, (_BATCH_BLOCK, _CHUNK), _OPTIONS),
    AotCase("64", _page_table, (_INT,) * 4, (64, _CHUNK), _OPTIONS),
    AotCase("64", _last_page_len, (_INT,) * 2, (64, _BATCH_BLOCK), _OPTIONS),
    AotCase("topk4", _draft, (_INT,) * 6, (4, _BATCH_BLOCK, _CHUNK), _OPTIONS),
    AotCase("64", _alloc_extend, (_INT,) * 6, (64, _BATCH_BLOCK, _CHUNK), _OPTIONS),
    AotCase("48", _alloc_decode, (_INT,) * 5, (48, _BATCH_BLOCK), _OPTIONS),
]
