"""Sampling from broken distributions: a token of nonzero probability or -1, on the CPU and on the emulated GPU kernels, which agree."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gristmill_kernels import dispatch
from tests.kernels import broken_distributions as broken
from tests.kernels.simt import build

FAMILIES = [family for family in dispatch.families_of("sample") if dispatch.why_not("sample", family, ("cpu", torch.float32)) is None]


@pytest.mark.parametrize("vocab_size", broken.sizes(1))
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_drawn_can_be(family: str, vocab_size: int, seed: int) -> None:
    """10,000 draws and more of the small vocabularies by compiled code; plain PyTorch is slow."""
    scale = 1 if family == "reference" else 5
    with dispatch.using(family):
        broken.draw_all(vocab_size, broken.sizes(scale)[vocab_size], seed)


@pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))
@pytest.mark.timeout(600)
@pytest.mark.parametrize("warp", [32, 64])
def test_gpu_kernels_draw_the_same_tokens(warp: int, seed: int, tmp_path: Path) -> None:
    library, out = build.build(warp, ops=("sample",)), tmp_path / "tokens.pt"
    try:
        command = [sys.executable, "-m", "tests.kernels.broken_distributions", str(library), str(seed), str(out)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=build.ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    finally:
        library.unlink()
    for vocab_size, emulated in torch.load(out).items():
        expected = broken.draw_all(vocab_size, broken.sizes(1)[vocab_size], seed)
        for options, got, right in zip(broken.OPTIONS, emulated, expected):
            assert torch.equal(got, right), f"vocabulary {vocab_size}, {options}"
