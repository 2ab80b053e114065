"""One attention backend for prefill, chunk and verify rows, another for decode steps, over the same pool."""

from __future__ import annotations

from typing import ClassVar

import torch

from gristmill.attention.base import AttentionBackend, AttentionLayer, LatentLayer
from gristmill.loading.config import ModelConfig
from gristmill.worker.batch import ForwardBatch
from gristmill.worker.kv_pool import KVPool, LatentPool


class HybridBackend(AttentionBackend):
    """A step is prepared by the backend that it needs, and by no other; captured graphs are the decode backend's alone."""

    prefill_class: ClassVar[type[AttentionBackend]]
    decode_class: ClassVar[type[AttentionBackend]]

    @classmethod
    def supports(cls, config: ModelConfig, device: str, dtype: torch.dtype) -> str | None:
        return cls.prefill_class.supports(config, device, dtype) or cls.decode_class.supports(config, device, dtype)

    @classmethod
    def supports_page_size(cls, page_size: int) -> str | None:
        return cls.prefill_class.supports_page_size(page_size) or cls.decode_class.supports_page_size(page_size)

    def __init__(self, config: ModelConfig, pool: KVPool | LatentPool, dtype: torch.dtype | None = None) -> None:
        super().__init__(config, pool, dtype)
        self.prefill, self.decode = self.prefill_class(config, pool, dtype), self.decode_class(config, pool, dtype)

    def _of(self, batch: ForwardBatch) -> AttentionBackend:
        return self.decode if batch.is_decode else self.prefill

    def prepare(self, batch: ForwardBatch, *, in_graph: bool = False) -> None:
        self._of(batch).prepare(batch, in_graph=in_graph)

    def plan_graph(self, batch: ForwardBatch) -> None:
        self.decode.graph_kv_tokens = self.graph_kv_tokens
        self.decode.plan_graph(batch)

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
        return self._of(batch).rotate_and_store(q, k, v, cos_sin_cache, is_neox, layer, batch)

    def forward_extend(
        self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, layer: AttentionLayer, batch: ForwardBatch, out: torch.Tensor
    ) -> None:
        self.prefill.forward_extend(q, k, v, layer, batch, out)

    def forward_decode(
        self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, layer: AttentionLayer, batch: ForwardBatch, out: torch.Tensor
    ) -> None:
        self.decode.forward_decode(q, k, v, layer, batch, out)

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
        self._of(batch).forward_latent(q_nope, q_rope, kv_c, k_rope, layer, batch, out)

    def families(self) -> dict[str, str]:
        """Of ops that both have, "prefill's / decode's" where they differ."""
        prefill, decode = self.prefill.families(), self.decode.families()
        both = {op: decode[op] if decode[op] == family else f"{family} / {decode[op]}" for op, family in prefill.items() if op in decode}
        return prefill | decode | both


def hybrid(prefill: type[AttentionBackend], decode: type[AttentionBackend]) -> type[HybridBackend]:
    """The class of a hybrid of two classes, named "prefill+decode"."""
    names = [getattr(part, "registered_name", part.__name__) for part in (prefill, decode)]
    layer_ops = {prefill.layer_ops, decode.layer_ops}
    traits = {
        "prefill_class": prefill,
        "decode_class": decode,
        "registered_name": "+".join(names),
        "layer_ops": layer_ops.pop() if len(layer_ops) == 1 else "kernels",  # one of the two cannot do without our kernels anyway
        "float8_caches": prefill.float8_caches and decode.float8_caches,
        "captures": decode.captures,
    }
    return type("Hybrid_" + "_".join(names), (HybridBackend,), traits)
