"""What PyTorch itself asks of an op: opcheck in every namespace, tracing by torch.compile, and no aten work inside native kernels."""

from __future__ import annotations

import pytest
import torch

import gristmill_kernels
from gristmill_kernels import dispatch
from gristmill_kernels.checks import FLOAT8_DTYPES
from gristmill_kernels.schema import OPS
from tests.kernels.conformance.harness import Case, Inputs, pairs
from tests.kernels.conformance.test_conformance import CASES

OPCHECK = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def first_case(op: str) -> Case:
    """A case with rows in it."""
    return next(case for case in CASES if case.op == op and all(word not in case.id for word in ("none", "empty")))


def without_nan(x: torch.Tensor) -> torch.Tensor:
    """A copy; few ops take 8-bit floats."""
    return torch.zeros_like(x) if x.element_size() == 1 else x.clone().nan_to_num()


def namespaces(op: str) -> list[str]:
    return [family for family, _ in pairs([first_case(op)])]


NAMESPACES = [pytest.param(op, family, id=f"{family}-{op}") for op in OPS for family in namespaces(op)]


@pytest.mark.parametrize(("op", "family"), [*NAMESPACES, *(pytest.param(op, "", id=f"routed-{op}") for op in OPS)])
def test_opcheck_passes(op: str, family: str, seed: int) -> None:
    chosen = family or dispatch.chosen_family(op, first_case(op).key)
    args = first_case(op).build(Inputs(seed, chosen)).args
    overload = dispatch.overload(op, family) if family else getattr(torch.ops.gristmill, op).default
    # Fresh dense tensors: opcheck copies its arguments, and views of poisoned buffers would be compared as such.
    plain = tuple(without_nan(arg) if isinstance(arg, torch.Tensor) else arg for arg in args)
    utilities = list(OPCHECK)
    if any(isinstance(arg, torch.Tensor) and arg.dtype in FLOAT8_DTYPES for arg in plain):
        utilities.remove("test_schema")  # compares arguments by arithmetic that torch does not have for 8-bit floats
    torch.library.opcheck(overload, plain, test_utils=utilities)


def aten_calls(op: str, family: str, seed: int) -> list[str]:
    """aten ops run beneath one call. The profiler sees them even below a C++ kernel, where a TorchDispatchMode is blind."""
    call = first_case(op).build(Inputs(seed, family))
    overload = dispatch.overload(op, family)
    overload(*call.args)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        overload(*call.args)
    return [event.name for event in profile.events() if event.name.startswith("aten::")]


@pytest.mark.parametrize(("op", "family"), [param for param in NAMESPACES if param.values[1] != "reference"])
def test_an_implementation_other_than_the_reference_computes_nothing_in_aten(op: str, family: str, seed: int) -> None:
    assert aten_calls(op, family, seed) == []


def test_the_aten_watch_sees_the_reference(seed: int) -> None:
    assert aten_calls("rms_norm", "reference", seed)


@pytest.mark.parametrize("family", namespaces("rms_norm"))
def test_compile_traces_public_functions_in_one_graph(family: str) -> None:
    def block(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return gristmill_kernels.silu_and_mul(gristmill_kernels.rms_norm(x, weight)) * 2

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=True)
    with dispatch.using(family):
        for rows in (3, 5):
            x, weight = torch.randn(rows, 16), torch.randn(16)
            torch.testing.assert_close(compiled(x, weight), block(x, weight))


def test_compile_traces_attention() -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, indptr: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        return gristmill_kernels.decode_attention(q, k, v, indptr, indices) + 1

    q, k, v = torch.randn(2, 4, 8), torch.randn(9, 2, 8), torch.randn(9, 2, 8)
    args = (q, k, v, torch.tensor([0, 3, 7], dtype=torch.int32), torch.arange(7, dtype=torch.int32))
    torch.testing.assert_close(torch.compile(attend, fullgraph=True, backend="aot_eager")(*args), attend(*args))
