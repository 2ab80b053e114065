"""The KV tensors of the worker and how many token slots they have. Which slot belongs to whom is the scheduler's business."""

from __future__ import annotations

import torch

from gristmill import resources
from gristmill.errors import ModelError
from gristmill.loading.config import ModelConfig


class KVPool:
    """Per layer one K and one V tensor [slots, num_kv_heads, head_dim]. Slot 0 is an ordinary slot."""

    def __init__(self, config: ModelConfig, slots: int, page_size: int, dtype: torch.dtype) -> None:
        self.slots, self.page_size, self.dtype = slots, page_size, dtype
        shape = (slots, config.num_kv_heads, config.head_dim)
        # empty: the pages of the pool take memory only once they are written
        self._layers = [(torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)) for _ in range(config.num_layers)]

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._layers[index]


def bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize


def pool_slots(
    config: ModelConfig,
    dtype: torch.dtype,
    *,
    pool_tokens: int,
    memory_fraction: float,
    page_size: int,
    most_useful: int,
    available_bytes: int | None = None,
) -> int:
    """Token slots, a multiple of page_size: `pool_tokens` when given, else what `memory_fraction` of the free memory holds.

    `most_useful` (requests x context) caps the latter: more slots could never be used at once. Raises ModelError when no page fits.
    """
    per_token = bytes_per_token(config, dtype)
    available = resources.available_memory_bytes() if available_bytes is None else available_bytes
    if pool_tokens:
        slots = pool_tokens // page_size * page_size
        if slots == 0:
            raise ModelError(f"--pool-tokens {pool_tokens} is less than one page of {page_size} tokens")
        if slots * per_token > available:
            raise ModelError(
                f"--pool-tokens {pool_tokens} needs {slots * per_token / 2**20:.0f} MiB for keys and values; "
                f"{available / 2**20:.0f} MiB are free"
            )
        return slots
    slots = min(int(available * memory_fraction) // per_token, most_useful + page_size - 1) // page_size * page_size
    if slots == 0:
        raise ModelError(
            f"no memory is left for keys and values: {available / 2**20:.0f} MiB are free, --kv-memory-fraction {memory_fraction} of it "
            f"holds less than one page of {page_size} tokens ({per_token} bytes each)"
        )
    return slots
