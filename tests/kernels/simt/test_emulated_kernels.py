"""Every GPU kernel passes the conformance suite on the emulation: both warp widths, three thread orders, under sanitizers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gristmill_kernels import native_cuda
from tests.kernels.simt import build

pytestmark = [
    pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not())),
    pytest.mark.timeout(900),  # the first test of a width compiles every kernel
]


def run_suite(seed: int, tmp_path: Path, warp: int, *arguments: str) -> dict[str, int]:
    """How many cases of each op passed; all that ran must have."""
    passed = tmp_path / "passed.json"
    command = [sys.executable, "-m", "tests.kernels.simt", f"--warp={warp}", f"--seed={seed}", f"--json={passed}", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=build.ROOT, env=environment, capture_output=True, text=True, timeout=850, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-8000:]}\n{done.stderr[-4000:]}"
    return json.loads(passed.read_text())


@pytest.mark.parametrize(("warp", "order"), [(32, 0), (64, 1)])
def test_all_cases_pass(warp: int, order: int, seed: int, tmp_path: Path) -> None:
    passed = run_suite(seed, tmp_path, warp, f"--order={order}")
    if warp == 32:
        assert set(native_cuda.PREDICATES) == set(passed), "an op that the GPU kernels offer has no case that they take"


@pytest.mark.parametrize(("warp", "orders"), [(32, (1, None)), (64, (0, None))])
def test_drawn_cases_pass_in_other_orders(warp: int, orders: tuple[int | None, ...], seed: int, tmp_path: Path) -> None:
    """None stands for an order drawn by the seed."""
    numbers = [2 + seed % 1_000_000 if order is None else order for order in orders]
    run_suite(seed, tmp_path, warp, "--drawn=4", *(f"--order={number}" for number in numbers))


def test_drawn_cases_pass_under_sanitizers(seed: int, tmp_path: Path) -> None:
    run_suite(seed, tmp_path, 32, "--asan", "--drawn=2", f"--order={seed % 1000}")


def run_check(module: str, warp: int, seed: int, *ops: str) -> None:
    library = build.build(warp, ops=ops)
    try:
        command = [sys.executable, "-m", f"tests.kernels.simt.{module}", str(library), str(seed)]
        done = subprocess.run(command, cwd=build.ROOT, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    finally:
        library.unlink(missing_ok=True)


@pytest.mark.parametrize("warp", [32, 64])
def test_rows_of_decode_attention_stand_alone(warp: int, seed: int) -> None:
    run_check("decode_rows", warp, seed, "decode_attention")


@pytest.mark.parametrize("warp", [32, 64])
def test_plain_rows_have_the_same_bits_as_others(warp: int, seed: int) -> None:
    run_check("plain_rows", warp, seed, "rms_norm", "silu_and_mul", "apply_rope", "store_kv")


@pytest.mark.parametrize("warp", [32, 64])
def test_index_ops_make_of_nonsense_what_the_model_says(warp: int, seed: int) -> None:
    run_check("hostile_indices", warp, seed, *native_cuda.INDICES)
