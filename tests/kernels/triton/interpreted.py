"""Run by test_interpreter.py in a process with TRITON_INTERPRET=1: widths beyond the conformance suite's, and offsets beyond int32."""

from __future__ import annotations

import pytest
import torch

import gristmill_kernels as gk
from gristmill_kernels import dispatch


@pytest.fixture(autouse=True)
def only_triton():
    with dispatch.using("triton"):
        yield


@pytest.mark.parametrize("width", [1, 2, 3, 127, 1025, 20480])
def test_rows_of_any_width(width: int, seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(3, width, generator=source), torch.randn(width, generator=source)
    expected = torch.nn.functional.rms_norm(x.double(), (width,), weight.double(), 1e-6)
    torch.testing.assert_close(gk.rms_norm(x, weight).double(), expected, rtol=1e-6, atol=1e-9)
