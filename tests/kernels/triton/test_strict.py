"""GRISTMILL_KERNELS_STRICT=1 on GPU keys: no op may silently leave Triton, or come to it because the native library is missing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gristmill_kernels import dispatch, loader_gpu
from gristmill_kernels import triton as family
from tests.kernels.conformance.harness import key_on
from tests.kernels.conformance.test_conformance import CASES

pytestmark = pytest.mark.skipif(family.missing() is not None, reason=str(family.missing()))

OPS = tuple(op for module in family.modules() for op in family.ops_of(module))
NO_LIBRARY = "no library for GPUs was built"


def a_key(op: str) -> tuple:
    """Of a call on a GPU that any Triton kernel of the op takes: one without 8-bit numbers, unless the op is about them."""
    keys = [key_on(case, "cuda") for case in CASES if case.op == op]
    return next((key for key in keys if not any(isinstance(f, torch.dtype) and f.itemsize == 1 for f in key)), keys[0])


@pytest.fixture(autouse=True)
def strict(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a machine with a GPU that Triton can use, but without the native library for it."""
    monkeypatch.setenv(dispatch.STRICT_VARIABLE, "1")
    monkeypatch.delenv(dispatch.IMPL_VARIABLE, raising=False)
    monkeypatch.setattr(family, "_unusable_on", lambda device: None)
    monkeypatch.setattr(loader_gpu, "gpu_library", lambda: loader_gpu.GpuLibrary(Path("absent.so"), reason=NO_LIBRARY))
    dispatch.reset()
    yield
    monkeypatch.undo()
    dispatch.reset()


@pytest.mark.parametrize("op", OPS)
def test_a_missing_native_library_is_not_passed_over(op: str) -> None:
    native = NO_LIBRARY if "native" in dispatch.families_of(op, "cuda") else "not implemented for cuda"
    with pytest.raises(dispatch.NoImplementationError, match=rf"^{op}: .*STRICT=1 refuses the fallback to triton .*native: {native}"):
        dispatch.select(op, a_key(op))


@pytest.mark.parametrize("op", OPS)
def test_triton_that_was_asked_for_is_taken(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(dispatch.IMPL_VARIABLE, "*:triton")
    dispatch.reset()
    assert dispatch.select(op, a_key(op)) is dispatch.overload(op, "triton")


@pytest.mark.parametrize("op", OPS)
def test_triton_that_was_asked_for_and_cannot_run_is_refused(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(dispatch.IMPL_VARIABLE, f"{op}:triton")
    monkeypatch.setattr(family, "_unusable_on", lambda device: "triton cannot be imported: no such module")
    dispatch.reset()
    with pytest.raises(dispatch.NoImplementationError, match=f"^{op}: .* asks for triton, which cannot run .*: triton cannot be imported"):
        dispatch.select(op, a_key(op))
