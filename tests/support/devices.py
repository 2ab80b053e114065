"""What the machine under test has: tests of the worker run on its GPU if there is one, on the CPU otherwise."""

from __future__ import annotations

from gristmill.options import Options

DEVICE = Options().device
KERNELS = "cpu" if DEVICE == "cpu" else "cuda"  # the attention backend over gristmill_kernels
BACKENDS = (KERNELS, "torch_native") if DEVICE == "cpu" else (KERNELS, "triton", "torch_native")
