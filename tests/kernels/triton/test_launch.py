"""The launcher's bookkeeping and the family's registration, as far as neither needs a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gristmill_kernels import dispatch
from gristmill_kernels import triton as family
from tests.kernels.triton.processes import environment

if family.missing() is not None:
    pytest.skip(str(family.missing()), allow_module_level=True)

import triton
import triton.language as tl

from gristmill_kernels.triton import launch, tables
from gristmill_kernels.triton.launch import Facts, Kernel, Options


@triton.jit
def _scale_kernel(out, x, ids, out_row: tl.int64, x_row: tl.int64, count: tl.int32, factor: tl.float32, BLOCK: tl.constexpr):
    row = tl.load(ids + tl.program_id(0)).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    tl.store(out + row * out_row + cols, tl.load(x + row * x_row + cols, mask=cols < count, other=0.0) * factor, mask=cols < count)


@triton.jit
def _constant_in_between(out, BLOCK: tl.constexpr, count: tl.int32):
    tl.store(out + tl.arange(0, BLOCK), count)


@triton.jit
def _strides_apart(out, out_row: tl.int64, count: tl.int32, out_head: tl.int64):
    tl.store(out + out_row + out_head, count)


@triton.jit
def _unknown_annotation(out, count: tl.uint8):
    tl.store(out, count)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> tuple[Kernel, list[tuple]]:
    """A kernel that compiles nothing, and the facts each of its variants would be compiled for."""
    kernel, prepared = Kernel(_scale_kernel), []

    def prepare(*facts: Any) -> Any:
        prepared.append(facts)
        return lambda *call: None

    monkeypatch.setattr(kernel, "_prepare", prepare)
    return kernel, prepared


def arguments(offset: int = 0, stride: int = 64, id_offset: int = 0) -> tuple:
    base = torch.zeros(4 * stride + offset, dtype=torch.float16)
    x = base.as_strided((4, 64), (stride, 1), offset)
    return x, x, torch.zeros(8, dtype=torch.int32)[id_offset:], stride, stride, 64, 2.0


def test_a_variant_is_prepared_once(recorded: tuple[Kernel, list[tuple]]) -> None:
    kernel, prepared = recorded
    for id_offset in (0, 1, 3):  # where a list of indices begins does not matter
        kernel((4, 1, 1), arguments(id_offset=id_offset), (64,))
    assert prepared == [(None, [torch.float16, torch.float16, torch.int32], True, 16, (64,), Options())]


def test_what_changes_the_code_gets_a_variant_of_its_own(recorded: tuple[Kernel, list[tuple]]) -> None:
    kernel, prepared = recorded
    for args in (arguments(), arguments(offset=3), arguments(stride=72), arguments(stride=67)):
        kernel((4, 1, 1), args, (64,))
    kernel((4, 1, 1), arguments(), (128,))
    kernel((4, 1, 1), arguments(), (64,), Options(num_warps=8))
    assert [(facts[2], facts[3]) for facts in prepared] == [(True, 16), (False, 16), (True, 8), (True, 1), (True, 16), (True, 16)]


def test_an_empty_grid_launches_nothing(recorded: tuple[Kernel, list[tuple]]) -> None:
    kernel, prepared = recorded
    kernel((0, 1, 1), arguments(), (64,))
    kernel((4, 0, 1), arguments(), (64,))
    assert not prepared


def test_the_compiler_is_told_what_the_launcher_found() -> None:
    kernel = Kernel(_scale_kernel)
    source = kernel.source([torch.float16, None, torch.int32], True, 8, (64,))
    assert list(source.signature.values()) == ["*fp16", "constexpr", "*i32", "i64", "i64", "i32", "fp32", "constexpr"]
    assert source.constants == {(1,): None, (7,): 64}
    assert source.attrs == {(0,): [["tt.divisibility", 16]], (3,): [["tt.divisibility", 8]], (4,): [["tt.divisibility", 8]]}
    assert kernel.source([torch.float16] * 3, False, 1, (64,)).attrs == {}
    with pytest.raises(TypeError, match="takes 3 pointers and 1 constants, got 2 and 1"):
        kernel.source([torch.float16] * 2, True, 16, (64,))


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (_constant_in_between, "must be pointers, then numbers, then constants"),
        (_strides_apart, "tl.int64 parameters must follow one another"),
        (_unknown_annotation, "parameter count is annotated"),
    ],
)
def test_a_kernel_with_other_parameters_is_refused(function: Any, sentence: str) -> None:
    with pytest.raises(TypeError, match=sentence):
        Kernel(function)


def rows_visited(*tensors: torch.Tensor) -> list[list[int]]:
    """Storage offset of every row of each tensor, in the order that kernels visit them."""
    visited: list[list[int]] = [[] for _ in tensors]

    def note(rows: launch.Rows, *parts: torch.Tensor) -> None:
        for seen, part, (outer, inner) in zip(visited, parts, rows.strides):
            seen += [part.storage_offset() + row // rows.inner * outer + row % rows.inner * inner for row in range(rows.total)]

    launch.over_rows(note, *tensors)
    return visited


def rows_of_torch(tensor: torch.Tensor) -> list[int]:
    numbers = torch.arange(tensor.untyped_storage().nbytes() // tensor.element_size())
    return numbers.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())[..., 0].flatten().tolist()


@pytest.mark.parametrize("cut", [(), (slice(None, None, 2),), (slice(1, 4), slice(None, None, 3)), (slice(None), slice(None), slice(1, 3))])
def test_rows_of_any_strides_are_visited_once_and_in_order(cut: tuple) -> None:
    x = torch.zeros(5, 6, 4, 3, 8)[cut]
    out = torch.zeros(x.shape)
    assert rows_visited(x, out) == [rows_of_torch(x), rows_of_torch(out)]


def test_rows_of_dense_tensors_are_one_launch() -> None:
    assert launch.rows_of(torch.zeros(5, 6, 4, 8), torch.zeros(5, 6, 4, 16)) == launch.Rows(120, 1, ((8, 0), (16, 0)))
    assert rows_visited(torch.zeros(7), torch.zeros(7)) == [[0], [0]]
    assert rows_visited(torch.zeros(0, 7), torch.zeros(0, 7)) == [[], []]


def test_measured_options_replace_the_rule(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "tuned.json"
    file.write_text(json.dumps({"gfx942": {"norm": {"1024": {"num_warps": 2}, "8192": {"num_warps": 8}}}}))
    monkeypatch.setattr(tables, "TUNED_FILE", file)
    for cached in (tables._tuned, tables.tuned, tables.row_options):
        cached.cache_clear()
    try:
        warps = [tables.row_options("norm", Facts(arch, 100, 64), size).num_warps for arch, size in (("gfx942", 64), ("gfx950", 2048))]
        assert warps == [2, 8]
        assert tables.row_options("norm", Facts("gfx942", 100, 64), 32768).num_warps == 8
        assert tables.row_options("norm", Facts("sm90", 100, 32), 4096).num_warps == 8  # 16 elements per lane
        assert tables.row_options("gate", Facts("gfx942", 100, 64), 32768).num_warps == 16  # no more than 1024 lanes
    finally:
        for cached in (tables._tuned, tables.tuned, tables.row_options):
            cached.cache_clear()


def test_a_cpu_tensor_does_not_reach_triton_outside_the_interpreter() -> None:
    assert "triton" not in dispatch.families_of("rms_norm", "cpu")
    assert dispatch.why_not("rms_norm", "triton", ("cpu", torch.float32)) == "not implemented for cpu"


def test_without_triton_the_family_says_why_it_declines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(family, "missing", lambda: "triton cannot be imported: No module named 'triton'")
    assert dispatch.explain("rms_norm", ("cuda", torch.bfloat16)).family == "reference"
    assert "No module named 'triton'" in dispatch.explain("rms_norm", ("cuda", torch.bfloat16)).declined[1]


def test_triton_is_imported_only_when_it_is_asked_for() -> None:
    program = "import sys, torch, gristmill_kernels as gk; gk.rms_norm(torch.ones(1, 8), torch.ones(8)); sys.exit('triton' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], env=environment(), capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
