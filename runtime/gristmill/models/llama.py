"""The Llama family: pre-norm decoder with grouped-query attention, rotary positions and a gated MLP. Qwen2 and Qwen3 derive from it.

A forward pass writes into the buffers of an Activations set instead of allocating, and every residual addition is fused with the norm
that follows it; the layers therefore exchange (normed, residual) pairs. Modules keep the `forward` of their children as plain
attributes: at batch 1 a module call through nn.Module costs as much as a small kernel.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from gristmill.attention.base import AttentionBackend, AttentionLayer
from gristmill.layers import rope
from gristmill.layers.embedding import Embedding
from gristmill.layers.linear import Linear
from gristmill.layers.norm import RMSNorm
from gristmill.layers.ops import LayerOps
from gristmill.layers.targets import Target, Targets
from gristmill.loading.config import ModelConfig
from gristmill.worker.batch import ForwardBatch


class Activations:
    """The buffers of one forward pass over `rows` tokens, shared by all layers; q, k, v are views of the fused projection."""

    def __init__(self, config: ModelConfig, rows: int, dtype: torch.dtype, device: str) -> None:
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self.rows = rows
        self.residual, self.hidden = empty(rows, config.hidden_size), empty(rows, config.hidden_size)
        self.qkv = empty(rows, (heads + 2 * kv_heads) * dim)
        self.attention = empty(rows, heads * dim)
        self.gate_up, self.inner = empty(rows, 2 * config.intermediate_size), empty(rows, config.intermediate_size)
        self._split(config)

    def _split(self, config: ModelConfig) -> None:
        by_head = self.qkv.view(self.rows, -1, config.head_dim)
        self.q, self.k, self.v = by_head.split([config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
        self.attention_heads = self.attention.view(self.rows, config.num_heads, config.head_dim)

    def first(self, rows: int, config: ModelConfig) -> Activations:
        """A set of `rows` <= self.rows tokens over the same memory."""
        part = Activations.__new__(Activations)
        part.rows = rows
        for name in ("residual", "hidden", "qkv", "attention", "gate_up", "inner"):
            setattr(part, name, getattr(self, name)[:rows])
        part._split(config)
        return part


class LlamaAttention(nn.Module):
    """Fused q, k, v projection, rotary positions, attention through the backend, output projection."""

    def __init__(self, config: ModelConfig, index: int, ops: LayerOps, dtype: torch.dtype) -> None:
        super().__init__()
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.qkv = Linear(config.hidden_size, (q, kv, kv), ops, dtype, bias=config.attention_bias)
        self.out = Linear(q, (config.hidden_size,), ops, dtype, bias=config.attention_out_bias)
        self.layer = AttentionLayer.of(config, index)
        self._qkv, self._out, self._rope = self.qkv.forward, self.out.forward, ops.apply_rope

    def targets(self, prefix: str) -> Targets:
        names = [f"{prefix}.{part}_proj" for part in "qkv"]
        return self.qkv.targets(names) | self.out.targets([f"{prefix}.o_proj"])

    def normalise(self, q: torch.Tensor, k: torch.Tensor) -> None:
        """Per-head norms of q and k; Llama has none."""

    def forward(self, act: Activations, batch: ForwardBatch, backend: AttentionBackend, cos_sin: torch.Tensor) -> None:
        self._qkv(act.hidden, act.qkv)
        q, k = act.q, act.k
        self.normalise(q, k)
        attend = backend.forward_decode if batch.is_decode else backend.forward_extend
        if backend.rotate_and_store(q, k, act.v, cos_sin, True, self.layer, batch):
            attend(q, None, None, self.layer, batch, act.attention_heads)
        else:
            self._rope(q, k, batch.positions, cos_sin, True)
            attend(q, k, act.v, self.layer, batch, act.attention_heads)
        self._out(act.attention, act.hidden)


class LlamaMLP(nn.Module):
    """down(silu(gate(x)) * up(x)) with gate and up fused."""

    def __init__(self, config: ModelConfig, ops: LayerOps, dtype: torch.dtype) -> None:
        super().__init__()
        inner = config.intermediate_size
        self.gate_up = Linear(config.hidden_size, (inner, inner), ops, dtype, bias=config.mlp_bias)
        self.down = Linear(inner, (config.hidden_size,), ops, dtype, bias=config.mlp_bias)
        self._gate_up, self._activate, self._down = self.gate_up.forward, ops.silu_and_mul, self.down.forward

    def targets(self, prefix: str) -> Targets:
        return self.gate_up.targets([f"{prefix}.gate_proj", f"{prefix}.up_proj"]) | self.down.targets([f"{prefix}.down_proj"])

    def forward(self, act: Activations) -> None:
        self._gate_up(act.hidden, act.gate_up)
        self._activate(act.inner, act.gate_up)
        self._down(act.inner, act.hidden)


class LlamaLayer(nn.Module):
    """One decoder layer over act.hidden (already normed by this layer's input norm) and act.residual."""

    attention_class: type[LlamaAttention] = LlamaAttention

    def __init__(self, config: ModelConfig, index: int, ops: LayerOps, dtype: torch.dtype) -> None:
        super().__init__()
        self.input_norm = RMSNorm(config.hidden_size, config.rms_eps, ops, dtype)
        self.attention = self.attention_class(config, index, ops, dtype)
        self.post_attention_norm = RMSNorm(config.hidden_size, config.rms_eps, ops, dtype)
        self.mlp = LlamaMLP(config, ops, dtype)
        self._attend, self._add_and_norm, self._mix = self.attention.forward, self.post_attention_norm.add_and_norm, self.mlp.forward

    def targets(self, prefix: str) -> Targets:
        return (
            self.input_norm.targets(f"{prefix}.input_layernorm")
            | self.attention.targets(f"{prefix}.self_attn")
            | self.post_attention_norm.targets(f"{prefix}.post_attention_layernorm")
            | self.mlp.targets(f"{prefix}.mlp")
        )

    def forward(self, act: Activations, batch: ForwardBatch, backend: AttentionBackend, cos_sin: torch.Tensor) -> None:
        self._attend(act, batch, backend, cos_sin)
        self._add_and_norm(act.hidden, act.residual)
        self._mix(act)


class LlamaForCausalLM(nn.Module):
    """Embedding, layers, final norm, output head. `head` and `embedding` may come from one checkpoint tensor (`tie`)."""

    layer_class: type[LlamaLayer] = LlamaLayer
    ignored_tensors = (".rotary_emb.inv_freq",)  # buffers that old checkpoints saved

    def __init__(self, config: ModelConfig, ops: LayerOps, dtype: torch.dtype, max_context: int) -> None:
        super().__init__()
        rope.check_rope(config)
        self.config, self.ops, self.dtype, self.max_context = config, ops, dtype, max_context
        self.embedding = Embedding(config.vocab_size, config.hidden_size, ops, dtype)
        layers = [self.layer_class(config, i, ops, dtype) for i in range(config.num_layers)]
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_eps, ops, dtype)
        # each layer with the norm that follows it: the next layer's input norm, the final norm after the last
        norms = [*(layer.input_norm for layer in layers[1:]), self.norm]
        self._pairs = [(layer.forward, norm.add_and_norm) for layer, norm in zip(layers, norms, strict=True)]
        self._first_norm = layers[0].input_norm.forward
        self.head = Linear(config.hidden_size, (config.vocab_size,), ops, dtype)
        self.cos_sin = torch.empty(0)
        if config.rope_scaling is None or config.rope_scaling["rope_type"] != "freq_factors":
            self.cos_sin = rope.cos_sin_cache(config, max_context).to(ops.device)
        self._logits = self._wide_logits = torch.empty(0, config.vocab_size, device=ops.device)
        self._arena = Activations(config, 1, dtype, ops.device)
        self._activations = self._arena

    def targets(self) -> Targets:
        """Every tensor that a checkpoint with separate embedding and head holds; loading.weights drops what a tied one lacks."""
        found = self.embedding.targets("model.embed_tokens")
        for i, layer in enumerate(cast(list[LlamaLayer], self.layers)):
            found |= layer.targets(f"model.layers.{i}")
        found |= self.norm.targets("model.norm") | self.head.targets(["lm_head"])
        if self.config.rope_scaling is not None and self.config.rope_scaling["rope_type"] == "freq_factors":
            found["rope_freqs.weight"] = Target((self.config.head_dim // 2,), self._take_freq_factors)
        return found

    def _take_freq_factors(self, factors: torch.Tensor) -> None:
        self.cos_sin = rope.cos_sin_cache(self.config, self.max_context, factors.float().cpu()).to(self.ops.device)

    def forward(self, batch: ForwardBatch, backend: AttentionBackend) -> torch.Tensor:
        """Final hidden states [T, hidden] of `batch`; the buffer is reused by the next call."""
        act = self._activations_for(batch.num_tokens)
        self.embedding(batch.input_ids, act.residual)
        self._first_norm(act.residual, act.hidden)
        cos_sin = self.cos_sin
        hidden, residual = act.hidden, act.residual
        for layer, add_and_norm in self._pairs:
            layer(act, batch, backend, cos_sin)
            add_and_norm(hidden, residual)
        return act.hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [rows, vocab]; the buffer is reused by the next call, so that a step does not fault in megabytes of new pages."""
        out, wide = self._logits_for(hidden.shape[0])
        self.head(hidden, out)
        if wide.dtype != out.dtype:
            wide.copy_(out)
        return wide

    def reserve(self, rows: int, logit_rows: int) -> None:
        """Make the buffers for steps of up to `rows` tokens and `logit_rows` rows of logits now instead of when they come."""
        self._activations_for(rows)
        self._logits_for(logit_rows)

    @property
    def buffers_in_use(self) -> tuple[Any, ...]:
        """What the latest forward pass wrote into; whoever has its addresses, like a captured graph, must keep it alive."""
        return self._arena, self._logits, self._wide_logits

    def _logits_for(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self._logits.shape[0] < rows:
            self._logits = torch.empty(rows, self.config.vocab_size, dtype=self.dtype, device=self.ops.device)
            self._wide_logits = self._logits if self.dtype == torch.float32 else self._logits.float()
        return self._logits[:rows], self._wide_logits[:rows]

    def _activations_for(self, rows: int) -> Activations:
        """Buffers for `rows` tokens; the arena grows to the largest batch seen."""
        if self._activations.rows != rows:
            if self._arena.rows < rows:
                self._arena = Activations(self.config, rows, self.dtype, self.ops.device)
            self._activations = self._arena.first(rows, self.config)
        return self._activations
