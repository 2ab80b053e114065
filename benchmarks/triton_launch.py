"""What starting a Triton kernel costs the host: our launcher beside Triton's own `kernel[grid]`, for kernels with few and many arguments.

    PYTHONPATH=python python3 benchmarks/triton_launch.py --out results.json

Every way starts the same compiled kernel on inputs so small that the device waits for the host; a sample is the mean of some hundred calls
without synchronisation in between, the ways take turns, and the median over the samples counts. Without a GPU only the launcher's own
bookkeeping (reading addresses, making the key, finding the handle) is timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [path for path in (str(ROOT), str(ROOT / "python")) if path not in sys.path]

import torch  # noqa: E402
import triton  # noqa: E402

import gristmill_kernels as gk  # noqa: E402
from gristmill_kernels import dispatch  # noqa: E402
from gristmill_kernels.schema import OPS  # noqa: E402
from gristmill_kernels.triton import indices, norm, rope  # noqa: E402
from gristmill_kernels.triton.launch import Kernel  # noqa: E402


class Work(NamedTuple):
    """One op on small inputs: the arguments of its schema, its kernel, and the public function."""

    op: str
    args: tuple
    kernel: Kernel
    function: Callable[..., Any]
    public: Callable[[], object]


def works(device: str) -> list[Work]:
    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    x, weight, out = tensor(4, 1024), tensor(1024), tensor(4, 1024)
    q, k, v, k_cache, v_cache = (tensor(4, heads, 128) for heads in (8, 2, 2, 2, 2))
    positions, slots, table = ints(0, 1, 2, 3), ints(3, 2, 1, 0), torch.randn(16, 128, device=device)
    lens, starts = ints(3, 1), ints(0, 0, 0)
    rope_args = (q, k, k_cache, v_cache, v, positions, table, slots, True)
    return [
        Work("qo_indptr", (starts, lens), indices._running_sum, indices.qo_indptr, lambda: gk.qo_indptr(lens, out=starts)),
        Work("rms_norm", (out, x, weight, 1e-6), norm._rms_norm, norm.rms_norm, lambda: gk.rms_norm(x, weight, out=out)),
        Work(
            "apply_rope_store_kv", rope_args, rope._rope, rope.apply_rope_store_kv,
            lambda: gk.apply_rope_store_kv(q, k, v, k_cache, v_cache, positions, slots, table),
        ),
    ]  # fmt: skip


def captured(work: Work) -> tuple[tuple, tuple, tuple, Any]:
    """What the op hands to its kernel: grid, arguments, constants, options."""
    seen: list[tuple] = []
    with mock.patch.object(Kernel, "__call__", lambda self, *call: seen.append(call)):
        work.function(*work.args)
    return seen[0]


def ways(work: Work, on_gpu: bool) -> dict[str, Callable[[], object]]:
    grid, args, constants, options = captured(work)
    kernel = work.kernel
    idle = Kernel(kernel.function)
    idle._prepare = lambda *facts: lambda *call: None  # type: ignore[method-assign]
    found: dict[str, Callable[[], object]] = {"bookkeeping only": lambda: idle(grid, args, constants, options)}
    if not on_gpu:
        return found
    launcher, settings = kernel.function, options.as_dict()
    op = dispatch.select(work.op, OPS[work.op].key_of(*work.args))
    found |= {
        "kernel[grid]": lambda: launcher[grid](*args, *constants, **settings),
        "our launcher": lambda: kernel(grid, args, constants, options),
        "our Python function": lambda: work.function(*work.args),
        "torch op, resolved": lambda: op(*work.args),
        "public function": work.public,
    }
    if work.op == "rms_norm":
        out, x, weight, _ = work.args
        found["torch.add, for scale"] = lambda: torch.add(x, weight, out=out)
    return found


def measure(calls: dict[str, Callable[[], object]], samples: int, count: int, wait: Callable[[], None]) -> dict[str, float]:
    """Median microseconds of the host for each way."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(20):
            call()
    for _ in range(samples):
        for name, call in calls.items():
            wait()
            begin = time.perf_counter()
            for _ in range(count):
                call()
            times[name].append((time.perf_counter() - begin) / count * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=25)
    parser.add_argument("--count", type=int, default=300, help="calls per sample")
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    wait = torch.cuda.synchronize if on_gpu else (lambda: None)
    report: dict[str, Any] = {"torch": torch.__version__, "triton": triton.__version__, "python": sys.version.split()[0]}
    report["device"] = torch.cuda.get_device_name() if on_gpu else "none"
    report["host_us"] = {}
    print(" ".join(f"{name}={value}" for name, value in report.items() if name != "host_us"))
    for work in works(device):
        found = report["host_us"][work.op] = measure(ways(work, on_gpu), options.samples, options.count, wait)
        arguments = work.kernel.num_pointers + len(work.kernel.numbers)
        for name, us in found.items():
            ratio = f"{found['kernel[grid]'] / us:6.2f}x" if "kernel[grid]" in found else ""
            print(f"{work.op:<22}{arguments:>3} arguments  {name:<22}{us:8.2f} us {ratio}")
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
