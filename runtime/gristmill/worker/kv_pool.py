"""The KV tensors of the worker and how many token slots they have. Which slot belongs to whom is the scheduler's business."""

from __future__ import annotations

from typing import NamedTuple

import torch

from gristmill import resources
from gristmill.errors import ModelError
from gristmill.loading.config import ModelConfig

_WINDOW_SLACK_TOKENS = 192  # a request holds its window, what is not yet given back below it, and a lookahead above


class PoolSizes(NamedTuple):
    """Token slots, multiples of the page size. `window` is 0 when all layers share the full pool."""

    full: int
    window: int = 0


class KVPool:
    """Per layer one K and one V tensor [slots, num_kv_heads, head_dim]. Slot 0 is an ordinary slot.

    With a window pool, the sliding-window layers have its slots and the others those of the full pool.
    """

    def __init__(self, config: ModelConfig, sizes: PoolSizes, page_size: int, dtype: torch.dtype, device: str = "cpu") -> None:
        self.slots, self.window_slots = sizes
        self.page_size, self.dtype, self.device = page_size, dtype, device
        self._layers = []
        for layer in range(config.num_layers):
            slots = sizes.window if sizes.window and config.window_of_layer(layer) is not None else sizes.full
            shape = (slots, config.num_kv_heads, config.head_dim)
            # empty: the pages of the pool take memory only once they are written
            self._layers.append((torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device)))

    @property
    def nbytes(self) -> int:
        return sum(k.nbytes + v.nbytes for k, v in self._layers)

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._layers[index]


class LatentPool:
    """The pool of latent attention: per layer one tensor [slots, latent_dim + rope_dim], shared by all heads."""

    def __init__(
        self, num_layers: int, slots: int, page_size: int, latent_dim: int, rope_dim: int, dtype: torch.dtype, device: str = "cpu"
    ) -> None:
        self.slots, self.page_size, self.dtype = slots, page_size, dtype
        self.latent_dim, self.rope_dim, self.device = latent_dim, rope_dim, device
        self._layers = [torch.empty((slots, latent_dim + rope_dim), dtype=dtype, device=device) for _ in range(num_layers)]

    def layer(self, index: int) -> torch.Tensor:
        return self._layers[index]


def layer_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of one token's K and V in one layer."""
    return 2 * config.num_kv_heads * config.head_dim * dtype.itemsize


def bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of one token's K and V in all layers."""
    return config.num_layers * layer_bytes(config, dtype)


def pool_sizes(
    config: ModelConfig,
    dtype: torch.dtype,
    *,
    pool_tokens: int,
    memory_fraction: float,
    page_size: int,
    max_reqs: int,
    max_context: int,
    chunk_tokens: int,
    available_bytes: int | None = None,
) -> PoolSizes:
    """Token slots of the pools: `pool_tokens` in the full pool when given, else what `memory_fraction` of the free memory holds.

    More slots than `max_reqs` requests of `max_context` tokens need are never made. A model with sliding-window layers whose window is
    shorter than the context gets a window pool beside it, with as many slots as the windows of `max_reqs` requests and prompts
    in chunks of `chunk_tokens` need, and a quarter more for cached prefixes. Raises ModelError when no page fits.
    """
    window = config.sliding_window
    n_window = sum(config.window_of_layer(layer) is not None for layer in range(config.num_layers))
    if window is None or not n_window or window >= max_context:
        per_token = bytes_per_token(config, dtype)
        full = _slots(per_token, 0, pool_tokens, memory_fraction, page_size, max_reqs * max_context, available_bytes)
        return PoolSizes(full)
    per_request = window + _WINDOW_SLACK_TOKENS + 4 * page_size
    useful = _whole_pages((max_reqs * per_request + 2 * chunk_tokens) * 5 // 4, page_size)
    per_window_token = n_window * layer_bytes(config, dtype)
    per_token = (config.num_layers - n_window) * layer_bytes(config, dtype)
    least = _whole_pages(per_request + 2 * page_size, page_size)
    # as many window slots as full ones while memory is short, no more than are of use when it is plenty
    full = _slots(
        per_token + per_window_token,
        least * per_window_token,
        pool_tokens,
        memory_fraction,
        page_size,
        max_reqs * max_context,
        available_bytes,
    )
    if not pool_tokens and full > useful:
        full = _slots(per_token, useful * per_window_token, 0, memory_fraction, page_size, max_reqs * max_context, available_bytes)
    return PoolSizes(full, max(least, min(full, useful)))


def _whole_pages(n_tokens: int, page_size: int) -> int:
    return -(-n_tokens // page_size) * page_size


def _slots(
    per_token: int,
    fixed_bytes: int,
    pool_tokens: int,
    memory_fraction: float,
    page_size: int,
    most_useful: int,
    available_bytes: int | None,
) -> int:
    """Slots of `per_token` bytes beside `fixed_bytes` of other slots."""
    available = resources.available_memory_bytes() if available_bytes is None else available_bytes
    if pool_tokens:
        slots = pool_tokens // page_size * page_size
        if slots == 0:
            raise ModelError(f"--pool-tokens {pool_tokens} is less than one page of {page_size} tokens")
        needed = slots * per_token + fixed_bytes
        if needed > available:
            raise ModelError(
                f"--pool-tokens {pool_tokens} needs {needed / 2**20:.0f} MiB for keys and values; {available / 2**20:.0f} MiB are free"
            )
        return slots
    room = int(available * memory_fraction) - fixed_bytes
    slots = min(room // per_token if per_token else most_useful, most_useful + page_size - 1) // page_size * page_size
    if slots <= 0:
        raise ModelError(
            f"no memory is left for keys and values: {available / 2**20:.0f} MiB are free, --mem-fraction {memory_fraction:g} of it "
            f"holds less than one page of {page_size} tokens ({per_token} bytes each)"
        )
    return slots
