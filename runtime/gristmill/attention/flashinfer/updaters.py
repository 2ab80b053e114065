"""From our batches to what FlashInfer's `plan` takes, on the host and without the library.

Our pools are seen as pages of one token, so a page number is a KV slot, and every last page is full.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

# rows of queries that one block computes, at most: of a prompt, and of a decode step with up to 16 query heads per KV head
_PREFILL_TILE, _DECODE_TILE = 128, 16
_BLOCKS_PER_SM = 2
_RECOMMENDED_BYTES = 128 << 20


class PlanArrays(NamedTuple):
    """int32 arrays of one batch of R rows: row r has queries [qo_indptr[r], qo_indptr[r + 1]) of the batch and the keys
    [kv_indptr[r], kv_indptr[r + 1]) of the list of slots, which are those of its last positions."""

    qo_indptr: np.ndarray
    kv_indptr: np.ndarray
    last_page_len: np.ndarray


def plan_arrays(q_lens: np.ndarray, kv_lens: np.ndarray, before: int | None = None) -> PlanArrays:
    """`before` is how many positions before a query are visible, None: all. The list then begins with the first position that the row's
    first query sees: what the table holds below may belong to others, and must not even be read.

    A padding row (kv_len 0) counts as one key: the library wants at least one.
    """
    counts = np.maximum(kv_lens, 1)
    if before is not None:
        counts = counts - np.maximum(kv_lens - q_lens - before, 0)
    return PlanArrays(_indptr(q_lens), _indptr(counts), np.ones(len(kv_lens), np.int32))


def _indptr(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def wants_tensor_cores(num_heads: int, num_kv_heads: int) -> bool:
    """Whether decode should run through the kernels made for prefill: from 4 query heads per KV head on they win, and the others know only
    some group sizes."""
    group = num_heads // num_kv_heads
    return group >= 4 or group not in (1, 2, 3)


def workspace_bytes(num_heads: int, num_kv_heads: int, head_dim: int, multiprocessors: int, graph_rows: int = 0) -> int:
    """Bytes for the partial results of split rows, in float32: of a prefill step, or of a captured decode step of `graph_rows` rows.

    A captured plan reserves room for all blocks of the device or one of each row, whichever is more; a plan of a prefill step only for the
    former, of larger tiles.
    """
    group = num_heads // num_kv_heads
    blocks = _BLOCKS_PER_SM * multiprocessors // num_kv_heads + 1
    if graph_rows:
        tile = _DECODE_TILE if group <= _DECODE_TILE else _PREFILL_TILE
        blocks = max(blocks, graph_rows + -(-graph_rows * group // tile))
    else:
        tile = _PREFILL_TILE
    return max(_RECOMMENDED_BYTES, num_heads * blocks * tile * (head_dim + 1) * 4 + (1 << 20))
