"""One row or request never disturbs another, whatever it holds; and what would reach out of bounds is refused on the CPU."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

import gristmill_kernels as gk
from gristmill_kernels import dispatch

NAN, INF = float("nan"), float("inf")
FAMILIES = [family for family in dispatch.families_of("rms_norm") if dispatch.why_not("rms_norm", family, ("cpu", torch.float32)) is None]


@pytest.fixture(params=FAMILIES, autouse=True)
def family(request: pytest.FixtureRequest) -> Iterator[str]:
    with dispatch.using(request.param):
        yield request.param


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [NAN, INF, 3e38])
def test_a_broken_request_does_not_reach_its_neighbours(dtype: torch.dtype, value: float, seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(60, heads, 64, generator=source).to(dtype) for heads in (4, 2, 2))
    slots, qo_indptr, kv_indptr = torch.randperm(60, generator=source).int(), i32(0, 5, 25, 27), i32(0, 5, 41, 60)
    pools = []
    for broken in (False, True):
        k_cache, v_cache = torch.empty(2, 60, 2, 64, dtype=dtype).unbind(0)
        keys, values, queries = k.clone(), v.clone(), q[:27].clone()
        if broken:
            keys[5:41], values[5:41], queries[5:25] = value, value, value
        gk.store_kv(keys, values, k_cache, v_cache, slots)
        extended = gk.extend_attention(queries, k_cache, v_cache, qo_indptr, kv_indptr, slots)
        decoded = gk.decode_attention(queries[[0, 6, 26]], k_cache, v_cache, kv_indptr, slots)
        pools.append((extended, decoded))
    (whole, whole_last), (spoilt, spoilt_last) = pools
    assert torch.equal(whole[:5], spoilt[:5]) and torch.equal(whole[25:], spoilt[25:])
    assert torch.equal(whole_last[[0, 2]], spoilt_last[[0, 2]])


def test_a_broken_row_stays_a_broken_row(seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(7, 48, generator=source), torch.randn(48, generator=source)
    packed = gk.pack_linear(torch.randn(30, 48, generator=source))
    broken = x.clone()
    broken[3] = NAN
    others = [0, 1, 2, 4, 5, 6]
    for function in (lambda rows: gk.rms_norm(rows, weight), gk.silu_and_mul, lambda rows: gk.linear(rows, packed), gk.greedy):
        assert torch.equal(function(x)[others], function(broken)[others])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_merge_to_the_same_in_any_order(dtype: torch.dtype, seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    outs = [torch.randn(4, 2, 64, generator=source).to(dtype) for _ in range(5)]
    lses = [torch.randn(4, 2, generator=source) * 3 for _ in range(5)]
    for state, row in itertools.product(range(5), range(4)):
        if state in ((0, 1, 2, 3, 4), (0, 1, 2, 4), (3,), ())[row]:  # row 0: all empty, row 1: one state left, row 2: one empty
            lses[state][row], outs[state][row] = -INF, NAN
    weights = torch.softmax(torch.stack(lses).double(), 0).nan_to_num()[..., None]
    expected = (weights * torch.stack(outs).double().nan_to_num()).sum(0)
    expected_lse = torch.logsumexp(torch.stack(lses).double(), 0)
    for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 0, 4, 1, 3]):
        out, lse = outs[order[0]].clone(), lses[order[0]].clone()
        for state in order[1:]:
            gk.merge_state(out, lse, outs[state], lses[state], out=out, lse=lse)  # in place
        assert not out.isnan().any() and not (lse == INF).any()
        assert torch.equal(out[0], torch.zeros_like(out[0])) and (lse[0] == -INF).all()
        assert torch.equal(out[1], outs[3][1]) and torch.equal(lse[1], lses[3][1])
        torch.testing.assert_close(out.double(), expected, atol=4 * torch.finfo(dtype).eps * 4, rtol=0)
        torch.testing.assert_close(lse.double(), expected_lse, atol=1e-5, rtol=1e-6)


def pool(slots: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(slots, 1, 8), torch.zeros(slots, 1, 8)


def table() -> torch.Tensor:
    return torch.zeros(2, 4, dtype=torch.int32)


OUT_OF_BOUNDS = {
    "decode: a slot behind the pool": lambda: gk.decode_attention(torch.ones(1, 1, 8), *pool(), i32(0, 2), i32(1, 6)),
    "decode: indptr beyond the indices": lambda: gk.decode_attention(torch.ones(1, 1, 8), *pool(), i32(0, 3), i32(1, 2)),
    "extend: a slot behind the pool": lambda: gk.extend_attention(torch.ones(1, 1, 8), *pool(), i32(0, 1), i32(0, 1), i32(2**31 - 1)),
    "extend: indptr beyond the indices": lambda: gk.extend_attention(torch.ones(1, 1, 8), *pool(), i32(0, 1), i32(0, 9), i32(1)),
    "extend: indptr beyond the rows": lambda: gk.extend_attention(torch.ones(1, 1, 8), *pool(), i32(0, 2), i32(0, 2), i32(1, 2)),
    "extend: a mask that is too short": lambda: gk.extend_attention(
        torch.ones(1, 1, 8), *pool(), i32(0, 1), i32(0, 2), i32(1, 2), custom_mask=torch.ones(1, dtype=torch.bool), mask_indptr=i32(0, 1)
    ),
    "store: a slot behind the pool": lambda: gk.store_kv(torch.ones(1, 1, 8), torch.ones(1, 1, 8), *pool(), i32(6)),
    "kv_indices: a position behind the table": lambda: gk.kv_indices(table(), i32(0), i32(5)),
    "kv_indices: a row behind the table": lambda: gk.kv_indices(table(), i32(2), i32(3)),
    "kv_indices: too little room": lambda: gk.kv_indices(table(), i32(0), i32(3), out=i32(0, 0)),
    "write: a position behind the table": lambda: gk.write_req_to_token(table(), i32(0), i32(3), i32(2), i32(1, 2)),
    "write: too few slots": lambda: gk.write_req_to_token(table(), i32(0), i32(0), i32(3), i32(1, 2)),
    "write: a row behind the table": lambda: gk.write_req_to_token(table(), i32(7), i32(0), i32(1), i32(1)),
    "bias: indptr beyond the ids": lambda: gk.apply_logit_bias(torch.zeros(1, 4), i32(0, 5), i32(1), torch.ones(1)),
}


@pytest.mark.parametrize("what", OUT_OF_BOUNDS)
def test_reaching_out_of_bounds_is_an_error_on_the_cpu(what: str) -> None:
    with pytest.raises((RuntimeError, IndexError)):
        OUT_OF_BOUNDS[what]()
