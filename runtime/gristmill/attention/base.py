"""The interface every attention backend implements."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

import torch

from gristmill.loading.config import ModelConfig
from gristmill.worker.batch import ForwardBatch
from gristmill.worker.kv_pool import KVPool, LatentPool


class AttentionLayer(NamedTuple):
    """Static facts of one attention layer. `window_left` is the number of earlier positions a query sees, -1 for all."""

    layer_id: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    sm_scale: float
    window_left: int = -1

    @staticmethod
    def of(config: ModelConfig, index: int) -> AttentionLayer:
        window = config.window_of_layer(index)
        return AttentionLayer(
            index,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            1.0 / math.sqrt(config.head_dim),
            -1 if window is None else window - 1,
        )


class LatentLayer(NamedTuple):
    """Static facts of one layer of latent attention (MLA) in its absorbed form."""

    layer_id: int
    num_heads: int
    sm_scale: float


class AttentionBackend(ABC):
    """Attention over a paged KV pool for one model on one device.

    `prepare` runs once per step; the forward methods then run once per layer. They first write the rows' own k and v to the pool (unless
    rotate_and_store did), so that attention reads keys from there alone. q is [T, num_heads, head_dim], k and v are [T, num_kv_heads,
    head_dim], possibly strided; the result goes to `out` [T, num_heads, head_dim].

    Captured graphs (worker/graphs.py) hold decode steps. `prepare(batch, in_graph=True)` is part of what is captured: it must work on the
    device alone, for any lengths that sum up to at most `graph_kv_tokens`. A backend that has to plan on the host does so in `plan_graph`,
    which runs before the capture and before every replay, into buffers that keep their addresses.
    """

    layer_ops: ClassVar[str] = "kernels"  # which set of gristmill.layers.ops the model runs with
    float8_caches: ClassVar[bool] = False  # whether the pool may hold 8-bit floats
    captures: ClassVar[bool] = False  # whether decode steps may be captured in a graph
    graph_kv_tokens = 0  # most KV tokens of a captured step; set before the first capture

    def __init__(self, config: ModelConfig, pool: KVPool | LatentPool, dtype: torch.dtype | None = None) -> None:
        """`dtype` is that of q, k and v, by default that of the pool."""
        self.config, self.pool, self.dtype = config, pool, dtype or pool.dtype

    @classmethod
    @abstractmethod
    def supports(cls, config: ModelConfig, device: str, dtype: torch.dtype) -> str | None:
        """None when the backend can run this model, else the reason it cannot, as a clause ("head_dim 7 is not a multiple of 8")."""

    @classmethod
    def supports_page_size(cls, page_size: int) -> str | None:
        """None when the backend can read a pool of such pages, else the reason. Most need no pages: to them, slots are single."""
        return None

    @abstractmethod
    def prepare(self, batch: ForwardBatch, *, in_graph: bool = False) -> None:
        """Build this step's metadata into batch.attention."""

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
        """Apply the rotary embedding to q and k in place and store k and v, in one go, if this backend can: the forward method that follows
        must then get None as k and v. False, and nothing done, if it cannot."""
        return False

    @abstractmethod
    def forward_extend(
        self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, layer: AttentionLayer, batch: ForwardBatch, out: torch.Tensor
    ) -> None:
        """Prefill, chunk and verify rows: the queries of a row see all earlier positions and, causally, each other."""

    @abstractmethod
    def forward_decode(
        self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, layer: AttentionLayer, batch: ForwardBatch, out: torch.Tensor
    ) -> None:
        """One query per row."""

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
        """Decode, prefill, chunk and verify rows of latent attention over a LatentPool.

        q_nope [T, num_heads, latent_dim] (times the key half of kv_b_proj), q_rope [T, num_heads, rope_dim], both rotated; kv_c
        [T, latent_dim] and k_rope [T, rope_dim] are written to the pool first; `out` is like q_nope.
        """
        raise NotImplementedError(f"attention backend {self.describe()['name']} has no latent attention")

    def plan_graph(self, batch: ForwardBatch) -> None:  # noqa: B027 (a hook)
        """Before a capture or replay: host-side planning for the decode rows of `batch`, padding included."""

    def families(self) -> dict[str, str]:
        """Which implementation runs per op, for capabilities."""
        return {}

    def describe(self) -> dict[str, Any]:
        return {"name": getattr(self, "registered_name", type(self).__name__), "ops": self.families()}
