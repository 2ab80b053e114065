"""What scheduling costs: CPU time of a step's plan and apply, of its messages, and the speed of all processes around a null worker.

    python benchmarks/scheduler.py [--sizes 1,64,256,1024] [--policies fcfs,lpm] [--steps 1000] [--out benchmarks/results]

steady    every running request decodes, nothing arrives or ends; the queue (0 or 1000 requests) waits for a free place
churn     outputs end all the time and the queue is kept at 1000: each step admits, orders the queue and releases
messages  encode and decode of the Step, Result and Out of a steady step
server    `gristmill serve null:0` with streaming HTTP clients in this process, and the CPU time that each process spent (in ticks of 10 ms)
engine    gristmill.Engine("null:0")
CPU time is this thread's own, so other work on the machine disturbs it little; the two end-to-end numbers are wall-clock.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from gristmill.engine import Engine
from gristmill.messages import Message, Out, Result, SamplingParams, Step, Submit, decode, encode
from gristmill.options import FIELDS, Options
from gristmill.scheduler.scheduler import Scheduler, SchedulerConfig
from gristmill.worker.null import NullRunner

PROMPT_TOKENS = 32
SHARED_TOKENS = 16  # of each prompt: one of 8 prefixes
CHURN_OUTPUT_TOKENS = 128
QUEUE = 1000
DEPTH = 2  # steps in flight, as in the overlap loop
BAR_256_US, BAR_MARGINAL_US = 150.0, 1.0


class Driver:
    """The scheduler and a null worker in one thread; only the scheduler is timed."""

    def __init__(self, n_running: int, policy: str, output_tokens: int) -> None:
        context = PROMPT_TOKENS + output_tokens + 1
        pool = n_running * context * 2
        self.scheduler = Scheduler(
            SchedulerConfig(
                pool_tokens=pool,
                max_reqs=n_running,
                max_context=context,
                eos_ids=(2,),
                max_queued=QUEUE + n_running,
                chunk_tokens=8192,
                policy=policy,
                new_token_ratio=0.0,
            )
        )
        self.worker = NullRunner("null:0:30000", Options(model="null:0", max_running=min(n_running, 4096), pool_tokens=pool))
        self.output_tokens = output_tokens
        self.pending: deque[tuple[Step, Result]] = deque()
        self.n_submitted = 0
        self.rng = np.random.default_rng(0)
        self.last: tuple[Step, Result, Out] | None = None

    def submit(self, n: int, vary: bool) -> None:
        """`n` more requests; with `vary` their outputs end at different times."""
        for _ in range(n):
            shared = np.full(SHARED_TOKENS, 10 + self.n_submitted % 8, np.int32)
            own = self.rng.integers(100, 30000, PROMPT_TOKENS - SHARED_TOKENS, dtype=np.int32)
            tokens = int(self.rng.integers(1, self.output_tokens)) if vary else self.output_tokens
            self.scheduler.handle(Submit(f"r{self.n_submitted}", np.concatenate((shared, own)), SamplingParams(max_tokens=tokens)))
            self.n_submitted += 1
        self.scheduler.take()

    def turn(self) -> float:
        """One turn of the event loop: plan, then apply what makes the pipeline full. CPU seconds of both."""
        start = time.thread_time()
        step = self.scheduler.plan()
        self.scheduler.take()
        spent = time.thread_time() - start
        if step is not None:
            self.pending.append((step, self.worker.sample(self.worker.forward(step))))
            if len(self.pending) < DEPTH:
                return spent
        oldest, result = self.pending.popleft()
        start = time.thread_time()
        out = self.scheduler.apply(oldest, result)
        spent += time.thread_time() - start
        if out is not None:
            self.last = (oldest, result, out)
        return spent

    @property
    def n_waiting(self) -> int:
        return self.scheduler.snapshot().waiting


def microseconds(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        "median_us": round(statistics.median(ordered) * 1e6, 1),
        "p90_us": round(ordered[len(ordered) * 9 // 10] * 1e6, 1),
        "mean_us": round(statistics.mean(ordered) * 1e6, 1),
    }


def steady(n_running: int, policy: str, n_waiting: int, steps: int) -> tuple[dict[str, float], Driver]:
    driver = Driver(n_running, policy, steps + 200)
    driver.submit(n_running, vary=False)
    for _ in range(100):
        driver.turn()
    driver.submit(n_waiting, vary=False)
    driver.turn()
    assert driver.n_waiting == n_waiting
    return microseconds([driver.turn() for _ in range(steps)]), driver


def churn(n_running: int, policy: str, steps: int) -> dict[str, float]:
    driver = Driver(n_running, policy, CHURN_OUTPUT_TOKENS)
    driver.submit(n_running + QUEUE, vary=True)
    for _ in range(CHURN_OUTPUT_TOKENS):
        driver.turn()
        driver.submit(QUEUE - driver.n_waiting, vary=True)
    times = []
    before = driver.n_submitted
    for _ in range(steps):
        times.append(driver.turn())
        driver.submit(QUEUE - driver.n_waiting, vary=True)
    return {**microseconds(times), "admitted_per_step": round((driver.n_submitted - before) / steps, 2)}


def timed(call: Callable[[], Any], repeats: int = 200) -> float:
    """Median CPU microseconds of `call`."""
    times = []
    for _ in range(repeats):
        start = time.thread_time()
        call()
        times.append(time.thread_time() - start)
    return round(statistics.median(times) * 1e6, 1)


def message_costs(messages: tuple[Message, ...]) -> dict[str, Any]:
    costs: dict[str, Any] = {}
    for message in messages:
        frames = [bytes(frame) for frame in encode(message)]
        costs[type(message).__name__] = {
            "encode_us": timed(lambda message=message: encode(message)),
            "decode_us": timed(lambda frames=frames: decode(frames)),
            "bytes": sum(map(len, frames)),
        }
    return costs


async def _stream(address: tuple[str, int], prompt: list[int], max_tokens: int) -> int:
    """The completion tokens of one streaming request; its events are read and counted, not parsed."""
    reader, writer = await asyncio.open_connection(*address)
    body = {
        "model": "null:0", "prompt": prompt, "max_tokens": max_tokens, "seed": 0, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    text = json.dumps(body).encode()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b"
        % (len(text), text)
    )
    tail = b""
    while data := await reader.read(1 << 16):
        tail = (tail + data)[-4096:]
    writer.close()
    found = re.search(rb'"completion_tokens": ?(\d+)', tail)
    assert found, tail
    return int(found[1])


async def _clients(address: tuple[str, int], n: int, max_tokens: int) -> tuple[int, float]:
    start = time.perf_counter()
    counts = await asyncio.gather(*(_stream(address, [10 + i] * PROMPT_TOKENS, max_tokens) for i in range(n)))
    return sum(counts), time.perf_counter() - start


def server_speed(clients: tuple[int, ...], max_tokens: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "gristmill", "serve", "null:0", "--port", "0", "--log-level", "warning"]
    command += ["--max-running", str(max(clients)), "--pool-tokens", str(max(clients) * (PROMPT_TOKENS + max_tokens) * 2)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    results: dict[str, Any] = {}
    try:
        assert server.stdout is not None
        found = next(match for line in server.stdout if (match := re.search(r"http://([\d.]+):(\d+)", line)))
        address = (found[1], int(found[2]))
        processes = {"server": psutil.Process(server.pid), "client": psutil.Process()}
        for child in processes["server"].children():
            processes[child.cmdline()[-1]] = child
        asyncio.run(_clients(address, 4, 64))
        for n in clients:
            before = {name: sum(process.cpu_times()[:2]) for name, process in processes.items()}
            tokens, seconds = asyncio.run(_clients(address, n, max_tokens))
            cpu = {name: sum(process.cpu_times()[:2]) - before[name] for name, process in processes.items()}
            results[str(n)] = {
                "tokens_s": round(tokens / seconds),
                "cpu_us_per_token": {name: round(value / tokens * 1e6, 1) for name, value in cpu.items()},
            }
            print(f"  server, {n:4d} streams: {tokens / seconds:9.0f} tokens/s; CPU us per token {results[str(n)]['cpu_us_per_token']}")
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)
    return results


def engine_speed(sizes: tuple[int, ...], max_tokens: int) -> dict[str, Any]:
    results = {}
    most = max(sizes)
    with Engine("null:0", max_running=most, pool_tokens=most * (PROMPT_TOKENS + max_tokens) * 2, log_level="warning") as engine:
        engine.generate([[10] * PROMPT_TOKENS], max_tokens=16, seed=0)
        for n in sizes:
            prompts = [[10 + i] * PROMPT_TOKENS for i in range(n)]
            start = time.perf_counter()
            outputs = engine.generate(prompts, max_tokens=max_tokens, seed=0)
            seconds = time.perf_counter() - start
            assert all(len(output.ids) == max_tokens for output in outputs)
            results[str(n)] = {"tokens_s": round(n * max_tokens / seconds)}
            print(f"  Engine, {n:4d} prompts: {n * max_tokens / seconds:9.0f} tokens/s")
    return results


def machine() -> dict[str, Any]:
    model = ""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1,64,256,1024")
    parser.add_argument("--policies", default=",".join(FIELDS["policy"].metadata["choices"]))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=256, help="output tokens per request, end to end")
    parser.add_argument("--no-end-to-end", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    sizes = [int(size) for size in arguments.sizes.split(",")]
    report: dict[str, Any] = {"benchmark": "scheduler", **machine(), "steady": {}, "churn": {}, "messages": {}}

    medians: dict[int, float] = {}
    for policy in arguments.policies.split(","):
        report["steady"][policy], report["churn"][policy] = {}, {}
        for size in sizes:
            shown = [f"{policy:16s}{size:5d} running:"]
            for waiting in (0, QUEUE):
                result, driver = steady(size, policy, waiting, arguments.steps)
                report["steady"][policy][f"{size} running, {waiting} waiting"] = result
                shown.append(f"steady, {waiting} waiting {result['median_us']:.0f} (p90 {result['p90_us']:.0f}) us;")
                if not waiting and policy == "fcfs":
                    medians[size] = result["median_us"]
                    assert driver.last is not None
                    report["messages"][str(size)] = message_costs(driver.last)
            result = report["churn"][policy][f"{size} running"] = churn(size, policy, arguments.steps // 2)
            shown.append(
                f"churn {result['median_us']:.0f} (p90 {result['p90_us']:.0f}, {result['admitted_per_step']} admitted per step) us"
            )
            print(" ".join(shown), flush=True)
    for size, costs in report["messages"].items():
        parts = [f"{kind} {cost['encode_us']}/{cost['decode_us']} us, {cost['bytes']} bytes" for kind, cost in costs.items()]
        print(f"  messages, {size:>4s} rows, encode/decode: {'; '.join(parts)}")
    if {64, 256, 1024} <= set(medians):
        marginal = {f"{low}..{high}": round((medians[high] - medians[low]) / (high - low), 3) for low, high in ((64, 256), (256, 1024))}
        met = medians[256] <= BAR_256_US and max(marginal.values()) <= BAR_MARGINAL_US
        report["bars"] = {"at_256_us": medians[256], "marginal_us_per_request": marginal, "met": met}
        print(f"  bars (<= {BAR_256_US:.0f} us at 256, <= {BAR_MARGINAL_US:.0f} us per request): {report['bars']}")
    if not arguments.no_end_to_end:
        report["server"] = server_speed((1, 16, 64, 256), arguments.tokens)
        report["engine"] = engine_speed((1, 16, 64, 256), arguments.tokens)

    arguments.out.mkdir(parents=True, exist_ok=True)
    target = arguments.out / f"scheduler-{report['date']}.json"
    target.write_text(json.dumps(report, indent=1) + "\n")
    print(f"wrote {target}")


if __name__ == "__main__":
    main()
