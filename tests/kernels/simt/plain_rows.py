"""Rows have the same bits from the kernels for plain rows (aligned, whole packs wide) as from the general ones, whatever rows there are
beside them: `python -m tests.kernels.simt.plain_rows LIBRARY SEED`."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import gristmill_kernels as gk
from gristmill_kernels import dispatch
from tests.kernels.simt.suite import hide_cpu_library, open_emulated

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDTHS = (8, 64, 96, 128, 248, 256, 512, 520, 1024, 1544, 2048, 4096, 5120, 8192, 16384, 17408)
Op = Callable[..., tuple[Tensor, ...]]


def unaligned(x: Tensor) -> Tensor:
    """The same numbers one element further on."""
    wide = torch.empty(*x.shape[:-1], x.shape[-1] + 1, dtype=x.dtype)
    view = wide.flatten()[1 : 1 + x.numel()].view(x.shape) if x.dim() == 1 else wide[..., 1:]
    return view.copy_(x)


def compare(op: Op, rows: tuple[Tensor, ...], shared: tuple[Tensor, ...], what: str) -> None:
    """`rows` have the rows as first dimension; `shared` belongs to all of them."""
    plain = op(*(x.clone() for x in rows), *(x.clone() for x in shared))
    general = op(*(unaligned(x) for x in rows), *(unaligned(x) for x in shared))
    alone = [op(*(x[i : i + 1].clone() for x in rows), *(x.clone() for x in shared)) for i in range(rows[0].shape[0])]
    for index, result in enumerate(plain):
        assert torch.equal(result, general[index]), f"{what}: result {index} differs where nothing is aligned"
        assert torch.equal(result, torch.cat([one[index] for one in alone])), f"{what}: result {index} differs without neighbours"


def added(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    gk.fused_add_rms_norm(x, residual, weight)
    return x, residual


def gated(x: Tensor) -> tuple[Tensor, ...]:
    return gk.silu_and_mul(x), gk.swiglu_oai(x)


def check_norms(draw: random.Random, dtype: torch.dtype) -> None:
    width, rows = draw.choice(WIDTHS), draw.randint(1, 5)
    x, residual, weight, bias = (torch.randn(*shape, width).to(dtype) for shape in ((rows,), (rows,), (), ()))
    what = f"{dtype} rows of {width}"
    compare(lambda x, weight: (gk.rms_norm(x, weight),), (x,), (weight,), f"rms_norm, {what}")
    compare(lambda x, weight, bias: (gk.layer_norm(x, weight, bias),), (x,), (weight, bias), f"layer_norm, {what}")
    compare(added, (x, residual), (weight,), f"fused_add_rms_norm, {what}")
    compare(gated, (torch.cat((x, residual), -1),), (), f"gates, {what}")
    heads = torch.randn(rows, 3 * width + 8).to(dtype)[:, : 3 * width].view(rows, 3, width)  # as those of a fused projection
    alone = gk.rms_norm(heads.reshape(-1, width), weight).view_as(heads)
    assert torch.equal(gk.rms_norm(heads, weight), alone), f"rms_norm of heads, {what}"


def check_rope(draw: random.Random, dtype: torch.dtype) -> None:
    tokens, q_heads, kv_heads = draw.randint(1, 4), draw.randint(1, 41), draw.randint(1, 9)
    dim = draw.choice((64, 96, 128, 256))
    rotary = draw.choice([width for width in (16, 32, 64, 96, 128, 256) if width <= dim])
    dim_v, is_neox = draw.choice((64, 128)), draw.random() < 0.5
    q, k, v = (torch.randn(tokens, h, d).to(dtype) for h, d in ((q_heads, dim), (kv_heads, dim), (kv_heads, dim_v)))
    positions, slots = (torch.tensor([draw.randint(-1, 9) for _ in range(tokens)], dtype=torch.int32).unsqueeze(-1) for _ in range(2))
    slots = torch.where(slots < 0, slots, torch.arange(tokens, dtype=torch.int32).unsqueeze(-1) + 2)
    table = torch.rand(9, rotary)
    cache_dtype = draw.choice((dtype, torch.float8_e4m3fn))
    scales = {} if cache_dtype is dtype else {"k_scale": 0.5, "v_scale": 2.0}

    def rotated(q: Tensor, k: Tensor, positions: Tensor, table: Tensor) -> tuple[Tensor, ...]:
        gk.apply_rope(q, k, positions.flatten().contiguous(), table, is_neox=is_neox)
        return q, k

    def pools() -> tuple[Tensor, ...]:
        return tuple(torch.zeros(8, kv_heads, width, dtype=cache_dtype) for width in (dim, dim_v))

    def stored(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, slots: Tensor, table: Tensor) -> tuple[Tensor, ...]:
        caches, flat = pools(), slots.flatten().contiguous()
        gk.apply_rope_store_kv(q, k, v, *caches, positions.flatten().contiguous(), flat, table, is_neox=is_neox, **scales)
        return q, k, *(cache[flat.clamp(min=0).long()].view(torch.uint8) for cache in caches)

    what = f"{dtype} {q_heads} and {kv_heads} heads of {dim}, {rotary} rotated, {'neox' if is_neox else 'interleaved'}"
    compare(rotated, (q, k, positions), (table,), f"apply_rope, {what}")
    compare(stored, (q, k, v, positions, slots), (table,), f"apply_rope_store_kv, {what}, cache {cache_dtype}")
    caches, expected = pools(), pools()
    q_before, k_before, flat = q.clone(), k.clone(), slots.flatten()
    gk.apply_rope(q_before, k_before, positions.flatten(), table, is_neox=is_neox)
    gk.store_kv(k_before, v, *expected, flat, **scales)
    gk.apply_rope_store_kv(q, k, v, *caches, positions.flatten(), flat, table, is_neox=is_neox, **scales)
    for one, two in zip((q, k, *caches), (q_before, k_before, *expected), strict=True):
        assert torch.equal(one.view(torch.uint8), two.view(torch.uint8)), f"apply_rope_store_kv is not the two ops, {what}"


def check(seed: int, rounds: int) -> None:
    torch.manual_seed(seed)
    draw = random.Random(seed)
    for index in range(rounds):
        check_norms(draw, DTYPES[index % len(DTYPES)])
        check_rope(draw, DTYPES[index % len(DTYPES)])


if __name__ == "__main__":
    hide_cpu_library()
    open_emulated(Path(sys.argv[1]))
    torch.set_num_threads(1)
    with dispatch.using("native"):
        check(int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 60)
