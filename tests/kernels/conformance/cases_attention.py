"""Cases of attention over a pool and over contiguous keys (head sizes and ratios off the beaten track, masks, windows, caps, sinks, 8-bit
caches, empty rows, holes, poison) and merges."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from gristmill_kernels.attention import max_decode_items, plan_decode
from tests.kernels.conformance import oracle
from tests.kernels.conformance.harness import DTYPES, PRODUCT_EPS, Call, Case, Inputs, Output, inner, short, ulp

NAN, INF = float("nan"), float("inf")
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz)


@dataclass(frozen=True)
class Setting:
    """One attention problem. `q_lens` is None for decode; a kv length counts the request's own rows. `ragged`: keys lie one request after
    another, without a pool; with layout "packed" and as many rows as keys, q, k and v are slices of one tensor."""

    kv_lens: tuple[int, ...]
    q_lens: tuple[int, ...] | None = None
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (64, 64)
    dtype: torch.dtype = torch.float32
    layout: str = "dense"
    cache_dtype: torch.dtype | None = None  # None: dtype
    ragged: bool = False
    causal: bool = True
    mask: str = ""
    logit_cap: float = 0.0
    window_left: int = -1
    sinks: bool = False
    k_scale: float = 1.0
    v_scale: float = 1.0
    sm_scale: float | None = None
    holes: bool = False
    all_holes: bool = False  # the first request lists -1 only
    plan_workers: int = 0
    plan_room: int = 0  # items more than needed
    plan_window: bool = False  # plan for the window
    q_scale: float = 1.0
    with_lse: bool = True
    note: str = field(default="")

    @property
    def label(self) -> str:
        parts = [
            f"{self.heads[0]}:{self.heads[1]}x{self.dims[0]}/{self.dims[1]}",
            short(self.dtype),
            str(self.cache_dtype or "").removeprefix("torch.float8_"),
            "kv" + (",".join(map(str, self.kv_lens)) if len(self.kv_lens) < 10 else f"{self.kv_lens[0]}x{len(self.kv_lens)}"),
            "" if self.q_lens is None else "q" + ",".join(map(str, self.q_lens)),
            self.layout if self.layout != "dense" else "",
            "" if self.causal else "full",
            self.mask,
            f"cap{self.logit_cap:g}" * (self.logit_cap > 0),
            f"window{self.window_left}" * (self.window_left >= 0),
            "sinks" * self.sinks,
            "scales" * (self.k_scale != 1.0),
            "holes" * self.holes,
            "allholes" * self.all_holes,
            f"plan{self.plan_workers}" * (self.plan_workers > 0),
            f"room{self.plan_room}" * (self.plan_room > 0),
            "planwindow" * self.plan_window,
            self.note,
        ]
        return "-".join(part for part in parts if part)


def _draw_queries(inputs: Inputs, setting: Setting, rows: int) -> Tensor:
    (num_heads, num_kv_heads), (head_dim, head_dim_v) = setting.heads, setting.dims
    if setting.layout == "packed":  # q as a slice of one qkv tensor
        q_width = num_heads * head_dim
        qkv = inputs.normal(rows, q_width + num_kv_heads * (head_dim + head_dim_v), dtype=setting.dtype, scale=setting.q_scale)
        return qkv[:, :q_width].view(rows, num_heads, head_dim)
    return inputs.normal(rows, num_heads, head_dim, dtype=setting.dtype, layout=setting.layout, scale=setting.q_scale)


def _draw_pool(inputs: Inputs, setting: Setting) -> tuple[Tensor, Tensor, list[list[int]]]:
    """Poisoned pool with values only in the slots that a request lists; slots are scattered (ragged: in order)."""
    total = sum(setting.kv_lens)
    num_slots = total + 7
    dtype = setting.cache_dtype or setting.dtype
    layout = {"packed": "padded"}.get(setting.layout, setting.layout)
    num_kv_heads, (head_dim, head_dim_v) = setting.heads[1], setting.dims
    k_cache = inputs.blank((num_slots, num_kv_heads, head_dim), dtype, layout)
    v_cache = inputs.blank((num_slots, num_kv_heads, head_dim_v), dtype, layout)
    order = torch.arange(total) if setting.ragged else inputs.permutation(num_slots)[:total]
    k_cache[order] = torch.randn(total, num_kv_heads, head_dim, generator=inputs.generator).to(dtype)
    v_cache[order] = torch.randn(total, num_kv_heads, head_dim_v, generator=inputs.generator).to(dtype)
    slots, lists, taken = order.tolist(), [], 0
    for length in setting.kv_lens:
        lists.append(slots[taken : taken + length])
        taken += length
    if setting.holes:
        for one in lists:
            for position in range(1, len(one), 5):
                k_cache[one[position]], v_cache[one[position]] = NAN, NAN
                one[position] = -1
    if setting.all_holes:
        lists[0] = [-1] * len(lists[0])
    return k_cache, v_cache, lists


def _draw_packed(inputs: Inputs, setting: Setting) -> tuple[Tensor, Tensor, Tensor, list[list[int]]]:
    """q, k and v of a prefill as slices of one tensor, with poisoned rows after the last request."""
    (num_heads, num_kv_heads), (head_dim, head_dim_v) = setting.heads, setting.dims
    widths = (num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim_v)
    total = sum(setting.kv_lens)
    qkv = inputs.blank((total + 5, sum(widths)), setting.dtype)
    qkv[:total] = torch.randn(total, sum(widths), generator=inputs.generator).to(setting.dtype)
    q, k, v = qkv.split(widths, dim=1)
    ends = np.cumsum([0, *setting.kv_lens]).tolist()
    lists = [list(range(begin, end)) for begin, end in itertools.pairwise(ends)]
    return (
        q[:total].view(total, num_heads, head_dim),
        k.unflatten(1, (num_kv_heads, head_dim)),
        v.unflatten(1, (num_kv_heads, head_dim_v)),
        lists,
    )


def _poison_unseen(setting: Setting, k_cache: Tensor, v_cache: Tensor, lists: list[list[int]], q_lens: tuple[int, ...]) -> None:
    """NaN into every slot that a window hides from all rows of its request."""
    if setting.window_left < 0:
        return
    for one, q_len in zip(lists, q_lens):
        first_seen = max(0, len(one) - q_len - setting.window_left)
        for slot in filter(lambda slot: slot >= 0, one[:first_seen]):
            k_cache[slot], v_cache[slot] = NAN, NAN


def _draw_masks(inputs: Inputs, setting: Setting, q_lens: tuple[int, ...]) -> tuple[list[np.ndarray], Tensor, Tensor]:
    masks = []
    for q_len, kv_len in zip(q_lens, setting.kv_lens):
        mask = torch.rand(q_len, kv_len, generator=inputs.generator) < 0.6
        if setting.mask == "maskrows" and q_len:
            mask[q_len // 2] = False  # a row that sees nothing
        masks.append(mask.numpy())
    flat = torch.cat([torch.from_numpy(mask).flatten() for mask in masks])
    indptr = [0]
    for mask in masks:
        indptr.append(indptr[-1] + mask.size)
    return masks, inputs.of(flat), inputs.int_list(indptr)


def check_outputs(setting: Setting, result: oracle.AttentionResult, out: Tensor, lse: Tensor | None) -> list[Output]:
    expected, logit_magnitude = torch.from_numpy(result.out), torch.from_numpy(result.logit_magnitude)
    # An error of the logits (float32 sums of exact products) moves every weight by that much, relatively, twice: above and below the line.
    eps = PRODUCT_EPS[setting.dtype] + 2 * 2.0**-22 * logit_magnitude[..., None]
    outputs = [Output(out, expected, 2 * ulp(expected.to(setting.dtype), setting.dtype) + eps * torch.from_numpy(result.out_magnitude))]
    if lse is not None:
        exact = torch.from_numpy(result.lse)
        finite = exact.masked_fill(exact.isinf(), 0.0)
        outputs.append(Output(lse, exact, 2 * ulp(finite, torch.float32) + 2.0**-22 * (1 + logit_magnitude)))
    return outputs


def op_of(setting: Setting) -> str:
    return "ragged_attention" if setting.ragged else "decode_attention" if setting.q_lens is None else "extend_attention"


def attention_case(setting: Setting) -> Case:
    op = op_of(setting)
    q_lens = (1,) * len(setting.kv_lens) if setting.q_lens is None else setting.q_lens

    def build(inputs: Inputs) -> Call:
        rows = sum(q_lens)
        if setting.ragged and setting.layout == "packed" and q_lens == setting.kv_lens:
            q, k_cache, v_cache, lists = _draw_packed(inputs, setting)
        else:
            q = _draw_queries(inputs, setting, rows)
            k_cache, v_cache, lists = _draw_pool(inputs, setting)
        _poison_unseen(setting, k_cache, v_cache, lists, q_lens)
        scale = setting.dims[0] ** -0.5 if setting.sm_scale is None else setting.sm_scale
        sinks = inputs.normal(setting.heads[0], scale=2.0) if setting.sinks else None
        masks, flat_mask, mask_indptr = _draw_masks(inputs, setting, q_lens) if setting.mask else (None, None, None)
        ends = np.cumsum([0, *q_lens]).tolist()
        result = oracle.attention(
            q.double().numpy(),
            k_cache.double().numpy(),
            v_cache.double().numpy(),
            [(range(begin, end), one) for begin, end, one in zip(ends, ends[1:], lists)],
            scale=scale * setting.k_scale,
            causal=setting.causal,
            masks=masks,
            logit_cap=setting.logit_cap,
            window_left=setting.window_left,
            sinks=None if sinks is None else sinks.double().numpy(),
            v_scale=setting.v_scale,
        )
        out = inputs.blank((rows, setting.heads[0], setting.dims[1]), setting.dtype, "padded" if setting.layout != "dense" else "dense")
        lse = (
            inputs.blank((rows, setting.heads[0]), torch.float32, setting.layout.replace("packed", "padded")) if setting.with_lse else None
        )
        kv_ends = np.cumsum([0, *setting.kv_lens]).tolist()
        kv_indptr, kv_indices = inputs.int_list(kv_ends), inputs.int_list([slot for one in lists for slot in one])
        numbers: tuple = (scale, setting.logit_cap, setting.window_left, setting.k_scale, setting.v_scale)
        if op == "decode_attention":
            schedule = workspace = None
            if setting.plan_workers:
                schedule, workspace = _draw_plan(inputs, setting, kv_ends)
            args = (out, lse, q, k_cache, v_cache, kv_indptr, kv_indices, sinks, schedule, workspace, *numbers)
        else:
            pointers = (kv_indptr,) if setting.ragged else (kv_indptr, kv_indices)
            options = (flat_mask, mask_indptr, sinks, setting.causal, *(numbers[:3] if setting.ragged else numbers))
            args = (out, lse, q, k_cache, v_cache, inputs.int_list(ends), *pointers, *options)
        return Call(args, check_outputs(setting, result, out, lse))

    key = ("cpu", setting.dtype, setting.cache_dtype or setting.dtype, *setting.dims, *setting.heads)
    return Case(op, setting.label, build, key)


def _draw_plan(inputs: Inputs, setting: Setting, kv_ends: list[int]) -> tuple[Tensor, Tensor]:
    """A schedule, and a workspace full of NaN, which must not matter."""
    indptr = torch.tensor(kv_ends, dtype=torch.int32)
    room = max_decode_items(len(kv_ends) - 1, kv_ends[-1]) + setting.plan_room
    plan = plan_decode(
        indptr, *setting.heads, setting.dims[1], num_workers=setting.plan_workers, max_items=room if setting.plan_room else None,
        window_left=setting.window_left if setting.plan_window else -1,
    )  # fmt: skip
    return inputs.of(plan.schedule), plan.workspace.fill_(NAN)


HEAD_DIMS = ((64, 64), (72, 72), (80, 80), (96, 96), (112, 112), (128, 128), (192, 128), (256, 256), (512, 512), (576, 512))
RATIOS = (1, 3, 5, 7, 16, 24)
KV_LENS = (1, 15, 16, 17, 257)


def grid_cases() -> list[Case]:
    """60 of the 10 x 6 x 5 x 2 combinations: every head size with every ratio once, the rest rotating."""
    cases = []
    for number, (dims, ratio) in enumerate(itertools.product(HEAD_DIMS, RATIOS)):
        dtype = torch.float32 if number % 2 else torch.bfloat16
        kv_len = KV_LENS[number % len(KV_LENS)]
        num_kv_heads = 2 if ratio < 7 else 1
        if number % 3:
            setting = Setting((kv_len,), None, (ratio * num_kv_heads, num_kv_heads), dims, dtype, "packed")
        else:
            setting = Setting((kv_len,), (min(kv_len, 3),), (ratio * num_kv_heads, num_kv_heads), dims, dtype, "packed")
        cases.append(attention_case(setting))
    return cases


def _decode_settings() -> list[Setting]:
    mixed = (1, 0, 17, 256, 257, 515)
    settings = [Setting(mixed, dtype=dtype, layout=layout) for dtype, layout in zip(DTYPES, ("dense", "packed", "ragged"))]
    settings += [Setting((40, 3, 300), window_left=window, dtype=dtype) for window in (0, 1, 31, 1000) for dtype in DTYPES[:2]]
    settings += [
        Setting((33, 5), logit_cap=5.0, q_scale=4.0),
        Setting((300, 1), logit_cap=30.0, dtype=torch.bfloat16),
        Setting((0, 40, 1), sinks=True),
        Setting((0, 258), sinks=True, dtype=torch.bfloat16),
        Setting((20, 9), k_scale=0.37, v_scale=2.5),
        Setting((40, 2, 300), holes=True),
        Setting((300, 5, 1), all_holes=True, dtype=torch.bfloat16),
        Setting((1, 9), all_holes=True, sinks=True),
        Setting((60, 300), holes=True, window_left=20, sinks=True, logit_cap=8.0, k_scale=1.5, v_scale=0.5, dtype=torch.bfloat16),
        Setting((23,), dims=(8, 8)),
        Setting((23,), dims=(64, 24), heads=(6, 3)),
        Setting((19,), dims=(24, 136), heads=(5, 5)),
        Setting((7, 30), sm_scale=1.0, q_scale=3.0, note="sharp"),
        Setting((600,), q_scale=40.0, note="onehot"),
        Setting((), note="emptybatch"),
        Setting((0, 0), note="allempty"),
        Setting((5, 4), with_lse=False, note="nolse"),
        Setting((12,), dims=(20, 20), note="odd"),
    ]
    settings += [Setting(mixed, plan_workers=workers, dtype=dtype) for workers in (1, 3, 64) for dtype in DTYPES[:2]]
    settings += [Setting((0,), plan_workers=2), Setting((520, 30), plan_workers=2, window_left=100, sinks=True, heads=(6, 1))]
    settings += [Setting(mixed, plan_workers=3, plan_room=4), Setting((0, 0), plan_workers=3, plan_room=4)]
    settings += [Setting((770, 30, 0, 257), plan_workers=2, plan_window=True, window_left=window) for window in (0, 100, 255, 256, 600)]
    # More pieces than one launch has warps for, and more than a kernel merges at once, among few requests and many.
    settings += [Setting((21,) * 70, heads=(12, 6), dtype=dtype, note="many") for dtype in DTYPES[:2]]
    settings += [Setting(lens, heads=(1, 1), dims=(8, 8), note="long") for lens in ((66_000,), (2, 66_000, 0, 1, 3))]
    return settings + _many_heads_settings() + _float8_settings(None)


def _many_heads_settings() -> list[Setting]:
    """KV heads in numbers that some kernels take several of at once, some with more than 8 query heads each; over all edges of a list."""
    half, bf16 = torch.float16, torch.bfloat16
    mixed = (1, 0, 17, 515, 16, 1030)
    return [
        Setting(mixed, heads=(8, 4), dtype=bf16),
        Setting(mixed, heads=(16, 8), dtype=half, holes=True),
        Setting((33, 600), heads=(32, 8), dims=(128, 128), dtype=bf16, sinks=True),
        Setting((40, 3, 1100), heads=(36, 4), dims=(128, 128), dtype=half, window_left=520, holes=True),
        Setting((530, 2), heads=(16, 16), dtype=bf16, window_left=3, logit_cap=5.0),
        Setting((40, 530), heads=(48, 4), dtype=bf16, layout="ragged", all_holes=True),
        Setting((5, 70), heads=(8, 8), dims=(256, 256), dtype=bf16, holes=True),
        Setting((19, 0, 530), heads=(44, 4), dims=(256, 256), dtype=half),
        Setting((21,) * 70, heads=(4, 4), dtype=bf16, note="many"),
        Setting((300, 9), heads=(12, 12), dtype=half, layout="packed", k_scale=0.5, v_scale=2.0),
    ]


def _float8_settings(q_lens: tuple[int, ...] | None) -> list[Setting]:
    """8-bit caches: every format under every query dtype, widths that fill no vector, and everything else at once."""
    few = q_lens and (3, 0, 9)
    settings = [
        Setting((17, 0, 300), few, dtype=dtype, cache_dtype=cache_dtype, k_scale=0.37, v_scale=2.5, layout=layout)
        for cache_dtype in FLOAT8
        for dtype, layout in zip(DTYPES, ("dense", "packed", "ragged"))
    ]
    return settings + [
        Setting((33, 2), q_lens, (6, 2), (72, 24), torch.bfloat16, cache_dtype=FLOAT8[0], k_scale=0.5),
        Setting((33, 2), q_lens, (6, 2), (64, 32), torch.bfloat16, cache_dtype=FLOAT8[1]),  # narrow values
        Setting((70, 5), q_lens, (4, 2), (64, 16), torch.float16, cache_dtype=FLOAT8[0]),
        Setting((19, 270), q_lens, (16, 1), (576, 512), torch.bfloat16, cache_dtype=FLOAT8[0], holes=True),
        Setting(
            (40, 280), q_lens, (8, 8), (96, 96), torch.float32, cache_dtype=FLOAT8[2], holes=True, window_left=9, sinks=True, logit_cap=4.0
        ),
        Setting((40, 280), q_lens, (24, 1), (128, 128), torch.bfloat16, cache_dtype=FLOAT8[1], window_left=30, sinks=True, v_scale=0.1),
    ]


def _extend_settings() -> list[Setting]:
    settings = [
        Setting((5, 40, 0, 300), (5, 3, 0, 44), dtype=dtype, layout=layout) for dtype, layout in zip(DTYPES, ("dense", "packed", "ragged"))
    ]
    settings += [Setting((70, 9), (20, 9), window_left=window, dtype=dtype) for window in (0, 5, 64) for dtype in DTYPES[:2]]
    settings += [
        Setting((33, 8), (12, 8), causal=False),
        Setting((40, 12), (6, 2), causal=False, window_left=7),
        Setting((3, 2), (5, 2), note="qlonger"),  # more rows than keys: the first ones see nothing
        Setting((30, 17), (9, 5), mask="mask"),
        Setting((30, 260), (9, 5), mask="maskrows", dtype=torch.bfloat16),
        Setting((30, 17), (9, 5), mask="maskrows", window_left=6, sinks=True, causal=False),
        Setting((30, 260), (9, 5), (24, 1), mask="mask", window_left=16, dtype=torch.float16),
        Setting((300, 5), (4, 2), all_holes=True, dtype=torch.bfloat16),
        Setting((33,), (8,), logit_cap=5.0, q_scale=4.0),
        Setting((20, 3), (6, 4), sinks=True, note="qlonger"),
        Setting((29, 7), (9, 7), k_scale=0.37, v_scale=2.5, dtype=torch.bfloat16),
        Setting((50, 300), (12, 3), holes=True),
        Setting((90,), (17,), holes=True, window_left=20, sinks=True, logit_cap=8.0, k_scale=1.5, v_scale=0.5),
        Setting((23,), (10,), dims=(8, 8)),
        Setting((23,), (10,), dims=(64, 24), heads=(6, 3)),
        Setting((24,), (24,), sm_scale=1.0, q_scale=3.0, note="sharp"),
        Setting((), (), note="emptybatch"),
        Setting((4, 0), (0, 0), note="norows"),
        Setting((0,), (3,), note="nokeys"),
        Setting((12,), (5,), with_lse=False, note="nolse"),
        Setting((12,), (5,), dims=(20, 20), note="odd"),
        Setting((530,), (70,), heads=(2, 1), dims=(32, 32)),
    ]
    return settings + _float8_settings((2, 2))


def _ragged_settings() -> list[Setting]:
    settings = [
        Setting((5, 40, 0, 300), (5, 3, 0, 44), ragged=True, dtype=dtype, layout=layout)
        for dtype, layout in zip(DTYPES, ("dense", "packed", "ragged"))
    ]
    settings += [Setting((17, 1, 40), (17, 1, 40), ragged=True, layout="packed", dtype=dtype, dims=(192, 128)) for dtype in DTYPES]
    settings += [
        Setting((length,), (length,), (3 * ratio, 3), dims, dtype, ragged=True, layout="packed")
        for number, dims in enumerate(HEAD_DIMS)
        for length, ratio, dtype in [((1, 15, 16, 17)[number % 4], RATIOS[number % 6], DTYPES[number % 3])]
    ]
    settings += [Setting((70, 9), (20, 9), ragged=True, window_left=window, dtype=dtype) for window in (0, 5, 64) for dtype in DTYPES[:2]]
    settings += [
        Setting((257,), (40,), (16, 1), (192, 128), torch.bfloat16, ragged=True),
        Setting((33, 8), (12, 8), ragged=True, causal=False),
        Setting((33, 8), (12, 8), ragged=True, causal=False, window_left=4),
        Setting((3, 2), (5, 2), ragged=True, note="qlonger"),
        Setting((30, 17), (9, 5), ragged=True, mask="mask"),
        Setting((30, 260), (9, 5), ragged=True, mask="maskrows", dtype=torch.bfloat16),
        Setting((30, 17), (9, 5), ragged=True, mask="maskrows", window_left=6, sinks=True, causal=False),
        Setting((30, 260), (9, 5), (24, 1), ragged=True, mask="mask", window_left=16, dtype=torch.bfloat16),
        Setting((33,), (8,), ragged=True, logit_cap=5.0, q_scale=4.0),
        Setting((20, 3), (6, 4), ragged=True, sinks=True),
        Setting((24,), (24,), ragged=True, sm_scale=1.0, q_scale=3.0, note="sharp"),
        Setting((), (), ragged=True, note="emptybatch"),
        Setting((4, 0), (0, 0), ragged=True, note="norows"),
        Setting((0,), (3,), ragged=True, note="nokeys"),
        Setting((12,), (5,), ragged=True, with_lse=False, note="nolse"),
        Setting((12,), (5,), ragged=True, dims=(20, 20), note="odd"),
    ]
    return settings


def _merge_state(
    name: str, lse_a: Tensor, lse_b: Tensor, head_dim: int, dtype: torch.dtype, layout: str, alias: str, scale: float = 1.0
) -> Case:
    def build(inputs: Inputs) -> Call:
        shape = (*lse_a.shape, head_dim)
        o_a, o_b = (inputs.normal(*shape, dtype=dtype, layout=layout, scale=scale) for _ in range(2))
        for o, lse in ((o_a, lse_a), (o_b, lse_b)):
            o[lse == -INF] = NAN  # the output of an empty state may be anything
        in_a, in_b = inputs.of(lse_a, layout), inputs.of(lse_b, layout)
        exact_out, exact_lse, magnitude = map(torch.from_numpy, oracle.merge(*(x.double().numpy() for x in (o_a, in_a, o_b, in_b))))
        out, lse = {"": (None, None), "a": (o_a, in_a), "b": (o_b, in_b)}[alias]
        if out is None or lse is None:
            out, lse = inputs.blank(shape, dtype, layout), inputs.blank(tuple(lse_a.shape), torch.float32, layout)
        tolerance = inner(exact_out, magnitude, dtype, eps=2.0**-22)
        one_empty = (lse_a == -INF) ^ (lse_b == -INF)
        tolerance[one_empty] = 0.0
        finite = exact_lse.masked_fill(exact_lse.isinf(), 0.0)
        lse_tolerance = torch.where(one_empty, 0.0, 2 * ulp(finite, torch.float32) + 2.0**-23)
        return Call((out, lse, o_a, in_a, o_b, in_b), [Output(out, exact_out, tolerance), Output(lse, exact_lse, lse_tolerance)])

    return Case("merge_state", f"{name}-{head_dim}-{short(dtype)}-{layout}{'-into_' + alias if alias else ''}", build, ("cpu", dtype))


def merge_cases() -> list[Case]:
    edge_a = torch.tensor([[-INF, -INF], [-INF, 1.5], [1.5, -INF], [-1e30, -1e30]])
    edge_b = torch.tensor([[-INF, -INF], [1.5, -INF], [-INF, 1.5], [-1e30, -1e30]])
    cases = [_merge_state("edges", edge_a, edge_b, 64, dtype, "dense", alias) for dtype in DTYPES for alias in ("", "a", "b")]
    spread = torch.linspace(-60, 60, 30).view(10, 3)
    for dtype, layout in zip(DTYPES, ("dense", "padded", "ragged")):
        cases += [
            _merge_state("spread", spread, spread.flip(0) * 0.7, dim, dtype, layout, alias) for dim in (8, 72, 13) for alias in ("", "a")
        ]
    equal = torch.full((3, 2), 700.0)
    return cases + [
        _merge_state("large", equal, equal + 3, 128, torch.float32, "dense", ""),
        _merge_state("none", equal[:0], equal[:0], 64, torch.float32, "dense", ""),
    ]


def _merge_states(name: str, lse: Tensor, head_dim: int, dtype: torch.dtype, layout: str, alias: int | None = None) -> Case:
    """`lse` is [N, T, H]; with an alias the results go into that state."""

    def build(inputs: Inputs) -> Call:
        o = inputs.normal(*lse.shape, head_dim, dtype=dtype, layout=layout)
        o[lse == -INF] = NAN
        given = inputs.of(lse, layout)
        exact_out, exact_lse, magnitude = map(torch.from_numpy, oracle.merge_many(o.double().numpy(), given.double().numpy()))
        if alias is None:
            out, out_lse = inputs.blank(tuple(o.shape[1:]), dtype, layout), inputs.blank(tuple(lse.shape[1:]), torch.float32, layout)
        else:
            out, out_lse = o[alias], given[alias]
        tolerance = inner(exact_out, magnitude, dtype, eps=2.0**-22)
        exact = (lse != -INF).sum(0) <= 1
        tolerance[exact] = 0.0
        finite = exact_lse.masked_fill(exact_lse.isinf(), 0.0)
        lse_tolerance = torch.where(exact, 0.0, 2 * ulp(finite, torch.float32) + 2.0**-23 * max(1, len(lse)))
        return Call((out, out_lse, o, given), [Output(out, exact_out, tolerance), Output(out_lse, exact_lse, lse_tolerance)])

    size = "x".join(map(str, (*lse.shape, head_dim)))
    return Case("merge_states", f"{name}-{size}-{short(dtype)}-{layout}{'' if alias is None else f'-into_{alias}'}", build, ("cpu", dtype))


def merge_states_cases() -> list[Case]:
    # CASE: all empty; one of five not empty, in every place; huge negative ones; all -1e30.
    edges = torch.full((5, 8, 2), -INF)
    for state in range(5):
        edges[state, state + 1] = 1.5 - state
    edges[:, 6] = -1e30
    edges[1::2, 7] = torch.tensor([0.5, 3.0])
    cases = [_merge_states("edges", edges, 64, dtype, "dense", alias) for dtype in DTYPES for alias in (None, 0, 2, 4)]
    cases += [_merge_states("edges", edges[:2], 64, dtype, "padded") for dtype in DTYPES]
    spread = torch.linspace(-60, 60, 90).view(3, 10, 3)
    for dtype, layout in zip(DTYPES, ("dense", "padded", "ragged")):
        cases += [_merge_states("spread", spread, dim, dtype, layout, alias) for dim in (8, 72, 13, 512) for alias in (None, 1)]
    many = torch.linspace(3, -3, 64 * 6).view(64, 2, 3)
    return [
        *cases,
        _merge_states("many", many, 128, torch.bfloat16, "dense"),
        _merge_states("one", spread[:1], 64, torch.bfloat16, "ragged"),
        _merge_states("large", torch.full((3, 2, 2), 700.0), 128, torch.float32, "dense"),
        _merge_states("nothing", spread[:0], 64, torch.float32, "dense"),
        _merge_states("norows", spread[:, :0], 64, torch.float32, "dense"),
    ]


def all_cases() -> list[Case]:
    settings = _decode_settings() + _extend_settings() + _ragged_settings()
    return grid_cases() + [attention_case(setting) for setting in settings] + merge_cases() + merge_states_cases()
