"""Attention through the ops of gristmill_kernels, for whatever device and family of implementations they have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from gristmill.attention.base import AttentionBackend, AttentionLayer, LatentLayer
from gristmill.errors import OptionError
from gristmill.loading.config import ModelConfig
from gristmill.worker.batch import ForwardBatch
from gristmill.worker.kv_pool import KVPool, LatentPool
from gristmill_kernels import attention as _kernels  # noqa: F401 (registers the implementations)
from gristmill_kernels import dispatch

# The kernels sum keys in chunks from the start of a row's list. Lists that start at a multiple of the chunk keep the chunks at the same
# positions, so a row comes out the same bit for bit wherever its list starts: in a decode step, in a chunk, with a window pool or without.
_LIST_ALIGN = 512


class _Metadata(NamedTuple):
    """CSR lists of the step: query offsets (extend only), KV offsets and KV slots per row, and the slots of the step's own tokens.

    There is no decode plan: on the CPU threads take work items one by one, and the kernel lists the items itself faster than Python could;
    a GPU splits by the length that its own lists tell it.
    """

    qo_indptr: torch.Tensor | None
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    out_slots: torch.Tensor


class StoringBackend(AttentionBackend):
    """What the backends share that write keys and values with the ops of gristmill_kernels, whoever computes the attention.

    `family` names the implementations to use; None: the best of the device. `prepare` of a subclass sets batch.attention[windowed] to a
    tuple with `out_slots`, the KV slots of the step's own tokens in the pool of the layers without (False) and with (True) a window.
    """

    family: ClassVar[str | None] = None

    def __init__(self, config: ModelConfig, pool: KVPool | LatentPool, dtype: torch.dtype | None = None) -> None:
        super().__init__(config, pool, dtype)
        self.device, self._families = pool.device, dict[str, str]()
        self._kv_indices = self._op("kv_indices", (self.device,))
        if isinstance(pool, KVPool):
            dtypes, dim = (self.device, self.dtype, pool.dtype), config.head_dim
            # worth a launch less where a launch is what it costs
            self._rotate_and_store = None if self.device == "cpu" else self._op("apply_rope_store_kv", (*dtypes, dim, dim))
            self._store = self._op("store_kv", dtypes)

    def _op(self, name: str, key: tuple[Any, ...]) -> Callable[..., None]:
        """The op of this backend's family; what runs is remembered for `families`. Raises OptionError when the family cannot run it."""
        if self.family is None:
            self._families[name] = dispatch.chosen_family(name, key)
            return dispatch.select(name, key)
        if (reason := dispatch.why_not(name, self.family, key)) is not None:
            raise OptionError(f"the {self.family} kernels cannot run {name}: {reason}")
        self._families[name] = self.family
        return dispatch.overload(name, self.family)

    def families(self) -> dict[str, str]:
        return self._families

    def rotate_and_store(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos_sin_cache: torch.Tensor,
        is_neox: bool,
        layer: AttentionLayer,
        batch: ForwardBatch,
    ) -> bool:
        if self._rotate_and_store is None:
            return False
        assert isinstance(self.pool, KVPool)
        meta = batch.attention[layer.window_left >= 0]
        caches = self.pool.layer(layer.layer_id)
        self._rotate_and_store(q, k, *caches, v, batch.positions, cos_sin_cache, meta.out_slots, is_neox)
        return True

    def _store_own(self, k: torch.Tensor | None, v: torch.Tensor | None, layer: AttentionLayer, batch: ForwardBatch) -> tuple[Any, Any]:
        """Write the step's own keys and values to the layer's pool; returns the metadata of that pool and its tensors."""
        assert isinstance(self.pool, KVPool)
        meta = batch.attention[layer.window_left >= 0]
        caches = self.pool.layer(layer.layer_id)
        if k is not None:
            self._store(*caches, k, v, meta.out_slots)
        return meta, caches


class KernelBackend(StoringBackend):
    """Dense and latent attention over CSR lists of slots."""

    captures = float8_caches = True

    def __init__(self, config: ModelConfig, pool: KVPool | LatentPool, dtype: torch.dtype | None = None) -> None:
        super().__init__(config, pool, dtype)
        self._qo_indptr = self._op("qo_indptr", (self.device,))
        dtype, cached = self.dtype, pool.dtype
        if isinstance(pool, LatentPool):
            latent = (self.device, dtype, cached, pool.latent_dim, pool.rope_dim, config.num_heads)
            self._mla_store, self._mla_decode = self._op("mla_store", (self.device, dtype, cached)), self._op("mla_decode", latent)
            return
        dense = (self.device, dtype, cached, config.head_dim, config.head_dim, config.num_heads, config.num_kv_heads)
        self._decode, self._extend = self._op("decode_attention", dense), self._op("extend_attention", dense)

    # --- metadata

    def prepare(self, batch: ForwardBatch, *, in_graph: bool = False) -> None:
        qo_indptr = None
        if not batch.is_decode:
            qo_indptr = torch.empty(len(batch.host_q_lens) + 1, dtype=torch.int32, device=self.device)
            self._qo_indptr(qo_indptr, batch.q_lens)
        counts = None if in_graph else batch.host_kv_lens
        full = self._lists(batch, qo_indptr, batch.req_to_token, batch.out_slots, counts)
        window = full
        if batch.window_req_to_token is not None and batch.window_out_slots is not None:
            assert self.config.sliding_window is not None
            before = self.config.sliding_window - 1
            if counts is not None:
                counts = counts - np.maximum(counts - batch.host_q_lens - before, 0) // _LIST_ALIGN * _LIST_ALIGN
            starts = (batch.kv_lens - batch.q_lens - before).clamp_(min=0).bitwise_and_(-_LIST_ALIGN)
            window = self._lists(batch, qo_indptr, batch.window_req_to_token, batch.window_out_slots, counts, starts)
        batch.attention = (full, window)

    def _lists(
        self,
        batch: ForwardBatch,
        qo_indptr: torch.Tensor | None,
        table: torch.Tensor,
        out_slots: torch.Tensor,
        counts: np.ndarray | None,
        starts: torch.Tensor | None = None,
    ) -> _Metadata:
        """The slots of `table` from position `starts` of each row on (None: from 0). `counts` is how many there are per row, or None in a
        captured graph, where only the device knows: the list then has room for `graph_kv_tokens`."""
        kv_indptr = torch.empty(batch.req_slots.shape[0] + 1, dtype=torch.int32, device=self.device)
        room = self.graph_kv_tokens if counts is None else int(counts.sum())
        kv_indices = torch.empty(room, dtype=torch.int32, device=self.device)
        self._kv_indices(kv_indptr, kv_indices, table, batch.req_slots, batch.kv_lens, starts)
        return _Metadata(qo_indptr, kv_indptr, kv_indices, out_slots)

    # --- dense

    def forward_extend(
        self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, layer: AttentionLayer, batch: ForwardBatch, out: torch.Tensor
    ) -> None:
        meta, caches = self._store_own(k, v, layer, batch)
        self._extend(
            out, None, q, *caches, meta.qo_indptr, meta.kv_indptr, meta.kv_indices,
            None, None, None, True, layer.sm_scale, 0.0, layer.window_left, 1.0, 1.0,
        )  # fmt: skip

    def forward_decode(
        self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, layer: AttentionLayer, batch: ForwardBatch, out: torch.Tensor
    ) -> None:
        meta, caches = self._store_own(k, v, layer, batch)
        self._decode(
            out, None, q, *caches, meta.kv_indptr, meta.kv_indices,
            None, None, None, layer.sm_scale, 0.0, layer.window_left, 1.0, 1.0,
        )  # fmt: skip

    # --- latent

    def forward_latent(
        self,
        q_nope: torch.Tensor,
        q_rope: torch.Tensor,
        kv_c: torch.Tensor,
        k_rope: torch.Tensor,
        layer: LatentLayer,
        batch: ForwardBatch,
        out: torch.Tensor,
    ) -> None:
        assert isinstance(self.pool, LatentPool)
        meta: _Metadata = batch.attention[0]
        cache = self.pool.layer(layer.layer_id)
        self._mla_store(cache, kv_c, k_rope, meta.out_slots, 1.0)
        self._mla_decode(out, None, q_nope, q_rope, cache, meta.qo_indptr, meta.kv_indptr, meta.kv_indices, None, None, layer.sm_scale, 1.0)
