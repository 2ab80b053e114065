"""From our request tables to the page tables of flash-attn, in plain PyTorch that may also run inside a captured graph.

A page is `page_size` consecutive slots of a pool that hold consecutive positions of one request, from a multiple of `page_size` on.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch


class Lengths(NamedTuple):
    """Per row, int32: number of the first page that is read (None: 0 everywhere), and how many keys follow from its start."""

    first_page: torch.Tensor | None
    kv_lens: torch.Tensor


def visible(q_lens: torch.Tensor, kv_lens: torch.Tensor, page_size: int, before: int | None) -> Lengths:
    """`before` is how many positions before a query are visible, None: all. Pages that the row's first query does not see are left out:
    the table is stale there. A padding row (kv_len 0) counts as one key."""
    counts = kv_lens.clamp(min=1)
    if before is None:
        return Lengths(None, counts)
    first_page = (kv_lens - q_lens - before).clamp_(min=0).div_(page_size, rounding_mode="floor")
    return Lengths(first_page, counts - first_page * page_size)


def most_pages(q_lens: np.ndarray, kv_lens: np.ndarray, page_size: int, before: int | None) -> int:
    """Pages of the row with the most, as `visible` counts them, on the host."""
    return int(-(-_counts(q_lens, kv_lens, page_size, before).max() // page_size))


def pages_of_any_decode(table_width: int, page_size: int, before: int | None) -> int:
    """The most that `most_pages` can be for one query per row, whatever the lengths."""
    pages = -(-table_width // page_size)
    if before is None:
        return pages
    return min(pages, -(-(before + page_size) // page_size))


def block_table(table: torch.Tensor, req_slots: torch.Tensor, page_size: int, pages: int, first_page: torch.Tensor | None) -> torch.Tensor:
    """int32 [rows, pages]: the pages of each row's request from `first_page` on. What lies past a row's last key is some page of the pool.

    `table` is [requests, positions] of KV slots, -1 in the row of padding, whose pages all come out as 0.
    """
    if first_page is None:
        slots = table[:, ::page_size][:, :pages].index_select(0, req_slots)
    else:
        numbers = torch.arange(pages, dtype=torch.int32, device=table.device)
        positions = (first_page[:, None] + numbers).mul_(page_size).clamp_(max=table.shape[1] - 1)
        slots = table[req_slots.long()[:, None], positions.long()]
    if page_size > 1:
        slots = slots.div_(page_size, rounding_mode="floor")
    return slots.clamp_(min=0)


def cumulated(q_lens: np.ndarray, kv_lens: np.ndarray, page_size: int, before: int | None) -> tuple[np.ndarray, np.ndarray]:
    """int32 [rows + 1] each: where the queries of every row start in the batch, and its keys, as `visible` counts them."""
    lengths = (q_lens, _counts(q_lens, kv_lens, page_size, before))
    queries, keys = (np.concatenate([[0], np.cumsum(of_rows)]).astype(np.int32) for of_rows in lengths)
    return queries, keys


def _counts(q_lens: np.ndarray, kv_lens: np.ndarray, page_size: int, before: int | None) -> np.ndarray:
    """`visible`'s kv_lens, on the host."""
    counts: np.ndarray = np.maximum(kv_lens, 1)
    if before is not None:
        counts = counts - np.maximum(kv_lens - q_lens - before, 0) // page_size * page_size
    return counts
