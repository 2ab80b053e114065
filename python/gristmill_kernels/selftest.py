"""`python -m gristmill_kernels selftest`: every op of every implementation that this machine can run, beside the float64 reference.

A compact form of the project's conformance suite for an installed wheel: one generator of calls per op in `CASES`, with even and odd
shapes, holes and empty requests. Outputs begin as poison, every tensor lies between guards, and what must not be written is compared
too. To cover a new op, add an entry to `CASES`; what has none is listed in the report.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gristmill_kernels import _registry, dispatch
from gristmill_kernels.checks import name_of
from gristmill_kernels.schema import OPS, QUANT_GROUPS, SPLIT_TOKENS, IndexKey

GUARD = 64
POISON = -77_777
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
EPS = {torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
# Error per size of the terms of an inner product whose operands have this dtype.
INNER_EPS = {torch.float32: 2.0**-19, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
LSE_ERROR = 1e-3  # of an LSE beside 16-bit data


class Case(NamedTuple):
    """One call: `args` in the schema's order, on the CPU. `inner` is None where bits must match the reference; otherwise results may differ
    by a few roundings, and by a rounding of `inner`, the size of the terms that an inner product sums."""

    label: str
    args: tuple
    inner: float | None = 0.0


class Draw:
    """Random arguments of one dtype."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = dtype

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator) * (high - low) + low

    def blank(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return poisoned(torch.empty(shape, dtype=dtype or self.dtype))

    def ids(self, count: int, below: int) -> Tensor:
        """Different numbers in random order."""
        return torch.randperm(below, generator=self.generator)[:count].to(torch.int32)

    def lists(self, lens: list[int], slots: int) -> tuple[Tensor, Tensor]:
        """CSR lists over a pool, with a hole in the middle of the longest."""
        indices = torch.randint(0, slots, (sum(lens),), generator=self.generator).to(torch.int32)
        if indices.numel() > 2:
            indices[indices.numel() // 2] = -1
        return indptr(lens), indices


def poisoned(tensor: Tensor) -> Tensor:
    """Filled with what no kernel writes by itself."""
    if tensor.element_size() == 1 and tensor.dtype is not torch.bool:
        tensor.view(torch.uint8).fill_(0x55)
        return tensor
    return tensor.fill_(float("nan") if tensor.is_floating_point() else POISON)


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def indptr(lens: list[int]) -> Tensor:
    return torch.tensor([0, *lens], dtype=torch.int64).cumsum(0).to(torch.int32)


SHAPES = ((1, 8), (3, 128), (7, 4096), (2, 5120), (5, 33), (0, 64))


def _norm(d: Draw) -> Iterator[Case]:
    for rows, width in SHAPES:
        yield Case(f"{rows}x{width}", (d.blank(rows, width), d.normal(rows, width), d.normal(width), 1e-6))


def _add_norm(d: Draw) -> Iterator[Case]:
    for rows, width in SHAPES:
        yield Case(f"{rows}x{width}", (d.normal(rows, width), d.normal(rows, width), d.normal(width), 1e-6))


def _layer_norm(d: Draw) -> Iterator[Case]:
    for rows, width in SHAPES:
        yield Case(f"{rows}x{width}", (d.blank(rows, width), d.normal(rows, width), d.normal(width), d.normal(width), 1e-5))
    yield Case("plain", (d.blank(3, 96), d.normal(3, 96), None, None, 1e-5))


def _gate(*options: float) -> Callable[[Draw], Iterator[Case]]:
    def cases(d: Draw) -> Iterator[Case]:
        for rows, width in SHAPES:
            yield Case(f"{rows}x{width}", (d.blank(rows, width), d.normal(rows, 2 * width), *options))

    return cases


def _rope(d: Draw) -> Iterator[Case]:
    for dim, rotary, neox in ((128, 128, True), (64, 32, False), (80, 80, True)):
        table = d.uniform(-1, 1, 40, rotary)
        yield Case(f"D{dim}R{rotary}", (d.normal(5, 6, dim), d.normal(5, 2, dim), ints([0, 39, 7, -1, 40]), table, neox))


def _rope_store(d: Draw) -> Iterator[Case]:
    for dim, neox in ((128, True), (64, False)):
        pools = [d.blank(9, 2, dim), d.blank(9, 2, dim)]
        rows = (ints([3, 0, 39]), d.uniform(-1, 1, 40, dim), ints([8, -1, 2]))
        yield Case(f"D{dim}", (d.normal(3, 4, dim), d.normal(3, 2, dim), *pools, d.normal(3, 2, dim), *rows, neox, 1.0, 1.0))


def _store(d: Draw) -> Iterator[Case]:
    for dim, kind in ((128, d.dtype), (40, d.dtype), (128, torch.float8_e4m3fn), (64, torch.float8_e5m2)):
        pools = [d.blank(11, 3, dim, dtype=kind), d.blank(11, 3, dim, dtype=kind)]
        scales = (1.0, 1.0) if kind is d.dtype else (0.5, 0.3)
        yield Case(f"{name_of(kind)} D{dim}", (*pools, d.normal(5, 3, dim), d.normal(5, 3, dim), ints([10, -1, 0, 4, 7]), *scales), None)


def _copy(d: Draw) -> Iterator[Case]:
    pools = (d.normal(2, 9, 2, 40), d.normal(2, 9, 2, 24))
    yield Case("two layers", (*pools, ints([1, 4, -1, 8]), ints([0, 1, 2, -1])), None)
    yield Case("latent", (d.normal(1, 9, 1, 576), None, ints([5, 6]), ints([2, 3])), None)


def _transfer(d: Draw) -> Iterator[Case]:
    pools = (d.blank(8, 2, 48), d.blank(8, 2, 16), d.normal(6, 2, 48), d.normal(6, 2, 16))
    yield Case("one layer", (*pools, ints([5, -1, 0]), ints([0, 1, 7])), None)


LENS = [5, 0, 64, 1, 33]


def _requests() -> tuple[Tensor, Tensor, Tensor]:
    table = torch.arange(6 * 80, dtype=torch.int32).view(6, 80)
    return table, ints([4, 0, 2, 5, 1]), ints(LENS)


def _kv_indices(d: Draw) -> Iterator[Case]:
    yield Case("all", (d.blank(6, dtype=torch.int32), d.blank(120, dtype=torch.int32), *_requests(), None), None)
    starts = ints([2, 0, 60, 1, 0])
    yield Case("from a start", (d.blank(6, dtype=torch.int32), d.blank(120, dtype=torch.int32), *_requests(), starts), None)


def _window(d: Draw) -> Iterator[Case]:
    for window, q_lens in ((7, None), (-1, None), (20, ints([1, 0, 3, 1, 2]))):
        outputs = (d.blank(6, dtype=torch.int32), d.blank(130, dtype=torch.int32))
        yield Case(f"window {window}", (*outputs, *_requests(), q_lens, d.ids(480, 480), window), None)


def _write(d: Draw) -> Iterator[Case]:
    slots = d.ids(11, 400)
    yield Case("runs", (d.blank(4, 32, dtype=torch.int32), ints([3, 0, 1]), ints([0, 30, 5]), ints([8, 2, 1]), slots), None)


def _pages(d: Draw) -> Iterator[Case]:
    for size in (1, 16):
        yield Case(f"page size {size}", (d.blank(5, 70, dtype=torch.int32), *_requests(), size), None)


def _latent_pages(d: Draw) -> Iterator[Case]:
    for size in (1, 16):
        outputs = [d.blank(count, dtype=torch.int32) for count in (6, 110, 5)]
        yield Case(f"page size {size}", (*outputs, *_requests(), size), None)


def _draft(d: Draw) -> Iterator[Case]:
    outputs = (d.blank(3, 11, dtype=torch.int32), d.blank(3, 2 * sum(LENS) + 40, dtype=torch.int32))
    yield Case("own slots", (*outputs, *_requests(), d.ids(30, 500).view(5, 2, 3), 3, 2), None)


def _alloc_extend(d: Draw) -> Iterator[Case]:
    outputs = (d.blank(60, dtype=torch.int32), d.blank(1, dtype=torch.int32))
    lens = (ints([0, 17, 16, 9]), ints([5, 40, 16, 33]), ints([-1, 48, 15, 72]))
    yield Case("pages of 16", (*outputs, *lens, d.ids(20, 64), 16), None)


def _alloc_decode(d: Draw) -> Iterator[Case]:
    outputs = (d.blank(4, dtype=torch.int32), d.blank(1, dtype=torch.int32))
    yield Case("pages of 16", (*outputs, ints([1, 18, 0, 33]), ints([-1, 48, 15, 72]), d.ids(20, 64), 16), None)


HEADS = ((8, 2, 128, 128), (4, 4, 64, 64), (6, 1, 40, 72), (32, 8, 128, 128))
DECODE_LENS = [1, 0, SPLIT_TOKENS + 1, 37, 2 * SPLIT_TOKENS]


def _decode(d: Draw) -> Iterator[Case]:
    for heads, kv_heads, dim, dim_v in HEADS:
        rows = len(DECODE_LENS)
        pool = (d.normal(700, kv_heads, dim), v := d.normal(700, kv_heads, dim_v))
        for cap, window, sinks in ((0.0, -1, None), (30.0, 50, d.uniform(-1, 1, heads))):
            outputs = (d.blank(rows, heads, dim_v), d.blank(rows, heads, dtype=torch.float32))
            lists = d.lists(DECODE_LENS, 700)
            rest = (sinks, None, None, dim**-0.5, cap, window, 1.0, 1.0)
            label = f"{heads}/{kv_heads} heads D{dim} cap {cap:g} window {window}"
            yield Case(label, (*outputs, d.normal(rows, heads, dim), *pool, *lists, *rest), _largest(v))


def _extend(d: Draw) -> Iterator[Case]:
    q_lens, kv_lens = [3, 0, 40, 1], [3, 5, 100, 70]
    rows = sum(q_lens)
    for heads, kv_heads, dim, dim_v in HEADS:
        outputs = (d.blank(rows, heads, dim_v), d.blank(rows, heads, dtype=torch.float32))
        pool = (d.normal(200, kv_heads, dim), v := d.normal(200, kv_heads, dim_v))
        rest = (None, None, None, True, dim**-0.5, 0.0, -1, 1.0, 1.0)
        lists = d.lists(kv_lens, 200)
        yield Case(
            f"{heads}/{kv_heads} heads D{dim}", (*outputs, d.normal(rows, heads, dim), *pool, indptr(q_lens), *lists, *rest), _largest(v)
        )


def _ragged(d: Draw) -> Iterator[Case]:
    q_lens, kv_lens = [3, 0, 40], [3, 5, 90]
    rows, total = sum(q_lens), sum(kv_lens)
    for heads, kv_heads, dim, dim_v in HEADS:
        for causal, window in ((True, -1), (False, -1), (True, 9)):
            outputs = (d.blank(rows, heads, dim_v), d.blank(rows, heads, dtype=torch.float32))
            data = (d.normal(rows, heads, dim), d.normal(total, kv_heads, dim), v := d.normal(total, kv_heads, dim_v))
            rest = (indptr(q_lens), indptr(kv_lens), None, None, None, causal, dim**-0.5, 0.0, window)
            yield Case(f"{heads}/{kv_heads} heads D{dim} causal {causal} window {window}", (*outputs, *data, *rest), _largest(v))


def _merge(d: Draw) -> Iterator[Case]:
    a, b = d.normal(4, 6, 72), d.normal(4, 6, 72)
    lse_a, lse_b = d.uniform(-3, 3, 4, 6), d.uniform(-3, 3, 4, 6)
    lse_a[0] = float("-inf")
    lse_b[:2] = float("-inf")
    yield Case("with empty states", (d.blank(4, 6, 72), d.blank(4, 6, dtype=torch.float32), a, lse_a, b, lse_b), 1.0)


def _merge_many(d: Draw) -> Iterator[Case]:
    lse = d.uniform(-3, 3, 3, 4, 6)
    lse[0] = float("-inf")
    yield Case("three", (d.blank(4, 6, 72), d.blank(4, 6, dtype=torch.float32), d.normal(3, 4, 6, 72), lse), 1.0)


def _mla(d: Draw) -> Iterator[Case]:
    for heads in (16, 5):
        rows = len(DECODE_LENS)
        outputs = (d.blank(rows, heads, 512), d.blank(rows, heads, dtype=torch.float32))
        cache = d.normal(700, 576)
        data = (d.normal(rows, heads, 512), d.normal(rows, heads, 64), cache, None, *d.lists(DECODE_LENS, 700))
        yield Case(f"{heads} heads", (*outputs, *data, None, None, 192**-0.5, 1.0), _largest(cache))


def _mla_store(d: Draw) -> Iterator[Case]:
    for kind, scale in ((d.dtype, 1.0), (torch.float8_e4m3fn, 0.3)):
        args = (d.blank(9, 576, dtype=kind), d.normal(4, 512), d.normal(4, 64), ints([8, -1, 0, 3]), scale)
        yield Case(name_of(kind), args, None)


def _greedy(d: Draw) -> Iterator[Case]:
    logits = d.normal(6, 1001)
    logits[1, 5], logits[2, 7], logits[3] = float("nan"), float("inf"), float("-inf")
    yield Case("with broken rows", (d.blank(6, dtype=torch.int32), logits), None)


def _sample(d: Draw) -> Iterator[Case]:
    rows = 24
    parameters = (d.uniform(0.5, 1.5, rows), torch.randint(0, 60, (rows,), generator=d.generator).to(torch.int32))
    shares = (d.uniform(0.5, 1.1, rows), d.uniform(-0.1, 0.2, rows))
    counters = (torch.randint(0, 2**40, (rows,), generator=d.generator), torch.arange(rows, dtype=torch.int32))
    yield Case("all filters", (d.blank(rows, dtype=torch.int32), d.normal(rows, 3001), *parameters, *shares, *counters), None)


def _bias(d: Draw) -> Iterator[Case]:
    yield Case("a few", (d.normal(3, 503), indptr([2, 0, 3]), ints([1, 502, -1, 7, 600]), d.uniform(-4, 4, 5)))


def _penalties(d: Draw) -> Iterator[Case]:
    counts = torch.randint(0, 3, (3, 503), generator=d.generator).to(torch.int32)
    strengths = (d.uniform(0, 1, 3), d.uniform(0, 1, 3), d.uniform(1, 1.5, 3))
    yield Case("all three", (d.normal(3, 503), counts > 1, counts, *strengths), 4.0)


def _bitmask(d: Draw) -> Iterator[Case]:
    words = torch.randint(-(2**31), 2**31, (3, 16), generator=d.generator).to(torch.int32)
    yield Case("random bits", (d.normal(3, 503), words))


WEIGHTS = ((1, 64, 96), (5, 33, 40), (16, 256, 512), (3, 128, 4096))


def _linear(d: Draw) -> Iterator[Case]:
    for m, n, k in WEIGHTS:
        x, weight = d.normal(m, k), d.normal(n, k)
        yield Case(f"M{m} N{n} K{k}", (d.blank(m, n), x, weight, d.normal(n), n, k), _terms(x, weight))


def _skinny(d: Draw) -> Iterator[Case]:
    for m, n, k in WEIGHTS:
        x, weight = d.normal(m, k), d.normal(n, k)
        yield Case(f"M{m} N{n} K{k}", (d.blank(m, n), x, weight, d.normal(n)), _terms(x, weight))


def _experts(*shapes: tuple[int, int], **options: Any) -> Callable[[Draw], Iterator[Case]]:
    """Logits apart by much more than rounding, with a NaN and a masked expert; `options` gives the arguments behind them."""

    def cases(d: Draw) -> Iterator[Case]:
        for experts, top_k in shapes:
            logits = torch.stack([d.ids(experts, experts) for _ in range(5)]).to(d.dtype) * (8 / experts)
            logits[1, 0], logits[2, experts - 1] = float("nan"), float("-inf")
            for name, rest in options.items():
                args = [torch.linspace(0, 0.5, experts) if one == "bias" else one for one in rest]
                yield Case(
                    f"{name} E{experts}", (d.blank(5, top_k, dtype=torch.float32), d.blank(5, top_k, dtype=torch.int32), logits, *args)
                )

    return cases


def _align(d: Draw) -> Iterator[Case]:
    for tokens, experts, block in ((1, 8, 16), (64, 256, 16), (33, 60, 7), (700, 256, 64)):
        ids = torch.randint(-1, experts + 1, (tokens, 8), generator=d.generator).to(torch.int32)
        room = (ids.numel() + min(ids.numel(), experts) * (block - 1)) // block
        outputs = [d.blank(count, dtype=torch.int32) for count in (room * block, room, 1)]
        half = torch.where(torch.arange(experts) % 2 == 0, torch.arange(experts) // 2, -1).to(torch.int32)
        for name, table in (("all", None), ("half", half)):
            yield Case(f"{name} T{tokens} E{experts} block {block}", (*outputs, ids, table, experts, block), None)


QUANT_SHAPES = ((1, 8), (3, 128), (7, 4096), (2, 5120), (5, 33), (3, 20480), (0, 64))
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz)


def _rows_of_all_sizes(d: Draw, rows: int, width: int) -> Tensor:
    """With an infinity, a NaN and a row of zeros."""
    x = d.normal(rows, width) * torch.exp2(d.uniform(-12, 12, rows, 1)).to(d.dtype)
    if rows > 2:
        x[0, 0], x[1, -1], x[2] = float("inf"), float("nan"), 0
    return x


def _quant_static(d: Draw) -> Iterator[Case]:
    for kind in FLOAT8:
        for rows, width in QUANT_SHAPES:
            args = (d.blank(rows, width, dtype=kind), _rows_of_all_sizes(d, rows, width), torch.tensor([0.3]))
            yield Case(f"{name_of(kind)} {rows}x{width}", args, None)


def _quant_tokens(*kinds: torch.dtype) -> Callable[[Draw], Iterator[Case]]:
    def cases(d: Draw) -> Iterator[Case]:
        for kind in kinds:
            for rows, width in QUANT_SHAPES:
                outputs = (d.blank(rows, width, dtype=kind), d.blank(rows, 1, dtype=torch.float32))
                yield Case(f"{name_of(kind)} {rows}x{width}", (*outputs, _rows_of_all_sizes(d, rows, width)), None)

    return cases


def _quant_groups(d: Draw) -> Iterator[Case]:
    for kind, size in zip((*FLOAT8, FLOAT8[0]), QUANT_GROUPS):
        outputs = (d.blank(5, 3 * size, dtype=kind), d.blank(5, 3, dtype=torch.float32))
        yield Case(f"{name_of(kind)} groups of {size}", (*outputs, _rows_of_all_sizes(d, 5, 3 * size), size), None)


def _largest(values: Tensor) -> float:
    return float(values.double().abs().max())


def _terms(x: Tensor, weight: Tensor) -> float:
    return float((x.double().abs() @ weight.double().abs().T).max())


CASES: dict[str, Callable[[Draw], Iterator[Case]]] = {
    "rms_norm": _norm,
    "fused_add_rms_norm": _add_norm,
    "gemma_rms_norm": _norm,
    "gemma_fused_add_rms_norm": _add_norm,
    "layer_norm": _layer_norm,
    "apply_rope": _rope,
    "apply_rope_store_kv": _rope_store,
    "silu_and_mul": _gate(),
    "gelu_and_mul": _gate(),
    "gelu_tanh_and_mul": _gate(),
    "swiglu_oai": _gate(1.702, 7.0),
    "store_kv": _store,
    "copy_slots": _copy,
    "transfer_kv": _transfer,
    "kv_indices": _kv_indices,
    "qo_indptr": lambda d: iter([Case("lens", (d.blank(6, dtype=torch.int32), ints(LENS)), None)]),
    "write_req_to_token": _write,
    "window_kv_indices": _window,
    "page_table": _pages,
    "last_page_len": lambda d: iter([Case("lens", (d.blank(5, dtype=torch.int32), ints(LENS), 16), None)]),
    "mla_indices": _latent_pages,
    "draft_kv_indices": _draft,
    "alloc_extend": _alloc_extend,
    "alloc_decode": _alloc_decode,
    "decode_attention": _decode,
    "extend_attention": _extend,
    "ragged_attention": _ragged,
    "merge_state": _merge,
    "merge_states": _merge_many,
    "mla_decode": _mla,
    "mla_store": _mla_store,
    "greedy": _greedy,
    "sample": _sample,
    "apply_logit_bias": _bias,
    "apply_penalties": _penalties,
    "apply_token_bitmask": _bitmask,
    "packed_linear": _linear,  # and with it pack_weight, whose layout is each family's own
    "skinny_linear": _skinny,
    "topk_softmax": _experts((8, 2), (60, 4), (256, 8), plain=(False,), renormalized=(True,)),
    "topk_sigmoid": _experts((8, 2), (60, 4), (256, 8), plain=(None, False), biased=("bias", True)),
    "align_block_size": _align,
    "grouped_topk": _experts((16, 4), (256, 8), softmax=(None, 8, 3, 1.0, False, False), sigmoid=("bias", 8, 4, 2.5, True, True)),
    "quant_fp8": _quant_static,
    "per_token_quant_fp8": _quant_tokens(*FLOAT8),
    "per_token_quant_int8": _quant_tokens(torch.int8),
    "per_group_quant_fp8": _quant_groups,
}


class Outcome(NamedTuple):
    op: str
    family: str
    dtype: str
    label: str
    status: str  # passed, failed, declined
    detail: str


class Guarded:
    """A copy of a tensor on a device, with poison before and behind it."""

    def __init__(self, tensor: Tensor, device: str) -> None:
        self.base = poisoned(torch.empty(tensor.numel() + 2 * GUARD, dtype=tensor.dtype)).to(device)
        self.view = self.base[GUARD : GUARD + tensor.numel()].view(tensor.shape)
        self.view.copy_(tensor)

    def intact(self) -> bool:
        edges = torch.cat([bits(self.base)[:GUARD], bits(self.base)[-GUARD:]]).cpu()
        return bool((edges == bits(poisoned(torch.empty(2 * GUARD, dtype=self.base.dtype)))).all())


def bits(tensor: Tensor) -> Tensor:
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def _written(name: str) -> list[bool]:
    """Which arguments an op writes, by its schema."""
    op: Any = dispatch.overload(name, "reference")
    return [argument.alias_info is not None and argument.alias_info.is_write for argument in op._schema.arguments]


def _expected(name: str, case: Case) -> list[Any]:
    """Arguments after the reference has run on the CPU."""
    args = [argument.clone() if isinstance(argument, Tensor) else argument for argument in case.args]
    dispatch.overload(name, "reference")(*args)
    return args


def _call(name: str, family: str, args: list[Any]) -> None:
    if name == "packed_linear":  # the weight itself stands where its packed form goes
        weight = args[2]
        n, k = weight.shape
        packed = torch.empty(_registry.packed_weight_numel(family, n, k, weight.dtype), dtype=weight.dtype, device=weight.device)
        dispatch.overload("pack_weight", family)(packed, weight)
        args = [*args[:2], packed, *args[3:]]
    dispatch.overload(name, family)(*args)


def difference(got: Tensor, want: Tensor, inner: float | None, dtype: torch.dtype) -> str | None:
    """What is wrong with a result of a call over data of `dtype`, as a sentence."""
    if inner is None or want.dtype not in EPS:
        wrong = bits(got) != bits(want)
        if want.is_floating_point():
            wrong &= ~(got.float().isnan() & want.float().isnan())
    else:
        wide, target = got.double(), want.double()
        error = INNER_EPS[dtype] * inner
        allowed = 4 * EPS[want.dtype] * target.abs() + 1e-6 + (min(error, LSE_ERROR) if want.dtype is not dtype else error)
        wrong = ~((wide == target) | (wide.isnan() & target.isnan()) | ((wide - target).abs() <= allowed))
    if not wrong.any():
        return None
    index = tuple(wrong.nonzero()[0].tolist())
    values = f"{got[index].double().item()!r} instead of {want[index].double().item()!r}"
    return f"{int(wrong.sum())} of {wrong.numel()} elements are wrong, first at {list(index)}: {values}"


def run_case(name: str, family: str, case: Case, device: str, dtype: torch.dtype) -> str | None:
    """Run one case; None, or what is wrong."""
    want = _expected(name, case)
    guarded = [Guarded(argument, device) if isinstance(argument, Tensor) else None for argument in case.args]
    args = [argument if held is None else held.view for argument, held in zip(case.args, guarded)]
    _call(name, family, args)
    for place, (held, written) in enumerate(zip(guarded, _written(name))):
        if held is None:
            continue
        if not held.intact():
            return f"argument {place}: written outside of it"
        inner = case.inner if written else None
        fault = difference(held.view.cpu(), want[place] if written else case.args[place], inner, dtype)
        if fault is not None:
            return f"argument {place}{'' if written else ', an input'}: {fault}"
    return None


def _families(name: str, device: str, only: str | None) -> list[str]:
    found = dispatch.families_of(name, device)
    # Beside itself on the same device the reference proves nothing.
    return [family for family in found if (only is None or family == only) and not (family == "reference" and device == "cpu")]


def run(device: str, *, family: str | None = None, ops: list[str] | None = None, seed: int = 0) -> Iterator[Outcome]:
    """Every case of every op; ends early, after a failure that says so, when the device no longer answers."""
    for name in ops or CASES:
        for dtype in DTYPES if OPS[name].key_type is not IndexKey else (torch.int32,):
            for case in CASES[name](Draw(seed, dtype)):
                for chosen in _families(name, device, family):
                    outcome = _outcome(name, chosen, dtype, case, device)
                    yield outcome
                    if outcome.status == "failed" and not _alive(device):
                        return


def _outcome(name: str, family: str, dtype: torch.dtype, case: Case, device: str) -> Outcome:
    key = tuple(device if fact == "cpu" else fact for fact in OPS[name].key_of(*case.args))
    reason = dispatch.why_not(name, family, key)
    if reason is not None:
        return Outcome(name, family, name_of(dtype), case.label, "declined", reason)
    try:
        fault = run_case(name, family, case, device, dtype)
    except Exception as error:  # whatever a kernel raises is a finding
        fault = f"{type(error).__name__}: {error}"
    return Outcome(name, family, name_of(dtype), case.label, "passed" if fault is None else "failed", fault or "")


def _alive(device: str) -> bool:
    try:
        return int(torch.ones(1, device=device).sum()) == 1
    except Exception:
        return False


def table(outcomes: list[Outcome]) -> str:
    """Counts per op and family."""
    rows: dict[tuple[str, str], Counter] = defaultdict(Counter)
    for outcome in outcomes:
        rows[outcome.op, outcome.family][outcome.status] += 1
    lines = [f"{'op':<26}{'implementation':<16}{'passed':>8}{'failed':>8}{'declined':>10}"]
    for (op, family), counts in rows.items():
        lines.append(f"{op:<26}{family:<16}{counts['passed']:>8}{counts['failed']:>8}{counts['declined']:>10}")
    return "\n".join(lines)


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else device


def absent(device: str) -> str | None:
    """A sentence when a device type cannot be used here."""
    if device == "cpu" or (device == "cuda" and torch.cuda.is_available()):
        return None
    if device != "cuda":
        return f"device {device!r} is not one of cpu, cuda"
    from gristmill_kernels import loader_gpu

    return f"torch has no GPU here: {loader_gpu.why_no_gpu(loader_gpu.facts_of_this_machine()) or 'torch.cuda.is_available() is False'}"


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m gristmill_kernels selftest",
        description="Compare every operator of every implementation on this device with the float64 reference.",
    )
    parser.add_argument("--device", default=default_device(), help="cpu or cuda (default: %(default)s)")
    parser.add_argument("--family", choices=list(dispatch.FAMILIES), help="only this implementation")
    parser.add_argument("--op", action="append", choices=list(CASES), metavar="OP", help="only this operator; may be repeated")
    parser.add_argument("--seed", type=int, default=0, help="of the random inputs (default: 0)")
    parser.add_argument(
        "--json", type=Path, default=Path("gristmill_selftest.json"), help="report to attach to an issue (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    if (reason := absent(options.device)) is not None:
        print(f"gristmill_kernels selftest: {reason}", file=sys.stderr)
        return 1
    from gristmill_kernels._capabilities import capabilities

    begin = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the report tells of a fallback
        outcomes = list(run(options.device, family=options.family, ops=options.op, seed=options.seed))
        report: dict[str, Any] = {"capabilities": capabilities()}
    failures = [outcome for outcome in outcomes if outcome.status == "failed"]
    passed = sum(outcome.status == "passed" for outcome in outcomes)
    for outcome in failures[:20]:
        print(f"FAILED {outcome.op} {outcome.family} {outcome.dtype} {outcome.label}: {outcome.detail}")
    print(table(outcomes))
    uncovered = sorted(set(OPS) - set(CASES) - {"pack_weight"})
    if uncovered:
        print(f"without a self-test: {', '.join(uncovered)}")
    print(f"{options.device}: {passed} passed, {len(failures)} failed in {time.perf_counter() - begin:.0f} s")
    report |= {"device": options.device, "device_name": device_name(options.device), "seed": options.seed, "uncovered": uncovered}
    report["outcomes"] = [outcome._asdict() for outcome in outcomes]
    try:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    except OSError as error:
        print(f"gristmill_kernels selftest: the report cannot be written: {error}", file=sys.stderr)
        return 1
    print(f"wrote {options.json}")
    return 0 if passed and not failures else 1
