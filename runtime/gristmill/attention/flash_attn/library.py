"""flash-attn 2 (module flash_attn) and 3 (module flash_attn_interface, for Hopper) behind one interface. Nothing else calls them."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch

from gristmill.attention import libraries

_OLDEST = (2, 5)  # the first with a block table
_PAGES_OF_2 = 256


class Rows(NamedTuple):
    """What a call needs beside the layer's tensors: int32 tensors on the device; for `extend` also cumulated lengths and the longest."""

    block_table: torch.Tensor
    kv_lens: torch.Tensor
    cu_q: torch.Tensor | None = None
    cu_k: torch.Tensor | None = None
    max_q: int = 0
    max_k: int = 0


class FlashAttention2:
    """q is [T, num_heads, head_dim], the caches are [pages, page_size, num_kv_heads, head_dim]; so is it for version 3."""

    name: ClassVar[str] = "flash-attn 2"

    def __init__(self, module: Any) -> None:
        self._decode, self._varlen = module.flash_attn_with_kvcache, module.flash_attn_varlen_func

    @staticmethod
    def why_not_pages(page_size: int) -> str | None:
        if page_size % _PAGES_OF_2 == 0:
            return None
        return f"flash-attn 2 reads pages of a multiple of {_PAGES_OF_2} tokens, not of {page_size} (use --page-size {_PAGES_OF_2})"

    def decode(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, rows: Rows, scale: float, window_left: int
    ) -> torch.Tensor:
        out: torch.Tensor = self._decode(
            q.unsqueeze(1),
            k_cache,
            v_cache,
            cache_seqlens=rows.kv_lens,
            block_table=rows.block_table,
            softmax_scale=scale,
            causal=True,
            window_size=_window(window_left),
        )
        return out.squeeze(1)

    def extend(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, rows: Rows, scale: float, window_left: int
    ) -> torch.Tensor:
        out: torch.Tensor = self._varlen(
            q,
            k_cache,
            v_cache,
            cu_seqlens_q=rows.cu_q,
            cu_seqlens_k=rows.cu_k,
            max_seqlen_q=rows.max_q,
            max_seqlen_k=rows.max_k,
            softmax_scale=scale,
            causal=True,
            window_size=_window(window_left),
            block_table=rows.block_table,
        )
        return out


class FlashAttention3:
    """Pages may have any size."""

    name: ClassVar[str] = "flash-attn 3"

    def __init__(self, module: Any) -> None:
        self._attend = module.flash_attn_with_kvcache

    @staticmethod
    def why_not_pages(page_size: int) -> str | None:
        return None

    def decode(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, rows: Rows, scale: float, window_left: int
    ) -> torch.Tensor:
        out: torch.Tensor = self._attend(
            q.unsqueeze(1),
            k_cache,
            v_cache,
            cache_seqlens=rows.kv_lens,
            page_table=rows.block_table,
            softmax_scale=scale,
            causal=True,
            window_size=_window(window_left),
        )
        return out.squeeze(1)

    def extend(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, rows: Rows, scale: float, window_left: int
    ) -> torch.Tensor:
        out: torch.Tensor = self._attend(
            q,
            k_cache,
            v_cache,
            cache_seqlens=rows.kv_lens,
            page_table=rows.block_table,
            cu_seqlens_q=rows.cu_q,
            max_seqlen_q=rows.max_q,
            softmax_scale=scale,
            causal=True,
            window_size=_window(window_left),
        )
        return out


def find() -> FlashAttention2 | FlashAttention3:
    """Version 3 on Hopper if it is there, else version 2. Raises ImportError, a clause."""
    reasons = []
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9:
        try:
            return FlashAttention3(libraries.find("flash_attn_interface", "flash-attn-3", (3, 0)))
        except ImportError as error:
            reasons.append(str(error))
    try:
        return FlashAttention2(libraries.find("flash_attn", "flash-attn", _OLDEST))
    except ImportError as error:
        raise ImportError("; ".join([*reasons, str(error)])) from error


def _window(window_left: int) -> tuple[int, int]:
    return (-1, -1) if window_left < 0 else (window_left, 0)
