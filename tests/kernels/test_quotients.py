"""The quantising GPU kernels divide by multiplying: right for the quotients that are hardest to round (quotients.cpp)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STEP = 64  # with 1 all of them are tried, which takes some seconds


def _flags() -> list[str]:
    cpuinfo = Path("/proc/cpuinfo")
    return ["-mfma"] if cpuinfo.is_file() and " fma " in cpuinfo.read_text() else []


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
def test_products_stand_for_quotients(seed: int, tmp_path: Path) -> None:
    program = tmp_path / "quotients"
    source = Path(__file__).parent / "quotients.cpp"
    subprocess.run(["g++", "-std=c++20", "-O2", "-ffp-contract=off", *_flags(), f"-I{ROOT / 'csrc'}", source, "-o", program], check=True)
    done = subprocess.run([program, str(STEP), str(seed % STEP)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
