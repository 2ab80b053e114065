"""Which keys a row sees: with equal logits and one-hot values the output lists the positions attended, each with its exact weight."""

from __future__ import annotations

import itertools

import pytest
import torch

from gristmill_kernels import dispatch

KV_LEN, HEAD_DIM, WIDTH = 300, 16, 304  # past the border of a chunk; one value column per position
FAMILIES = [
    family
    for family in dispatch.families_of("extend_attention")
    if dispatch.why_not("extend_attention", family, ("cpu", torch.float32, torch.float32, HEAD_DIM, WIDTH, 2, 1)) is None
]
WINDOWS = (-1, 0, 1, 44, 255, 256)


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def expected_rows(positions: range, window_left: int, sink: float | None, holes: set[int]) -> torch.Tensor:
    rows = torch.zeros(len(positions), WIDTH, dtype=torch.float64)
    for row, position in enumerate(positions):
        seen = [key for key in range(position + 1) if (window_left < 0 or key >= position - window_left) and key not in holes]
        if seen:
            rows[row, seen] = 1 / (len(seen) + (0 if sink is None else torch.tensor(sink).double().exp()))
    return rows


class Request:
    """One request whose logits are all 0 and whose value at position j is one-hot at column j."""

    def __init__(self, seed: int, holes: set[int]) -> None:
        source = torch.Generator().manual_seed(seed)
        self.k = torch.full((KV_LEN + 9, 1, HEAD_DIM), float("nan"))
        self.v = torch.full((KV_LEN + 9, 1, WIDTH), float("nan"))
        self.slots = torch.randperm(KV_LEN + 9, generator=source)[:KV_LEN]
        self.k[self.slots] = torch.randn(KV_LEN, 1, HEAD_DIM, generator=source)
        self.v[self.slots] = torch.eye(KV_LEN, WIDTH)[:, None]
        for hole in holes:
            self.k[self.slots[hole]], self.v[self.slots[hole]] = float("nan"), float("nan")
        self.listed = self.slots.int()
        self.listed[list(holes)] = -1

    def decode(self, family: str, position: int, **options: object) -> torch.Tensor:
        out = torch.full((1, 2, WIDTH), float("nan"))
        lists = (i32(0, position + 1), self.listed[: position + 1].contiguous())
        self._run("decode_attention", family, out, (*lists, options["sinks"], None, None), options)
        return out

    def extend(self, family: str, begin: int, end: int, **options: object) -> torch.Tensor:
        out = torch.full((end - begin, 2, WIDTH), float("nan"))
        lists = (i32(0, end - begin), i32(0, end), self.listed[:end].contiguous())
        self._run("extend_attention", family, out, (*lists, None, None, options["sinks"], True), options)
        return out

    def ragged(self, family: str, **options: object) -> torch.Tensor:
        out = torch.full((KV_LEN, 2, WIDTH), float("nan"))
        q, k, v = torch.zeros(KV_LEN, 2, HEAD_DIM), self.k[self.slots], self.v[self.slots]
        args = (i32(0, KV_LEN), i32(0, KV_LEN), None, None, options["sinks"], True, 1.0, options["logit_cap"], options["window_left"])
        dispatch.overload("ragged_attention", family)(out, None, q, k, v, *args)
        return out

    def _run(self, op: str, family: str, out: torch.Tensor, middle: tuple, options: dict) -> None:
        numbers = (1.0, options["logit_cap"], options["window_left"], 1.0, 1.0)
        dispatch.overload(op, family)(out, None, torch.zeros(len(out), 2, HEAD_DIM), self.k, self.v, *middle, *numbers)


def check(got: torch.Tensor, expected: torch.Tensor) -> None:
    for head in range(2):
        assert torch.equal(got[:, head] != 0, expected != 0), "a position too many or too few"
        torch.testing.assert_close(got[:, head].double(), expected, rtol=2e-6, atol=0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sink", [None, 1.25], ids=["nosink", "sink"])
@pytest.mark.parametrize("logit_cap", [0.0, 7.0], ids=["nocap", "cap"])
@pytest.mark.parametrize("window_left", WINDOWS)
def test_decode_chunk_and_prefill_see_the_same_positions(
    family: str, window_left: int, logit_cap: float, sink: float | None, seed: int
) -> None:
    sinks = None if sink is None else torch.full((2,), sink)
    options = {"window_left": window_left, "logit_cap": logit_cap, "sinks": sinks}
    request = Request(seed, set())
    whole = expected_rows(range(KV_LEN), window_left, sink, set())
    check(request.extend(family, 0, KV_LEN, **options), whole)
    check(request.ragged(family, **options), whole)
    for begin, end in itertools.pairwise((0, 1, 17, 250, 258, KV_LEN)):
        check(request.extend(family, begin, end, **options), whole[begin:end])
    for position in (0, 1, 15, 16, 44, 45, 255, 256, 257, KV_LEN - 1):
        check(request.decode(family, position, **options), whole[position : position + 1])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("window_left", [-1, 3, 255])
def test_holes_keep_their_place_and_are_seen_by_nobody(family: str, window_left: int, seed: int) -> None:
    holes = {0, 7, 8, 9, 255, 256, 299}
    request = Request(seed, holes)
    options = {"window_left": window_left, "logit_cap": 0.0, "sinks": None}
    whole = expected_rows(range(KV_LEN), window_left, None, holes)
    check(request.extend(family, 0, KV_LEN, **options), whole)
    for position in (0, 8, 9, 12, 256, 257, 299):
        check(request.decode(family, position, **options), whole[position : position + 1])
