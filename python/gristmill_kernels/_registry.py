"""The implementation families of this build, registered on import. A new family joins by a `register()` of its own, called here."""

from __future__ import annotations

import torch

from gristmill_kernels import native, reference, triton
from gristmill_kernels.dispatch import select as select
from gristmill_kernels.reference import gemm as reference_gemm

native.register()
triton.register()
reference.register()


def packed_weight_numel(family: str, n: int, k: int, dtype: torch.dtype) -> int:
    """Elements of a packed weight [n, k] in the layout of one family."""
    return native.packed_weight_numel(n, k, dtype) if family == "native" else reference_gemm.packed_weight_numel(n, k)
