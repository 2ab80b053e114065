"""The core checks of one native library, run as a process of its own by test_native_levels.py: a process opens one library only.
Usage: GRISTMILL_KERNELS_ISA=<level> python -m tests.kernels.native_core <seed> [<directory of another build> [<cases per group>]]"""

from __future__ import annotations

import functools
import random
import sys
from pathlib import Path

import torch

import gristmill_kernels as gk
from gristmill_kernels import dispatch, loader
from tests.kernels.conformance.harness import Case, run_case

CASES_PER_GROUP = 2


def drawn_cases(seed: int, per_group: int) -> list[Case]:
    """Some cases of every op and dtype that native takes."""
    from tests.kernels.conformance.test_conformance import CASES  # asks what native takes, so the library has to be open by now

    groups: dict[tuple, list[Case]] = {}
    for case in CASES:
        if dispatch.why_not(case.op, "native", case.key) is None:
            groups.setdefault((case.op, *case.key[1:2]), []).append(case)
    source = random.Random(seed)
    return [case for group in groups.values() for case in source.sample(group, min(per_group, len(group)))]


def check_linear_rows(seed: int) -> None:
    """A row is the same bits alone, in a batch of any size and with one thread."""
    source = torch.Generator().manual_seed(seed)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for n, k in ((96, 320), (33, 77), (1, 1), (130, 1030)):
            packed = gk.pack_linear(torch.randn(n, k, generator=source).to(dtype))
            x = torch.randn(45, k, generator=source).to(dtype)
            bias = torch.randn(n, generator=source).to(dtype)
            whole = gk.linear(x, packed, bias)
            for m in (1, 2, 3, 7, 15, 16, 17, 31, 33):
                part = gk.linear(x[45 - m :], packed, bias)
                assert torch.equal(part, whole[45 - m :]), f"linear {dtype} n={n} k={k}: the last {m} rows differ from those of 45"
            torch.set_num_threads(1)
            assert torch.equal(gk.linear(x, packed, bias), whole), f"linear {dtype} n={n} k={k}: one thread gives other bits"
            torch.set_num_threads(2)


def check_decode_equals_extend(seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for heads, kv_heads, dim, dim_v in ((4, 4, 64, 64), (8, 2, 128, 128), (7, 1, 72, 40), (3, 3, 8, 8)):
            kv_len, q_len = 777, 21
            k = torch.randn(kv_len, kv_heads, dim, generator=source).to(dtype)
            v = torch.randn(kv_len, kv_heads, dim_v, generator=source).to(dtype)
            q = torch.randn(q_len, heads, dim, generator=source).to(dtype)
            slots = torch.randperm(kv_len, generator=source).int()
            for options in ({}, {"window_left": 300}, {"logit_cap": 20.0, "sinks": torch.randn(heads, generator=source)}):
                lse = torch.empty(q_len, heads)
                qo_indptr, kv_indptr = torch.tensor([0, q_len], dtype=torch.int32), torch.tensor([0, kv_len], dtype=torch.int32)
                rows = gk.extend_attention(q, k, v, qo_indptr, kv_indptr, slots, lse=lse, **options)
                lens = torch.arange(kv_len - q_len + 1, kv_len + 1, dtype=torch.int32)
                indptr = torch.cat([torch.zeros(1, dtype=torch.int32), lens.cumsum(0).int()])
                lists = torch.cat([slots[:length] for length in lens])
                lse_decode = torch.empty(q_len, heads)
                decoded = gk.decode_attention(q, k, v, indptr, lists, lse=lse_decode, **options)
                what = f"{dtype} heads {heads}/{kv_heads} dims {dim}/{dim_v} {options}"
                assert torch.equal(decoded, rows), f"decode differs from extend: {what}"
                assert torch.equal(lse_decode, lse), f"the LSE of decode differs from extend's: {what}"


def check_latent_rows(seed: int) -> None:
    """A row of latent attention is the same bits as the only one, among several and over an 8-bit cache."""
    source = torch.Generator().manual_seed(seed)
    for dtype, cache_dtype in ((torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float8_e4m3fn)):
        cache = torch.randn(600, 576, generator=source).to(cache_dtype)
        q = torch.randn(5, 48, 576, generator=source).to(dtype)
        slots = torch.randperm(600, generator=source)[:530].int()
        attend = functools.partial(gk.mla_decode, kv_cache=cache, sm_scale=192**-0.5)
        qo_indptr, kv_indptr = torch.tensor([0, 5], dtype=torch.int32), torch.tensor([0, 530], dtype=torch.int32)
        rows = attend(q[..., :512], q[..., 512:], kv_indptr=kv_indptr, kv_indices=slots, qo_indptr=qo_indptr)
        lens = torch.arange(526, 531, dtype=torch.int32)
        indptr = torch.cat([torch.zeros(1, dtype=torch.int32), lens.cumsum(0).int()])
        alone = attend(q[..., :512], q[..., 512:], kv_indptr=indptr, kv_indices=torch.cat([slots[:n] for n in lens]))
        assert torch.equal(alone, rows), f"latent rows of {dtype} over {cache_dtype} depend on their neighbours"


def main() -> None:
    seed = int(sys.argv[1])
    if len(sys.argv) > 2:
        other = loader.open_library(loader.find(Path(sys.argv[2])))
        loader.native_library = functools.cache(lambda: other)
    torch.set_num_threads(2)
    state = loader.native_library()
    assert state.reason is None, state.reason
    cases = drawn_cases(seed, int(sys.argv[3]) if len(sys.argv) > 3 else CASES_PER_GROUP)
    for case in cases:
        run_case(case, dispatch.overload(case.op, "native"), seed, "native")
    check_linear_rows(seed)
    check_decode_equals_extend(seed)
    check_latent_rows(seed)
    print(f"{state.isa}: {len(cases)} cases")


if __name__ == "__main__":
    main()
