"""The engine's steps on one GPU against the roofline: decode steps by batch size, prefill tokens per second, idle time between steps.

    python benchmarks/gpu_engine.py [--model benchmarks/models/llama-3.1-8b] [--batches 1,16,64,256] [--json results.json]

Drives the model worker's ModelRunner directly with hand-made Steps, one launched ahead of the results as the overlap loop does it. Weights
are random and the KV pool holds noise: neither changes the time of a step. The roofline of a decode step is the time to read all weights
and the KV of all rows once, at the bandwidth that a plain read of 4 GiB reaches in the same run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gristmill
from benchmarks.gpu.timeline import svg
from gristmill.messages import NewReq, SamplingParams, Step, Write, ints
from gristmill.options import Options
from gristmill.worker.runner import ModelRunner

GREEDY = SamplingParams(temperature=0.0)
WARM, STEPS = 8, 64


class Driver:
    """Makes the Steps of `rows` requests and keeps one in flight. Request r has slot r and the KV slots that a permutation gives it."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.number = 0
        self.traces: dict[str, list[tuple[float, float, str]]] = {}
        self.slots = np.random.default_rng(0).permutation(runner.pool.slots).astype(np.int32)

    def step(self, q_lens: Sequence[int], kv_lens: Sequence[int], new: Sequence[NewReq] = (), slots: np.ndarray | None = None) -> Any:
        """Launch one step; `slots` are the KV slots of its tokens, row after row."""
        rows = len(q_lens)
        writes = [Write(0, row, kv - q, q) for row, (q, kv) in enumerate(zip(q_lens, kv_lens, strict=True))]
        step = Step(
            self.number, ints(range(rows)), ints(q_lens), ints(kv_lens), ints([1] * rows), new=list(new), writes=writes, write_slots=slots
        )
        self.number += 1
        return self.runner.sample(self.runner.forward(step))

    def admit(self, rows: int, context: int, room: int) -> np.ndarray:
        """Requests of `context` known tokens whose KV is whatever the pool holds; returns the slots that are left to each, [rows, room]."""
        each = self.slots[: rows * (context + room)].reshape(rows, context + room)
        for row in range(rows):
            ids = np.random.default_rng(row).integers(1000, self.runner.config.vocab_size - 1000, context).astype(np.int32)
            new = NewReq(row, context, ids, GREEDY)
            step = Step(self.number, ints(), ints(), ints(), ints(), [new], [Write(0, row, 0, context)], each[row, :context])
            self.number += 1
            self.runner.sample(self.runner.forward(step)).wait()
        return each[:, context:]

    def decode(self, rows: int, context: int, steps: int, depth: int) -> list[float]:
        """Milliseconds between the results of successive decode steps, `depth` of them in flight."""
        left = self.admit(rows, context, steps)
        flying, stamps = [], []
        for at in range(steps):
            kv = context + at
            flying.append(self.step([1] * rows, [kv] * rows, slots=self._decode_slots(left, at)))
            if len(flying) > depth - 1:
                flying.pop(0).wait()
                stamps.append(time.perf_counter())
        for launched in flying:
            launched.wait()
        return [1e3 * (b - a) for a, b in itertools.pairwise(stamps)]

    @staticmethod
    def _decode_slots(left: np.ndarray, at: int) -> np.ndarray:
        return np.ascontiguousarray(left[:, at])

    def prefill(self, rows: int, length: int, chunk: int) -> float:
        """Seconds to compute `rows` prompts of `length` tokens in steps of at most `chunk` tokens, one step in flight ahead."""
        slots = self.slots[: rows * length].reshape(rows, length)
        rng = np.random.default_rng(1)
        new = [NewReq(row, length, rng.integers(1000, 50000, length).astype(np.int32), GREEDY) for row in range(rows)]
        torch.cuda.synchronize()
        start, results = time.perf_counter(), []
        per_step = max(1, chunk // length)
        for first in range(0, rows, per_step):
            part = range(first, min(first + per_step, rows))
            results.append(self._prefill_step(part, length, [new[row] for row in part], slots[first : first + len(part)]))
        for launched in results:
            launched.wait()
        return time.perf_counter() - start

    def _prefill_step(self, part: range, length: int, new: list[NewReq], slots: np.ndarray) -> Any:
        n = len(part)
        writes = [Write(0, row, 0, length) for row in part]
        step = Step(
            self.number, ints(part), ints([length] * n), ints([length] * n), ints([1] * n), new=new, writes=writes,
            write_slots=np.ascontiguousarray(slots).reshape(-1),
        )  # fmt: skip
        self.number += 1
        return self.runner.sample(self.runner.forward(step))


def read_bandwidth() -> float:
    """Bytes per second of a plain read of 4 GiB, the best of several."""
    data = torch.ones(1 << 30, dtype=torch.float32, device="cuda")
    best = 0.0
    for _ in range(6):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        data.view(-1, 1 << 15).amax(dim=1)
        end.record()
        end.synchronize()
        best = max(best, data.nbytes / start.elapsed_time(end) * 1e3)
    return best


def roofline_ms(runner: ModelRunner, rows: int, context: int, bandwidth: float) -> float:
    """Every weight but the embedding table is read once, and the KV of all rows."""
    config = runner.config
    weights = sum(np.prod(target.shape) for name, target in runner.model.targets().items() if name != "model.embed_tokens.weight")
    if config.tie_word_embeddings:
        weights += config.vocab_size * config.hidden_size
    kv = rows * context * runner.caps["kv_bytes_per_token"]
    return 1e3 * (float(weights) * runner.dtype.itemsize + kv) / bandwidth


def trace_of(run: Callable[[], Any]) -> list[tuple[float, float, str]]:
    """(start, end, name) in microseconds of everything that the GPU did."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize()
    kinds = torch.autograd.DeviceType.CUDA
    return sorted((e.time_range.start, e.time_range.end, e.name) for e in profile.events() if e.device_type == kinds)


def idle_share(work: list[tuple[float, float, str]]) -> float:
    """Share of the time from the first to the last event in which the GPU did nothing."""
    end, busy = work[0][0], 0.0
    for start, stop, _ in work:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return 1 - busy / (end - work[0][0])


def kernels_of(work: list[tuple[float, float, str]], steps: int) -> list[dict[str, Any]]:
    time_by, count = Counter[str](), Counter[str]()
    for start, stop, name in work:
        time_by[name[:80]] += stop - start
        count[name[:80]] += 1
    return [{"name": name, "us_per_step": round(us / steps, 1), "calls": count[name] // steps} for name, us in time_by.most_common(16)]


def measure_decode(driver: Driver, rows: int, context: int, bandwidth: float) -> dict[str, Any]:
    driver.decode(rows, context, WARM, 2)
    row: dict[str, Any] = {"batch": rows, "context": context}
    ideal = roofline_ms(driver.runner, rows, context + STEPS // 2, bandwidth)
    for name, depth in (("overlap", 2), ("normal", 1)):
        times = driver.decode(rows, context, STEPS, depth)[4:]
        row[name] = {
            "p50_ms": statistics.median(times),
            "p90_ms": float(np.percentile(times, 90)),
            "roofline": ideal / statistics.median(times),
        }
    row["roofline_ms"] = ideal
    for name, depth in (("overlap", 2), ("normal", 1)):
        work = trace_of(lambda depth=depth: driver.decode(rows, context, 16, depth))
        row[name]["gpu_idle"] = idle_share(_steady(work))
        driver.traces[name] = _steady(work)
    row["kernels"] = kernels_of(work, 16)
    return row


def _steady(work: list[tuple[float, float, str]]) -> list[tuple[float, float, str]]:
    """The last half of the work: the steps before it may have been slowed by admissions and the profiler's start."""
    middle = work[0][0] + (work[-1][1] - work[0][0]) / 2
    return [event for event in work if event[0] >= middle]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(Path(__file__).parent / "models" / "llama-3.1-8b"))
    parser.add_argument("--batches", default="1,16,64,256")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--graphs", default="lazy", choices=("lazy", "start", "off"))
    parser.add_argument("--json", default="")
    parser.add_argument("--timeline", default="", help="write a picture of the last batch size's decode steps to this SVG file")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs an NVIDIA GPU, and torch sees none")
    options = Options(
        model=arguments.model, device="cuda", dtype="bfloat16", load_format="dummy", attention_backend=arguments.backend,
        context_length=4096, graphs=arguments.graphs,
    )  # fmt: skip
    with torch.inference_mode():
        bandwidth = read_bandwidth()
        torch.cuda.empty_cache()
        started = time.monotonic()
        runner = ModelRunner(arguments.model, options)
        ready = time.monotonic() - started
        driver = Driver(runner)
        for layer in range(runner.config.num_layers):
            for cache in runner.pool.layer(layer):
                cache[: 1 << 19].normal_()
        report: dict[str, Any] = {
            "version": gristmill.__version__, "torch": torch.__version__, "device": torch.cuda.get_device_name(), "caps": runner.caps,
            "pool_tokens": runner.pool.slots, "ready_s": ready, "read_tb_s": bandwidth / 1e12, "decode": [],
        }  # fmt: skip
        print(
            f"{runner.caps}\nready in {ready:.1f} s, pool of {runner.pool.slots} tokens, plain read {bandwidth / 1e12:.2f} TB/s", flush=True
        )
        for rows in map(int, arguments.batches.split(",")):
            found = measure_decode(driver, rows, arguments.context, bandwidth)
            report["decode"].append(found)
            print_decode(found)
        seconds = [driver.prefill(8, 2048, options.chunk_tokens) for _ in range(6)][1:]
        report["prefill_8x2048_tokens_s"] = 8 * 2048 / statistics.median(seconds)
        work = trace_of(lambda: driver.prefill(8, 2048, options.chunk_tokens))
        report["prefill_kernels"] = kernels_of(work, 1)
        print(f"prefill 8 x 2048: {report['prefill_8x2048_tokens_s']:.0f} tokens/s")
        for kernel in report["prefill_kernels"][:10]:
            print(f"    {kernel['us_per_step']:9.1f} us  {kernel['calls']:4d}x  {kernel['name']}")
    if arguments.timeline:
        titles = {"normal": "decode without overlap", "overlap": "decode with overlap"}
        picture = svg([(f"{title}, batch {rows}", first_ms(driver.traces[name], 40)) for name, title in titles.items()])
        Path(arguments.timeline).write_text(picture)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n")


def first_ms(work: list[tuple[float, float, str]], most: float) -> list[tuple[float, float, str]]:
    return [event for event in work if event[1] - work[0][0] <= most * 1e3]


def print_decode(row: dict[str, Any]) -> None:
    for name in ("overlap", "normal"):
        part = row[name]
        print(
            f"decode {name:8s} B={row['batch']:<4d} {part['p50_ms']:7.3f} ms (p90 {part['p90_ms']:.3f}), "
            f"roofline {row['roofline_ms']:.3f} ms: {part['roofline']:.2f}, GPU idle {part['gpu_idle']:.1%}"
        )
    for kernel in row["kernels"][:12]:
        print(f"    {kernel['us_per_step']:9.1f} us  {kernel['calls']:4d}x  {kernel['name']}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
