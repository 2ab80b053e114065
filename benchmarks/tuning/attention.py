"""Candidates and problems of the attention kernels: bf16, 32 query heads on 8 KV heads of 128, and latent attention 512 + 64."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.tuning import Candidate, Table
from gristmill_kernels.triton import attention_decode, attention_extend, attention_tables, mla

HEADS, KV_HEADS, DIM = 32, 8, 128
LATENT, ROPE = 512, 64
BF16, INT, WIDE = torch.bfloat16, torch.int32, torch.float32


def _indptr(batch: int, length: int) -> Tensor:
    return torch.arange(batch + 1, dtype=INT, device="cuda") * length


@dataclass
class Decode:
    """One row per request over `length` scattered slots."""

    batch: int
    length: int
    data: dict[str, Tensor] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"B{self.batch} S{self.length}"

    def _make(self) -> None:
        total = self.batch * self.length
        self.data = {
            "q": torch.randn(self.batch, HEADS, DIM, dtype=BF16, device="cuda"),
            "k": torch.randn(total, KV_HEADS, DIM, dtype=BF16, device="cuda"),
            "v": torch.randn(total, KV_HEADS, DIM, dtype=BF16, device="cuda"),
            "indptr": _indptr(self.batch, self.length),
            "indices": torch.randperm(total, device="cuda").to(INT),
        }

    def run(self, candidate: Candidate) -> Tensor:
        if not self.data:
            self._make()
        q, k, v, indptr, indices = self.data.values()
        out = torch.empty_like(q)
        attention_decode.decode_with(candidate.config, out, None, q, k, v, indptr, indices, None, None, DIM**-0.5, 0.0, -1, 1.0, 1.0)
        return out

    def rate(self, us: float) -> str:
        return f"{self.batch * self.length * KV_HEADS * DIM * 4 / us * 1e-6:.2f} TB/s"

    def release(self) -> None:
        self.data = {}


@dataclass
class Prefill:
    """Causal prefill of whole prompts, through a table of scattered slots or over contiguous keys."""

    batch: int
    length: int
    paged: bool
    data: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{'paged' if self.paged else 'ragged'} B{self.batch} S{self.length}"

    def _make(self) -> None:
        total = self.batch * self.length
        self.data = {
            "q": torch.randn(total, HEADS, DIM, dtype=BF16, device="cuda"),
            "k": torch.randn(total, KV_HEADS, DIM, dtype=BF16, device="cuda"),
            "v": torch.randn(total, KV_HEADS, DIM, dtype=BF16, device="cuda"),
            "indptr": _indptr(self.batch, self.length),
            "indices": torch.randperm(total, device="cuda").to(INT) if self.paged else None,
        }

    def run(self, candidate: Candidate) -> Tensor:
        if not self.data:
            self._make()
        q, k, v, indptr, indices = self.data.values()
        out = torch.empty_like(q)
        attention_extend.extend_with(
            candidate.config, out, None, q, k, v, indptr, indptr, indices, None, None, None, True, DIM**-0.5, 0.0, -1, 1.0, 1.0
        )
        return out

    def rate(self, us: float) -> str:
        return f"{2 * self.batch * HEADS * self.length**2 * DIM / us * 1e-6:.0f} TFLOP/s"

    def release(self) -> None:
        self.data = {}


@dataclass
class Latent:
    """One row per request over scattered rows of a latent cache."""

    heads: int
    batch: int
    length: int
    data: dict[str, Tensor] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.heads} heads B{self.batch} S{self.length}"

    def _make(self) -> None:
        total = self.batch * self.length
        self.data = {
            "q": torch.randn(self.batch, self.heads, LATENT + ROPE, dtype=BF16, device="cuda"),
            "cache": torch.randn(total, LATENT + ROPE, dtype=BF16, device="cuda"),
            "indptr": _indptr(self.batch, self.length),
            "indices": torch.randperm(total, device="cuda").to(INT),
        }

    def run(self, candidate: Candidate) -> Tensor:
        if not self.data:
            self._make()
        q, cache, indptr, indices = self.data.values()
        out = torch.empty(self.batch, self.heads, LATENT, dtype=BF16, device="cuda")
        q_nope, q_rope = q[..., :LATENT], q[..., LATENT:]
        mla.mla_decode_with(candidate.config, out, None, q_nope, q_rope, cache, None, indptr, indices, None, None, 192**-0.5, 1.0)
        return out

    def rate(self, us: float) -> str:
        tokens = self.batch * self.length
        flops = 2 * tokens * self.heads * (2 * LATENT + ROPE)
        return f"{tokens * (LATENT + ROPE) * 2 / us * 1e-6:.2f} TB/s, {flops / us * 1e-6:.0f} TFLOP/s"

    def release(self) -> None:
        self.data = {}


def _latent_candidate(config: attention_tables.MlaConfig, heads: int) -> Candidate:
    def sources() -> list[tuple[Any, Any]]:
        constants = mla.split_constants(heads, LATENT, ROPE, config)
        return [(mla.split_kernel(config).source((WIDE, BF16, BF16, BF16, None, INT, INT, None), True, 16, constants), config.options)]

    return Candidate(attention_tables.entry_of(config, LATENT), config, sources)


def _latent_table(name: str, heads: int, configs: tuple[attention_tables.MlaConfig, ...]) -> Table:
    candidates = [_latent_candidate(config, heads) for config in configs]
    return Table(name, heads, candidates, lambda: [Latent(heads, 64, 4096), Latent(heads, 8, 8192)])


def _decode_candidate(config: attention_tables.DecodeConfig) -> Candidate:
    def sources() -> list[tuple[Any, Any]]:
        constants = attention_decode.split_constants(DIM, DIM, HEADS, KV_HEADS, config, False, False)
        return [(attention_decode._split.source((WIDE, BF16, BF16, BF16, INT, INT), True, 16, constants), config.options)]

    return Candidate(attention_tables.entry_of(config, DIM), config, sources)


def _extend_candidate(config: attention_tables.ExtendConfig, paged: bool) -> Candidate:
    def sources() -> list[tuple[Any, Any]]:
        constants = attention_extend.extend_constants(DIM, DIM, HEADS, KV_HEADS, config, True, False, False, BF16)
        types = (BF16, None, BF16, BF16, BF16, INT, INT, INT if paged else None, None, None, None)
        return [(attention_extend._extend.source(types, True, 16, constants), config.options)]

    return Candidate(attention_tables.entry_of(config, DIM), config, sources)


def tables() -> list[Table]:
    return [
        Table(
            "decode",
            DIM,
            [_decode_candidate(config) for config in attention_tables.DECODE_CANDIDATES],
            lambda: [Decode(64, 4096), Decode(8, 16384), Decode(1, 65536), Decode(1, 4096), Decode(16, 1024)],
        ),
        Table(
            "ragged",
            DIM,
            [_extend_candidate(config, False) for config in attention_tables.EXTEND_CANDIDATES],
            lambda: [Prefill(4, 4096, False), Prefill(1, 16384, False)],
        ),
        Table(
            "extend",
            DIM,
            [_extend_candidate(config, True) for config in attention_tables.EXTEND_CANDIDATES],
            lambda: [Prefill(4, 4096, True), Prefill(1, 16384, True)],
        ),
        _latent_table("mla", 16, attention_tables.MLA_CANDIDATES[16]),
        _latent_table("mla", 128, attention_tables.MLA_CANDIDATES[128]),
        _latent_table("mla_hopper", 128, attention_tables.MLA_HOPPER_CANDIDATES),
    ]
