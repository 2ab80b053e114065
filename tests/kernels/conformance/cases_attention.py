"""Cases of attention (head sizes and ratios off the beaten track, masks, windows, caps, sinks, empty rows, holes, poison) and merges."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from gristmill_kernels.attention import plan_decode
from tests.kernels.conformance import oracle
from tests.kernels.conformance.harness import DTYPES, PRODUCT_EPS, Call, Case, Inputs, Output, inner, short, ulp

NAN, INF = float("nan"), float("inf")


@dataclass(frozen=True)
class Setting:
    """One attention problem. `q_lens` is None for decode; a kv length counts the request's own rows."""

    kv_lens: tuple[int, ...]
    q_lens: tuple[int, ...] | None = None
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (64, 64)
    dtype: torch.dtype = torch.float32
    layout: str = "dense"
    causal: bool = True
    mask: str = ""
    logit_cap: float = 0.0
    window_left: int = -1
    sinks: bool = False
    k_scale: float = 1.0
    v_scale: float = 1.0
    sm_scale: float | None = None
    holes: bool = False
    plan_workers: int = 0
    q_scale: float = 1.0
    with_lse: bool = True
    note: str = field(default="")

    @property
    def label(self) -> str:
        parts = [
            f"{self.heads[0]}:{self.heads[1]}x{self.dims[0]}/{self.dims[1]}",
            short(self.dtype),
            "kv" + ",".join(map(str, self.kv_lens)),
            "" if self.q_lens is None else "q" + ",".join(map(str, self.q_lens)),
            self.layout if self.layout != "dense" else "",
            "" if self.causal else "full",
            self.mask,
            f"cap{self.logit_cap:g}" * (self.logit_cap > 0),
            f"window{self.window_left}" * (self.window_left >= 0),
            "sinks" * self.sinks,
            "scales" * (self.k_scale != 1.0),
            "holes" * self.holes,
            f"plan{self.plan_workers}" * (self.plan_workers > 0),
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
    """Poisoned pool with values only in the slots that a request lists; slots are scattered."""
    total = sum(setting.kv_lens)
    num_slots = total + 7
    pool_layout = "padded" if setting.layout in ("packed", "ragged") else "dense"
    num_kv_heads, (head_dim, head_dim_v) = setting.heads[1], setting.dims
    k_cache = inputs.blank(
        (num_slots, num_kv_heads, head_dim), setting.dtype, setting.layout if setting.layout == "ragged" else pool_layout
    )
    v_cache = inputs.blank(
        (num_slots, num_kv_heads, head_dim_v), setting.dtype, setting.layout if setting.layout == "ragged" else pool_layout
    )
    order = inputs.permutation(num_slots)[:total]
    k_cache[order] = torch.randn(total, num_kv_heads, head_dim, generator=inputs.generator).to(setting.dtype)
    v_cache[order] = torch.randn(total, num_kv_heads, head_dim_v, generator=inputs.generator).to(setting.dtype)
    slots, lists, taken = order.tolist(), [], 0
    for length in setting.kv_lens:
        lists.append(slots[taken : taken + length])
        taken += length
    if setting.holes:
        for one in lists:
            for position in range(1, len(one), 5):
                k_cache[one[position]], v_cache[one[position]] = NAN, NAN
                one[position] = -1
    return k_cache, v_cache, lists


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


def _outputs(inputs: Inputs, setting: Setting, result: oracle.AttentionResult, out: Tensor, lse: Tensor | None) -> list[Output]:
    expected, logit_magnitude = torch.from_numpy(result.out), torch.from_numpy(result.logit_magnitude)
    # An error of the logits (float32 sums of exact products) moves every weight by that much, relatively, twice: above and below the line.
    eps = PRODUCT_EPS[setting.dtype] + 2 * 2.0**-22 * logit_magnitude[..., None]
    outputs = [Output(out, expected, 2 * ulp(expected.to(setting.dtype), setting.dtype) + eps * torch.from_numpy(result.out_magnitude))]
    if lse is not None:
        exact = torch.from_numpy(result.lse)
        finite = exact.masked_fill(exact.isinf(), 0.0)
        outputs.append(Output(lse, exact, 2 * ulp(finite, torch.float32) + 2.0**-22 * (1 + logit_magnitude)))
    return outputs


def attention_case(setting: Setting) -> Case:
    decode = setting.q_lens is None
    q_lens = (1,) * len(setting.kv_lens) if setting.q_lens is None else setting.q_lens

    def build(inputs: Inputs) -> Call:
        rows = sum(q_lens)
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
        numbers = (scale, setting.logit_cap, setting.window_left, setting.k_scale, setting.v_scale)
        if decode:
            schedule = workspace = None
            if setting.plan_workers:
                plan = plan_decode(
                    torch.tensor(kv_ends, dtype=torch.int32), *setting.heads, setting.dims[1], num_workers=setting.plan_workers
                )
                schedule, workspace = plan.schedule, plan.workspace
            args = (out, lse, q, k_cache, v_cache, kv_indptr, kv_indices, sinks, schedule, workspace, *numbers)
        else:
            pointers = (inputs.int_list(ends), kv_indptr, kv_indices, flat_mask, mask_indptr, sinks, setting.causal)
            args = (out, lse, q, k_cache, v_cache, *pointers, *numbers)
        return Call(args, _outputs(inputs, setting, result, out, lse))

    key = ("cpu", setting.dtype, setting.dtype, *setting.dims, *setting.heads)
    return Case("decode_attention" if decode else "extend_attention", setting.label, build, key)


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
    return settings + [Setting((0,), plan_workers=2), Setting((520, 30), plan_workers=2, window_left=100, sinks=True, heads=(6, 1))]


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


def all_cases() -> list[Case]:
    return grid_cases() + [attention_case(setting) for setting in _decode_settings() + _extend_settings()] + merge_cases()
