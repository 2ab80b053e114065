"""The SIMT emulation finds what it is for: each faulty kernel of kernels.cu fails, in some thread order, and the right ones never do."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.kernels.simt import build, suite

pytestmark = pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))

THREADS = 128
ORDERS = (0, 1, 2, 3, 4)


class Emulated:
    """The kernels of kernels.cu at one warp width."""

    def __init__(self, library: Path, warp: int, seed: int = 0) -> None:
        self.warp = warp
        self.library = ctypes.CDLL(str(library))
        self.inputs = np.random.default_rng(seed).standard_normal(4 * 4 * THREADS).astype(np.float32)

    def call(self, name: str, *args: object) -> None:
        """Raises RuntimeError with the emulation's words."""
        function = getattr(self.library, name)
        function.restype = ctypes.c_char_p
        error = function(*(ctypes.c_void_p(arg.ctypes.data) if isinstance(arg, np.ndarray) else arg for arg in args))
        if error is not None:
            raise RuntimeError(error.decode())

    def run(self, kernel: str, order: int, extra: int = 0) -> np.ndarray:
        suite.set_order(order)
        out = np.zeros(4 * THREADS, np.float32)
        self.call(f"test_{kernel}", out, self.inputs, extra)
        return out

    @property
    def row(self) -> np.ndarray:
        return self.inputs[:THREADS]

    def warps(self, values: np.ndarray) -> np.ndarray:
        return values.reshape(-1, self.warp)


@pytest.fixture(scope="module", params=(32, 64))
def emulated(request: pytest.FixtureRequest) -> Emulated:
    return Emulated(build.build_selftest(request.param), request.param)


def expected_collectives(emulated: Emulated) -> np.ndarray:
    rows = emulated.warps(emulated.row)
    lanes = np.arange(emulated.warp)
    up = np.where(lanes >= 3, np.roll(rows, 3, axis=1), rows)
    down = np.where(lanes < emulated.warp - 2, np.roll(rows, -2, axis=1), rows)
    ballot = np.broadcast_to(lanes % 3 == 0, rows.shape)
    return np.concatenate([part.ravel() for part in (np.roll(rows, -5, axis=1), up, down, ballot)]).astype(np.float32)


def expected_copies(emulated: Emulated) -> np.ndarray:
    return np.roll(emulated.inputs.reshape(4, THREADS, 4), -emulated.warp, axis=1).transpose(1, 0, 2).reshape(THREADS, 16)


RIGHT: dict[str, Callable[[Emulated], np.ndarray]] = {
    "reverse": lambda e: e.row[::-1],
    "rotate_twice": lambda e: np.roll(e.row, -2 * e.warp),
    "neighbour": lambda e: np.roll(e.warps(e.row), -1, axis=1).ravel(),
    "collectives": expected_collectives,
    "largest_of_a_warp": lambda e: np.repeat(np.arange(THREADS // e.warp) + e.warp - 1, e.warp),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kernel", RIGHT)
def test_a_right_kernel_is_right_in_every_order(emulated: Emulated, kernel: str, order: int) -> None:
    expected = RIGHT[kernel](emulated)
    np.testing.assert_array_equal(emulated.run(kernel, order)[: len(expected)], expected)


@pytest.mark.parametrize("order", ORDERS)
def test_asynchronous_copies_arrive(emulated: Emulated, order: int) -> None:
    np.testing.assert_allclose(emulated.run("copies", order)[:THREADS], expected_copies(emulated).sum(axis=1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("order", ORDERS)
def test_a_whole_reduction_is_right(emulated: Emulated, order: int) -> None:
    sums = emulated.warps(emulated.run("warp_sum", order, emulated.warp)[:THREADS])
    expected = emulated.warps(emulated.row).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(sums, np.broadcast_to(expected, sums.shape), rtol=1e-4, atol=1e-5)


# What fails by giving wrong numbers, and how many of the orders must show it at least.
WRONG_RESULTS = {
    "barrier_missing": 5,
    "neighbour_unsynchronised": 5,
    "rotate_twice_unguarded": 2,
    "copies_without_wait": 2,
    "copies_without_commit": 2,
    "copies_without_barrier": 5,
    "copies_waited_for_too_little": 2,
    "copies_over_what_is_read": 2,
}
RIGHT_OF = {
    "barrier_missing": RIGHT["reverse"],
    "neighbour_unsynchronised": RIGHT["neighbour"],
    "rotate_twice_unguarded": RIGHT["rotate_twice"],
}


@pytest.mark.parametrize("kernel", WRONG_RESULTS)
def test_a_missing_synchronisation_gives_wrong_numbers(emulated: Emulated, kernel: str) -> None:
    expected = RIGHT_OF.get(kernel, lambda e: expected_copies(e).sum(axis=1))(emulated)
    wrong = [order for order in ORDERS if not np.allclose(emulated.run(kernel, order)[:THREADS], expected, rtol=1e-4, atol=1e-5)]
    assert len(wrong) >= WRONG_RESULTS[kernel], f"wrong in orders {wrong} only"


@pytest.mark.parametrize("order", ORDERS)
def test_half_a_reduction_and_one_of_the_other_width_are_wrong(emulated: Emulated, order: int) -> None:
    expected = np.repeat(emulated.warps(emulated.row).sum(axis=1), emulated.warp)
    for width in (emulated.warp // 2, 96 - emulated.warp):
        assert not np.isclose(emulated.run("warp_sum", order, width)[:THREADS], expected, rtol=1e-4).any()


REFUSED = {
    "barrier_of_half_the_warp": "the lanes of a warp part",
    "barrier_of_half_the_warps": "the threads of a block part",
    "barrier_in_two_places": "the threads of a block part",
    "barrier_after_some_left": "has finished",
    "lane_missing": "the lanes of a warp part",
    "lane_finished": "the lanes of a warp part",
    "different_collectives": "the lanes of a warp part.*a shuffle.*ballot|the lanes of a warp part.*ballot.*a shuffle",
    "wild": "thread 7: accessed memory that is not there",
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kernel", REFUSED)
def test_threads_that_do_not_meet_are_an_error(emulated: Emulated, kernel: str, order: int) -> None:
    with pytest.raises(RuntimeError, match=REFUSED[kernel]):
        emulated.run(kernel, order)
    np.testing.assert_array_equal(emulated.run("reverse", order)[:THREADS], emulated.row[::-1])


@pytest.mark.parametrize("order", ORDERS)
def test_a_lane_out_of_range_gives_poison(emulated: Emulated, order: int) -> None:
    poison = np.frombuffer(bytes([(0xFF, 0x7F, 0xFE)[order % 3]] * 4), np.float32)
    got = emulated.run("lane_out_of_range", order)[:THREADS]
    np.testing.assert_array_equal(got, np.broadcast_to(poison, got.shape))


def test_a_misaligned_pack_is_an_error(emulated: Emulated) -> None:
    np.testing.assert_array_equal(emulated.run("pack", 0, 4)[: THREADS - 4], emulated.inputs[4:THREADS])
    with pytest.raises(RuntimeError, match="a pack is loaded at an address that is no multiple of 16 bytes"):
        emulated.run("pack", 0, 1)


@pytest.mark.parametrize("kernel", ["overrun", "overrun_dynamic"])
@pytest.mark.parametrize("past", [1, -1])
def test_an_overrun_of_shared_memory_is_an_error(emulated: Emulated, kernel: str, past: int) -> None:
    emulated.run(kernel, 0, 0)
    with pytest.raises(RuntimeError, match="shared memory was written outside an array"):
        emulated.run(kernel, 0, past)


def test_every_thread_of_every_block_runs_once(emulated: Emulated) -> None:
    for order in ORDERS:
        suite.set_order(order)
        counter = np.zeros(1, np.int32)
        emulated.call("count_threads", counter, 3, 5, 7, 96)
        assert counter[0] == 3 * 5 * 7 * 96


def test_blocks_run_in_the_order_that_is_asked_for(emulated: Emulated) -> None:
    def blocks(order: int) -> list[int]:
        suite.set_order(order)
        ran = np.zeros(20, np.int32)
        emulated.call("block_order", ran, 20)
        return ran.tolist()

    assert blocks(0) == list(range(20))
    assert blocks(1) == list(range(20))[::-1]
    assert sorted(blocks(2)) == list(range(20)) and blocks(2) == blocks(2) != blocks(3)


def test_a_launch_beyond_a_gpus_limits_is_an_error(emulated: Emulated) -> None:
    counter = np.zeros(1, np.int32)
    with pytest.raises(RuntimeError, match="1025 threads per block"):
        emulated.call("count_threads", counter, 1, 1, 1, 1025)
    with pytest.raises(RuntimeError, match="more blocks"):
        emulated.call("count_threads", counter, 1, 65536, 1, 1)


def _bits(values: np.ndarray, half: bool) -> np.ndarray:
    """Small whole numbers, which both formats hold exactly."""
    return values.astype(np.float16).view(np.uint16) if half else (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_tensor_core_products_are_matrix_products(half: bool, transposed: bool, seed: int) -> None:
    emulated = Emulated(build.build_selftest(32), 32)
    source = np.random.default_rng(seed)
    a, b = source.integers(-64, 64, (16, 16)), source.integers(-64, 64, (16, 8))
    for order in ORDERS:
        suite.set_order(order)
        d = np.zeros((16, 8), np.float32)
        emulated.call("multiply", d, _bits(a, half), np.ascontiguousarray(_bits(b, half)), int(half), int(transposed))
        np.testing.assert_array_equal(d, a @ b + 1)


def test_two_floats_are_packed_low_first() -> None:
    library = ctypes.CDLL(str(build.build_selftest(32)))
    library.pack_two_floats.restype = ctypes.c_uint32
    assert library.pack_two_floats(ctypes.c_float(1.0), ctypes.c_float(-2.0), 1) == 0xC0003C00
    assert library.pack_two_floats(ctypes.c_float(1.0), ctypes.c_float(-2.0), 0) == 0xC0003F80


UNDER_SANITIZERS = """
import sys
from pathlib import Path
from tests.kernels.simt.test_emulator import Emulated
emulated = Emulated(Path(sys.argv[1]), 32)
emulated.run("reverse", 0)
emulated.run(sys.argv[2], 3, int(sys.argv[3]))
"""


@pytest.mark.parametrize(("kernel", "extra", "report"), [
    ("copies", 0, None),
    ("collectives", 0, None),
    ("overrun", 1, "AddressSanitizer: use-after-poison"),
    ("overrun_dynamic", -1, "AddressSanitizer: use-after-poison"),
    ("wild", 0, "AddressSanitizer: SEGV"),
])  # fmt: skip
def test_address_sanitizer_sees_into_the_emulation(kernel: str, extra: int, report: str | None) -> None:
    command = [sys.executable, "-c", UNDER_SANITIZERS, str(build.build_selftest(32, asan=True)), kernel, str(extra)]
    environment = build.sanitizer_environment()
    done = subprocess.run(command, cwd=build.ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    if report is None:
        assert done.returncode == 0, done.stderr
    else:
        assert done.returncode != 0 and report in done.stderr
