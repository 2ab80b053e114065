"""Cases of latent attention: one to a few query rows per request, many heads over one latent cache, 8-bit caches, holes and poison."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from gristmill_kernels.attention import max_decode_items, plan_decode
from tests.kernels.conformance import oracle
from tests.kernels.conformance.cases_attention import FLOAT8, NAN, Setting, check_outputs
from tests.kernels.conformance.harness import DTYPES, Call, Case, Inputs, Output, short


@dataclass(frozen=True)
class MlaSetting:
    """One problem. `q_lens` is None for one row per request without qo_indptr; a kv length counts the request's own rows."""

    kv_lens: tuple[int, ...]
    q_lens: tuple[int, ...] | None = None
    num_heads: int = 4
    dims: tuple[int, int] = (512, 64)
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    layout: str = "dense"
    kv_scale: float = 1.0
    holes: bool = False
    all_holes: bool = False  # the first request lists -1 only
    plan_workers: int = 0
    plan_room: int = 0
    with_lse: bool = True
    note: str = field(default="")

    @property
    def label(self) -> str:
        parts = [
            f"{self.num_heads}x{self.dims[0]}+{self.dims[1]}",
            short(self.dtype),
            str(self.cache_dtype or "").removeprefix("torch.float8_"),
            "kv" + ",".join(map(str, self.kv_lens)),
            "" if self.q_lens is None else "q" + ",".join(map(str, self.q_lens)),
            self.layout if self.layout != "dense" else "",
            "scale" * (self.kv_scale != 1.0),
            "holes" * self.holes,
            "allholes" * self.all_holes,
            f"plan{self.plan_workers}" * (self.plan_workers > 0),
            f"room{self.plan_room}" * (self.plan_room > 0),
            self.note,
        ]
        return "-".join(part for part in parts if part)


def _draw_queries(inputs: Inputs, setting: MlaSetting, rows: int) -> tuple[Tensor, Tensor]:
    latent_dim, rope_dim = setting.dims
    if setting.layout == "packed":  # both parts as slices of one tensor
        both = inputs.normal(rows, setting.num_heads, latent_dim + rope_dim, dtype=setting.dtype)
        return both[..., :latent_dim], both[..., latent_dim:]
    shape = (rows, setting.num_heads)
    return tuple(inputs.normal(*shape, width, dtype=setting.dtype, layout=setting.layout) for width in setting.dims)  # type: ignore[return-value]


def _draw_cache(inputs: Inputs, setting: MlaSetting) -> tuple[Tensor, list[list[int]]]:
    """Poisoned cache with values only in the slots that a request lists; slots are scattered."""
    total, width, dtype = sum(setting.kv_lens), sum(setting.dims), setting.cache_dtype or setting.dtype
    cache = inputs.blank((total + 7, width), dtype, "dense" if setting.layout == "dense" else "padded")
    order = inputs.permutation(total + 7)[:total]
    cache[order] = torch.randn(total, width, generator=inputs.generator).to(dtype)
    slots, lists, taken = order.tolist(), [], 0
    for length in setting.kv_lens:
        lists.append(slots[taken : taken + length])
        taken += length
    if setting.holes:
        for one in lists:
            for position in range(1, len(one), 5):
                cache[one[position]] = NAN
                one[position] = -1
    if setting.all_holes:
        lists[0] = [-1] * len(lists[0])
    return cache, lists


def mla_decode_case(setting: MlaSetting) -> Case:
    q_lens = (1,) * len(setting.kv_lens) if setting.q_lens is None else setting.q_lens

    def build(inputs: Inputs) -> Call:
        rows, latent_dim = sum(q_lens), setting.dims[0]
        q_nope, q_rope = _draw_queries(inputs, setting, rows)
        cache, lists = _draw_cache(inputs, setting)
        sm_scale = 192**-0.5
        ends = np.cumsum([0, *q_lens]).tolist()
        keys = cache.double().numpy()[:, None]
        result = oracle.attention(
            torch.cat([q_nope, q_rope], dim=-1).double().numpy(),
            keys,
            keys[..., :latent_dim],
            [(range(begin, end), one) for begin, end, one in zip(ends, ends[1:], lists)],
            scale=sm_scale * setting.kv_scale,
            v_scale=setting.kv_scale,
        )
        out = inputs.blank((rows, setting.num_heads, latent_dim), setting.dtype, "dense" if setting.layout == "dense" else "padded")
        lse = (
            inputs.blank((rows, setting.num_heads), torch.float32, setting.layout.replace("packed", "ragged")) if setting.with_lse else None
        )
        kv_ends = np.cumsum([0, *setting.kv_lens]).tolist()
        schedule = workspace = None
        if setting.plan_workers:
            room = max_decode_items(len(setting.kv_lens), kv_ends[-1]) + setting.plan_room
            plan = plan_decode(
                torch.tensor(kv_ends, dtype=torch.int32), setting.num_heads, 1, latent_dim, num_workers=setting.plan_workers,
                max_q_len=max([1, *q_lens]), max_items=room if setting.plan_room else None,
            )  # fmt: skip
            schedule, workspace = inputs.of(plan.schedule), plan.workspace.fill_(NAN)
        qo_indptr = None if setting.q_lens is None else inputs.int_list(ends)
        pointers = (qo_indptr, inputs.int_list(kv_ends), inputs.int_list([slot for one in lists for slot in one]))
        args = (out, lse, q_nope, q_rope, cache, *pointers, schedule, workspace, sm_scale, setting.kv_scale)
        return Call(args, check_outputs(Setting((), dtype=setting.dtype), result, out, lse))

    key = ("cpu", setting.dtype, setting.cache_dtype or setting.dtype, *setting.dims, setting.num_heads)
    return Case("mla_decode", setting.label, build, key)


def _decode_settings() -> list[MlaSetting]:
    mixed = (1, 0, 17, 256, 257, 515)
    settings = [MlaSetting(mixed, dtype=dtype, layout=layout) for dtype, layout in zip(DTYPES, ("dense", "packed", "ragged"))]
    settings += [
        MlaSetting((length,), None, heads, dtype=dtype)
        for length, heads, dtype in zip((1, 15, 16, 17, 257), (1, 16, 24, 128, 5), (*DTYPES, *DTYPES[:2]))
    ]
    settings += [
        MlaSetting((5, 300, 0, 40), (2, 4, 0, 1), dtype=dtype, layout=layout)
        for dtype, layout in zip(DTYPES, ("packed", "ragged", "dense"))
    ]
    settings += [MlaSetting((261,), (5,), 128, dtype=dtype) for dtype in DTYPES[:2]]  # more rows than a tile holds
    settings += [  # heads enough for kernels of large tiles, with more than one split and the last block of slots almost empty
        MlaSetting((1030, 0, 64, 129), None, 40, dtype=torch.bfloat16, holes=True),
        MlaSetting((129, 7), (3, 2), 48, dtype=torch.bfloat16, layout="packed", plan_workers=3),
        MlaSetting((65, 3), None, 128, dtype=torch.float16, layout="ragged"),
        MlaSetting((70, 20), (1, 2), 64, dtype=torch.float16, all_holes=True),
        MlaSetting((5, 300), all_holes=True),
    ]
    settings += [MlaSetting(mixed, plan_workers=workers, dtype=dtype) for workers in (1, 3) for dtype in DTYPES[:2]]
    settings += [
        MlaSetting((300, 9), (3, 2), plan_workers=2, plan_room=5, dtype=torch.bfloat16),
        MlaSetting((300, 9, 0), (3, 1, 2), 16, plan_workers=7, holes=True),
        MlaSetting((40, 2, 300), holes=True, dtype=torch.bfloat16, num_heads=16),
        MlaSetting((40, 9), (3, 4), kv_scale=0.37, dtype=torch.bfloat16),
        MlaSetting((3, 2), (5, 2), note="qlonger"),  # more rows than keys: the first ones see nothing
        MlaSetting((23, 300), None, 6, (64, 16)),
        MlaSetting((23, 300), (3, 1), 6, (128, 24), torch.bfloat16),
        MlaSetting((12,), None, 3, (40, 20), note="odd"),
        MlaSetting((), note="emptybatch"),
        MlaSetting((), (), note="emptybatch"),
        MlaSetting((0, 0), note="allempty"),
        MlaSetting((0,), (3,), note="nokeys"),
        MlaSetting((4, 0), (0, 0), note="norows"),
        MlaSetting((5, 4), with_lse=False, note="nolse"),
    ]
    settings += [
        MlaSetting((17, 0, 300), q_lens, 16, dtype=dtype, cache_dtype=cache_dtype, kv_scale=0.37, layout=layout)
        for q_lens, cache_dtype in zip((None, (3, 0, 4), None), FLOAT8)
        for dtype, layout in zip(DTYPES, ("dense", "packed", "ragged"))
    ]
    return settings


def _mla_store(slots: list[int], dtype: torch.dtype, cache_dtype: torch.dtype, layout: str, scale: float, dims: tuple[int, int]) -> Case:
    latent_dim, rope_dim = dims

    def build(inputs: Inputs) -> Call:
        rows = len(slots)
        if layout == "packed":
            both = inputs.normal(rows, latent_dim + rope_dim + 3, dtype=dtype)
            kv_c, k_rope = both[:, :latent_dim], both[:, latent_dim : latent_dim + rope_dim]
        else:
            kv_c, k_rope = (inputs.normal(rows, width, dtype=dtype, layout=layout) for width in dims)
        if rows and latent_dim > 8:  # what saturates, what vanishes, what is no number
            kv_c[0, :8] = torch.tensor([1e4, -6e4, 1e-9, -1e-6, 0.0, -0.0, float("inf"), NAN]).to(dtype)
        cache = inputs.blank((max([9, *slots]) + 3, latent_dim + rope_dim), cache_dtype, "dense" if layout == "dense" else "padded")
        new = torch.cat([kv_c, k_rope], dim=1)
        if scale != 1.0 or cache_dtype is not dtype:
            new = new.float() / torch.tensor(scale)
        if cache_dtype in FLOAT8:
            new = torch.from_numpy(oracle.round_to(_values_of(cache_dtype), new.double().numpy()))
        expected = cache.double()
        for row, slot in enumerate(slots):
            if slot >= 0:
                expected[slot] = new[row].to(dtype).double() if cache_dtype is dtype else new[row].double()
        return Call((cache, kv_c, k_rope, inputs.int_list(slots), scale), [Output(cache, expected, None)])

    name = "mla_store"
    parts = [f"{len(slots)}of{dims[0]}+{dims[1]}", short(dtype), str(cache_dtype).removeprefix("torch."), layout, f"scale{scale:g}"]
    return Case(name, "-".join(parts) + "-none" * (not slots), build, ("cpu", dtype, cache_dtype))


def _values_of(dtype: torch.dtype) -> np.ndarray:
    """Every finite value of an 8-bit float type, by its byte; NaN for the others."""
    values = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    return values.masked_fill(values.isinf(), NAN).numpy()


def _store_cases() -> list[Case]:
    slots = [3, -1, 8, 0, 5, -1]
    cases = [_mla_store(slots, dtype, dtype, layout, 1.0, (512, 64)) for dtype in DTYPES for layout in ("dense", "packed", "ragged")]
    cases += [_mla_store(slots, dtype, dtype, "dense", 0.37, (40, 24)) for dtype in DTYPES]
    cases += [
        _mla_store(slots, dtype, cache_dtype, layout, scale, dims)
        for cache_dtype in FLOAT8
        for dtype, layout, scale, dims in zip(
            (*DTYPES, torch.bfloat16),
            ("dense", "packed", "ragged", "dense"),
            (1.0, 0.25, 3.7, 0.01),
            ((512, 64), (512, 64), (40, 24), (13, 5)),
        )
    ]
    cases += [_mla_store(list(range(70)), dtype, dtype, "dense", 1.0, (512, 64)) for dtype in DTYPES[:2]]
    return [
        *cases,
        _mla_store([], torch.float32, torch.float32, "dense", 1.0, (512, 64)),
        _mla_store([-1], torch.float32, torch.float32, "dense", 1.0, (64, 8)),
    ]


def all_cases() -> list[Case]:
    return [mla_decode_case(setting) for setting in _decode_settings()] + _store_cases()
