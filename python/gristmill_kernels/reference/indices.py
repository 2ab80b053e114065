"""Index lists from the request table, and slots for new tokens, in plain PyTorch."""

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
    # The first query row sits at seq_len - q_len; int64, since window_left may be anything.
    first_row = seq_lens.long() - (1 if q_lens is None else q_lens.long())
    starts = torch.zeros_like(first_row) if window_left < 0 else (first_row - window_left).clamp(min=0)
    kv_indices(indptr, indices, req_to_token, req_slots, seq_lens, torch.minimum(starts, seq_lens.long().clamp(min=0)))
    if slot_map is not None:
        written = indices[: int(indptr[-1])]
        if written.numel() and int(written.max()) >= len(slot_map):
            raise RuntimeError(f"window_kv_indices: slot {int(written.max())} lies beyond the {len(slot_map)} entries of slot_map")
        mapped = slot_map[written.clamp(min=0).long()] if len(slot_map) else written
        written.copy_(torch.where(written >= 0, mapped, written))


def _pages(function: str, req_to_token: Tensor, req_slots: Tensor, seq_lens: Tensor, page_size: int) -> list[Tensor]:
    """The pages of every request: the slot of the first token of each, divided by the page size."""
    pages = []
    for request, (row, length) in enumerate(zip(req_slots.tolist(), seq_lens.tolist())):
        if length > req_to_token.shape[1]:
            raise RuntimeError(
                f"{function}: seq_lens[{request}] = {length} reaches beyond the {req_to_token.shape[1]} columns of req_to_token"
            )
        first_slots = req_to_token[row, : max(0, length) : page_size]
        pages.append(torch.where(first_slots < 0, -1, torch.div(first_slots, page_size, rounding_mode="floor")))
    return pages


def page_table(out: Tensor, req_to_token: Tensor, req_slots: Tensor, seq_lens: Tensor, page_size: int) -> None:
    pages = _pages("page_table", req_to_token, req_slots, seq_lens, page_size)
    for request, own in enumerate(pages):
        if len(own) > out.shape[1]:
            raise RuntimeError(f"page_table: request {request} has {len(own)} pages, but out has {out.shape[1]} columns")
    for request, own in enumerate(pages):
        out[request, : len(own)] = own


def last_page_len(out: Tensor, seq_lens: Tensor, page_size: int) -> None:
    out.copy_(torch.where(seq_lens > 0, (seq_lens - 1) % page_size + 1, 0))


def mla_indices(
    indptr: Tensor, indices: Tensor, last_page_len: Tensor, req_to_token: Tensor, req_slots: Tensor, seq_lens: Tensor, page_size: int
) -> None:
    pages = _pages("mla_indices", req_to_token, req_slots, seq_lens, page_size)
    counts = [len(own) for own in pages]
    if sum(counts) > len(indices):
        raise RuntimeError(f"mla_indices: indices has room for {len(indices)} pages, but the requests have {sum(counts)}")
    indptr[0] = 0
    indptr[1:] = torch.tensor(counts, dtype=torch.int32).cumsum(0)
    if pages:
        indices[: sum(counts)] = torch.cat(pages)
    last_page_len.copy_(torch.where(seq_lens > 0, (seq_lens - 1) % page_size + 1, 0))


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
    columns = req_to_token.shape[1]
    rows, lens = req_slots.tolist(), [max(0, length) for length in prefix_lens.tolist()]
    for request, length in enumerate(lens):
        needed = length if draft_slots is not None else length + topk * steps
        if needed > columns:
            raise RuntimeError(f"draft_kv_indices: request {request} needs {needed} positions, but req_to_token has {columns} columns")
    longest = sum(lens) * topk + len(lens) * topk * steps
    if longest > indices.shape[1]:
        raise RuntimeError(f"draft_kv_indices: indices has {indices.shape[1]} columns, but the last step needs {longest}")
    for step in range(steps):
        offset = 0
        indptr[step, 0] = 0
        for request, (row, length) in enumerate(zip(rows, lens)):
            for branch in range(topk):
                own_start = length + branch * steps
                own = req_to_token[row, own_start : own_start + steps] if draft_slots is None else draft_slots[request, branch]
                indices[step, offset : offset + length] = req_to_token[row, :length]
                indices[step, offset + length : offset + length + step + 1] = own[: step + 1]
                offset += length + step + 1
                indptr[step, request * topk + branch + 1] = offset


def _take_pages(function: str, free_pages: Tensor, taken: int, wanted: int, page_size: int) -> list[int]:
    """The next `wanted` free pages after the first `taken`."""
    if taken + wanted > len(free_pages):
        raise RuntimeError(f"{function}: free_pages has {len(free_pages)} pages, but the requests need more")
    pages = free_pages[taken : taken + wanted].tolist()
    for page in pages:
        if page < 0 or (page + 1) * page_size > 2**31:
            raise RuntimeError(f"{function}: page {page} of free_pages has no int32 slots at {page_size} tokens a page")
    return pages


def alloc_extend(
    out: Tensor, num_pages: Tensor, prefix_lens: Tensor, new_lens: Tensor, last_slots: Tensor, free_pages: Tensor, page_size: int
) -> None:
    slots: list[int] = []
    taken = 0
    for request, (prefix, length, last) in enumerate(zip(prefix_lens.tolist(), new_lens.tolist(), last_slots.tolist())):
        if prefix < 0:
            raise RuntimeError(f"alloc_extend: prefix_lens[{request}] is {prefix}, but should be at least 0")
        if length <= prefix:
            continue
        page_end = -(-prefix // page_size) * page_size  # positions [prefix, page_end) lie in the page of the last slot
        wanted = -(-max(0, length - page_end) // page_size)
        pages = _take_pages("alloc_extend", free_pages, taken, wanted, page_size)
        taken += wanted
        for position in range(prefix, length):
            if position < page_end:
                slots.append(last + 1 + position - prefix)
            else:
                slots.append(pages[(position - page_end) // page_size] * page_size + position % page_size)
    if len(slots) > len(out):
        raise RuntimeError(f"alloc_extend: out has room for {len(out)} slots, but the requests need {len(slots)}")
    out[: len(slots)] = torch.tensor(slots, dtype=torch.int32)
    num_pages.fill_(taken)


def alloc_decode(out: Tensor, num_pages: Tensor, new_lens: Tensor, last_slots: Tensor, free_pages: Tensor, page_size: int) -> None:
    slots: list[int] = []
    taken = 0
    for length, last in zip(new_lens.tolist(), last_slots.tolist()):
        if length <= 0:
            slots.append(-1)
        elif (length - 1) % page_size:
            slots.append(last + 1)
        else:
            slots.append(_take_pages("alloc_decode", free_pages, taken, 1, page_size)[0] * page_size)
            taken += 1
    out.copy_(torch.tensor(slots, dtype=torch.int32))
    num_pages.fill_(taken)
