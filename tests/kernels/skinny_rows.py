"""A row of skinny_linear is the same bits with any number of rows beside it, wherever its operands lie.

    python -m tests.kernels.skinny_rows --device cuda [--family native]

tests/kernels/test_batch_invariance.py asks the CPU."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch

if __name__ == "__main__":
    ROOT = Path(__file__).resolve().parents[2]
    sys.path[:0] = [path for path in (str(ROOT), str(ROOT / "python")) if path not in sys.path]

from gristmill_kernels import dispatch, skinny_linear
from tests.kernels.conformance.harness import DTYPES


def shifted(x: torch.Tensor) -> torch.Tensor:
    """The same values at an odd address and an odd row stride."""
    buffer = torch.empty(x.shape[0], x.shape[1] + 3, dtype=x.dtype, device=x.device)
    return buffer[:, 1:-2].copy_(x)


def check(seed: int, device: str = "cpu") -> int:
    """Raises AssertionError naming the first row that differs; returns how many calls were compared."""
    source = torch.Generator().manual_seed(seed)
    calls = 0
    for dtype in DTYPES:
        for n, k in ((40, 64), (17, 520), (33, 4096), (9, 101), (3, 14336)):
            weight, x = (torch.randn(rows, k, generator=source).to(device, dtype) for rows in (n, 16))
            bias = torch.randn(n, generator=source).to(device, dtype)
            whole = skinny_linear(x, weight, bias)
            for m in range(1, 16):
                for first in (0, 16 - m):
                    part = skinny_linear(x[first : first + m], weight, bias)
                    assert torch.equal(part, whole[first : first + m]), f"{dtype} n={n} k={k}: rows {first} to {first + m} differ"
                    calls += 1
            assert torch.equal(skinny_linear(shifted(x), weight, bias), whole), f"{dtype} n={n} k={k}: a shifted x differs"
            assert torch.equal(skinny_linear(x[:5], shifted(weight), bias), whole[:5]), f"{dtype} n={n} k={k}: a shifted weight differs"
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--family", default="native", choices=dispatch.FAMILIES)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(3), "big"))
    options = parser.parse_args()
    with dispatch.using(options.family):
        calls = check(options.seed, options.device)
    print(f"skinny_linear, {options.family} on {options.device}, seed {options.seed}: rows stand alone in {calls} calls")


if __name__ == "__main__":
    main()
