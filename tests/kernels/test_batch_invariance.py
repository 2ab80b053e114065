"""A row's result is the same bit for bit alone, in any batch, in any chunk, with any plan and any number of threads."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

import gristmill_kernels as gk
from gristmill_kernels import dispatch
from tests.kernels import skinny_rows

DTYPES = [pytest.param(torch.float32, id="fp32"), pytest.param(torch.bfloat16, id="bf16")]


FAMILIES = [family for family in dispatch.families_of("rms_norm") if dispatch.why_not("rms_norm", family, ("cpu", torch.float32)) is None]


@pytest.fixture(params=FAMILIES, autouse=True)
def family(request: pytest.FixtureRequest) -> Iterator[str]:
    with dispatch.using(request.param):
        yield request.param


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Requests:
    """A pool of random KV and a few requests over it."""

    def __init__(self, seed: int, lens: list[int], dtype: torch.dtype, heads: tuple[int, int] = (6, 2), dim: int = 64) -> None:
        source = torch.Generator().manual_seed(seed)
        total = sum(lens)
        order = torch.randperm(total, generator=source).int()
        self.lists = list(order.split(lens))
        self.k, self.v = (torch.randn(total, heads[1], dim, generator=source).to(dtype) for _ in range(2))
        self.q = [torch.randn(length, heads[0], dim, generator=source).to(dtype) for length in lens]
        self.heads, self.dim = heads, dim

    def decode(self, which: list[int], upto: dict[int, int] | None = None, workers: int = 0, **options: object) -> dict[int, torch.Tensor]:
        """Last row of each request (or of its first `upto` tokens), in one batch."""
        lists = [self.lists[i][: (upto or {}).get(i)] for i in which]
        q = torch.stack([self.q[i][len(one) - 1] for i, one in zip(which, lists)])
        indptr = torch.tensor([0, *(len(one) for one in lists)]).cumsum(0).int()
        plan = gk.plan_decode(indptr, *self.heads, self.dim, num_workers=workers) if workers else None
        out = gk.decode_attention(q, self.k, self.v, indptr, torch.cat(lists), plan=plan, **options)
        return dict(zip(which, out))

    def extend(self, pieces: list[tuple[int, int, int]], **options: object) -> list[torch.Tensor]:
        """Rows [begin, end) of each (request, begin, end), in one batch."""
        lists = [self.lists[i][:end] for i, _, end in pieces]
        q = torch.cat([self.q[i][begin:end] for i, begin, end in pieces])
        qo_indptr = gk.qo_indptr(torch.tensor([end - begin for _, begin, end in pieces], dtype=torch.int32))
        kv_indptr = torch.tensor([0, *(end for *_, end in pieces)]).cumsum(0).int()
        out = gk.extend_attention(q, self.k, self.v, qo_indptr, kv_indptr, torch.cat(lists), **options)
        return list(out.split([end - begin for _, begin, end in pieces]))


LENS = [700, 1, 256, 257, 39, 513]


@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_rows_do_not_depend_on_neighbours_or_plans(dtype: torch.dtype, seed: int) -> None:
    requests = Requests(seed, LENS, dtype)
    together = requests.decode(list(range(len(LENS))))
    for i in range(len(LENS)):
        assert torch.equal(requests.decode([i])[i], together[i])
    for workers in (1, 2, 7):
        planned = requests.decode(list(reversed(range(len(LENS)))), workers=workers)
        assert all(torch.equal(planned[i], together[i]) for i in together)


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_do_not_depend_on_the_number_of_threads(dtype: torch.dtype, seed: int, threads: None) -> None:
    requests = Requests(seed, LENS, dtype)
    weight, x = torch.randn(300, 200).to(dtype), torch.randn(33, 200).to(dtype)
    packed = gk.pack_linear(weight)
    results = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        decoded = requests.decode(list(range(len(LENS))))
        extended = requests.extend([(0, 600, 700), (5, 0, 513)])
        parts = [*decoded.values(), *extended, gk.linear(x, packed)]
        results.append(torch.cat([part.flatten() for part in parts]))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"window_left": 90}, {"logit_cap": 20.0}], ids=["plain", "window", "cap"])
def test_extend_rows_do_not_depend_on_the_chunks_or_neighbours(dtype: torch.dtype, options: dict, seed: int) -> None:
    requests = Requests(seed, [620, 41], dtype)
    (whole,) = requests.extend([(0, 0, 620)], **options)
    cuts = [0, 1, 16, 17, 200, 256, 300, 513, 620]
    for begin, end in itertools.pairwise(cuts):
        chunk, _ = requests.extend([(0, begin, end), (1, 3, 41)], **options)
        assert torch.equal(chunk, whole[begin:end]), f"rows [{begin}, {end})"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"window_left": 90}, {"sinks": True}], ids=["plain", "window", "sinks"])
def test_a_decode_row_equals_the_same_row_computed_by_extend(dtype: torch.dtype, options: dict, seed: int) -> None:
    if options.get("sinks"):
        options = {"sinks": torch.linspace(-1, 2, 6)}
    requests = Requests(seed, [530], dtype)
    (whole,) = requests.extend([(0, 0, 530)], **options)
    for length in (1, 2, 16, 100, 256, 257, 512, 513, 530):
        assert torch.equal(requests.decode([0], {0: length}, **options)[0], whole[length - 1]), f"row {length - 1}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(96, 64), (50, 577), (1000, 100)])
def test_a_linear_row_does_not_depend_on_the_rows_beside_it(dtype: torch.dtype, n: int, k: int, seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    packed = gk.pack_linear(torch.randn(n, k, generator=source).to(dtype))
    x = torch.randn(70, k, generator=source).to(dtype)
    whole = gk.linear(x, packed)
    for begin, end in [(0, 1), (1, 3), (5, 6), (7, 16), (16, 33), (33, 70), (69, 70)]:
        assert torch.equal(gk.linear(x[begin:end], packed), whole[begin:end]), f"rows [{begin}, {end})"


def test_a_row_of_skinny_linear_stands_alone(seed: int) -> None:
    assert skinny_rows.check(seed)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_rope_and_activation_rows_stand_alone(dtype: torch.dtype, seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(37, 4, 72, generator=source).to(dtype), torch.randn(72, generator=source).to(dtype)
    table, positions = torch.randn(50, 72, generator=source), torch.randint(0, 50, (37,), generator=source).int()
    normed, gated, rotated = gk.rms_norm(x, weight), gk.silu_and_mul(x), x.clone()
    gk.apply_rope(rotated, rotated[:, :0], positions, table)
    for row in range(0, 37, 5):
        one = x[row : row + 1].clone()
        assert torch.equal(gk.rms_norm(one, weight)[0], normed[row])
        assert torch.equal(gk.silu_and_mul(one)[0], gated[row])
        gk.apply_rope(one, one[:, :0], positions[row : row + 1], table)
        assert torch.equal(one[0], rotated[row])


@pytest.mark.parametrize("dtype", DTYPES)
def test_more_norms_and_gates_stand_alone(dtype: torch.dtype, seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(37, 4, 76, generator=source).to(dtype), torch.randn(76, generator=source).to(dtype)
    ops = {
        "gemma_rms_norm": lambda rows: gk.gemma_rms_norm(rows, weight),
        "layer_norm": lambda rows: gk.layer_norm(rows, weight, weight),
        "gelu_and_mul": gk.gelu_and_mul,
        "gelu_tanh_and_mul": gk.gelu_tanh_and_mul,
        "swiglu_oai": gk.swiglu_oai,
    }
    for name, op in ops.items():
        whole = op(x)
        for row in range(0, 37, 5):
            assert torch.equal(op(x[row : row + 1])[0], whole[row]), name
