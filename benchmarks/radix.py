"""The radix tree and SGLang's Python RadixCache on the same requests, alternating in one run: time per operation, ratios, bytes per token.

    python benchmarks/radix.py --sglang DIR [--mooncake FILE] [--only multi_turn] [--rounds 5] [--page-sizes 1,16] [--clock wall|cpu]

DIR is an unpacked SGLang wheel or the site-packages of an environment with SGLang in it: `pip download --no-deps sglang==0.5.6` and unzip
the wheel. Only its radix_cache.py is loaded, with stand-ins for what that imports and does not use here (pools, metrics, Triton).
FILE is the Mooncake conversation trace (JSON lines with input_length, output_length, hash_ids); without it that workload is left out.

Each request does the same on both sides: match its prompt, lock what was found, evict when the pool is too small for the rest; and, when
some more requests have started, insert prompt and output, and unlock. Ours is called as the scheduler calls it, with int32 arrays, theirs
as SGLang's calls it, with lists and tensors; making those is not timed, nor is the free list. Ours copies ids and slots inside insert;
SGLang copies the slots just before it, which is counted, and keeps the list of ids. A ratio is the median over rounds of theirs / ours
within the round: above 1 ours is faster. SGLang evicts whole nodes, ours cuts the last one, so hits may differ a little.
`--clock cpu` measures the CPU time of the thread, which a busy machine disturbs less; reading it costs some 0.3 us, in every figure.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import importlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

from gristmill_kernels._host import RadixTree, build_info

VOCAB = 100_000
RUNNING = 16  # requests between match and insert
BLOCK_TOKENS = 512  # of a hash in the Mooncake trace
OPERATIONS = ("match", "lock", "insert", "unlock", "evict")


class Request(NamedTuple):
    prompt: np.ndarray  # int32 [n]
    output: np.ndarray  # int32 [n]


class Workload(NamedTuple):
    requests: list[Request]
    pool_tokens: int


# -- workloads ---------------------------------------------------------------------------------------------------------


def tokens(rng: np.random.Generator, count: float) -> np.ndarray:
    return rng.integers(0, VOCAB, max(1, int(count)), dtype=np.int32)


def multi_turn() -> Workload:
    """Like ShareGPT: conversations of a few turns, 100 open at a time; a turn's prompt is everything said before and the new message."""
    rng = np.random.default_rng(1)
    waiting = [(tokens(rng, 0), int(rng.geometric(0.25))) for _ in range(500)]
    opened, waiting = waiting[:100], waiting[100:]
    requests: list[Request] = []
    while opened:
        number = int(rng.integers(len(opened)))
        history, turns = opened[number]
        prompt = np.concatenate([history, tokens(rng, rng.lognormal(3.5, 1.2))])
        requests.append(Request(prompt, tokens(rng, rng.lognormal(5.0, 0.9))))
        opened[number] = (np.concatenate(requests[-1]), turns - 1)
        if turns == 1:
            opened[number : number + 1] = [waiting.pop()] if waiting else []
    return Workload(requests, 150_000)


def system_prompt() -> Workload:
    """One system prompt of 2,000 tokens before short questions."""
    rng = np.random.default_rng(2)
    system = tokens(rng, 2000)
    requests = [Request(np.concatenate([system, tokens(rng, rng.lognormal(4.0, 0.8))]), tokens(rng, 150)) for _ in range(2000)]
    return Workload(requests, 150_000)


def tree_of_thought() -> Workload:
    """Problems of 500 tokens; five levels, each of which continues the three best thoughts by five of 80 tokens each."""
    rng = np.random.default_rng(3)
    problems = []
    for _ in range(40):
        levels, best = [], [tokens(rng, 500)]
        for _ in range(5):
            level = [Request(path, tokens(rng, 80)) for path in best for _ in range(5)]
            best = [np.concatenate(level[at]) for at in rng.permutation(len(level))[:3]]
            levels.append(level)
        problems.append(levels)
    # eight problems at a time, level by level
    requests = [
        request for first in range(0, 40, 8) for depth in range(5) for levels in problems[first : first + 8] for request in levels[depth]
    ]
    return Workload(requests, 60_000)


def mooncake(path: Path, limit: int) -> Workload:
    """The trace, each block hash spelled out as 512 tokens that depend on it alone; outputs are random."""
    rng = np.random.default_rng(4)
    requests: list[Request] = []
    with path.open() as file:
        for line in file:
            if len(requests) == limit:
                break
            row = json.loads(line)
            blocks = np.array(row["hash_ids"], dtype=np.uint64)[:, None] * BLOCK_TOKENS + np.arange(BLOCK_TOKENS, dtype=np.uint64)
            mixed = (blocks + 1) * np.uint64(0x9E3779B97F4A7C15)  # wraps around
            prompt = ((mixed >> np.uint64(33)) % VOCAB).astype(np.int32).reshape(-1)[: row["input_length"]]
            requests.append(Request(prompt, tokens(rng, row["output_length"])))
    return Workload(requests, 3_000_000)


# -- the two sides -----------------------------------------------------------------------------------------------------


class Pool:
    """The slots that neither tree holds; the same for both sides and not timed."""

    def __init__(self, num_slots: int) -> None:
        self.slots = np.arange(num_slots - 1, -1, -1, dtype=np.int32)
        self.free = num_slots

    def take(self, count: int) -> np.ndarray:
        if count > self.free:
            raise SystemExit(f"the pool has {self.free} slots and a request needs {count}: raise pool_tokens of the workload")
        self.free -= count
        return self.slots[self.free : self.free + count].copy()

    def give(self, slots: np.ndarray) -> None:
        self.slots[self.free : self.free + len(slots)] = slots
        self.free += len(slots)


class Clock:
    """Seconds per operation."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.seconds = dict.fromkeys(OPERATIONS, 0.0)
        self.calls = dict.fromkeys(OPERATIONS, 0)

    def time(self, operation: str, call: Callable[..., Any], *arguments: Any) -> Any:
        start = self.now()
        result = call(*arguments)
        self.seconds[operation] += self.now() - start
        self.calls[operation] += 1
        return result


class Ours:
    def __init__(self, page_size: int) -> None:
        self.tree, self.page_size = RadixTree(page_size), page_size

    def ids(self, array: np.ndarray) -> Any:
        return array

    def values(self, slots: np.ndarray) -> Any:
        return slots

    def match(self, clock: Clock, ids: Any) -> tuple[Any, np.ndarray]:
        return clock.time("match", self.tree.match, ids)

    def lock(self, clock: Clock, node: Any) -> None:
        clock.time("lock", self.tree.lock, node)

    def insert(self, clock: Clock, ids: Any, values: Any) -> int:
        return clock.time("insert", self.tree.insert, ids, values)[1]

    def unlock(self, clock: Clock, node: Any) -> None:
        clock.time("unlock", self.tree.unlock, node)

    def evict(self, clock: Clock, count: int) -> np.ndarray:
        return clock.time("evict", self.tree.evict, count)

    def size(self) -> int:
        return self.tree.size

    def memory_bytes(self) -> int:
        return self.tree.memory_bytes


class Theirs:
    def __init__(self, module: ModuleType, page_size: int) -> None:
        self.key, self.page_size = module.RadixKey, page_size
        self.freed: list[torch.Tensor] = []
        self.device = torch.device("cpu")
        self.cache = module.RadixCache.create_simulated(mock_allocator=self, page_size=page_size)

    def free(self, slots: torch.Tensor) -> None:
        """What the cache calls as its pool."""
        self.freed.append(slots)

    def ids(self, array: np.ndarray) -> Any:
        return array.tolist()

    def values(self, slots: np.ndarray) -> Any:
        return torch.from_numpy(slots)

    def match(self, clock: Clock, ids: Any) -> tuple[Any, np.ndarray]:
        found = clock.time("match", lambda: self.cache.match_prefix(self.key(ids)))
        return found.last_device_node, found.device_indices.numpy()

    def lock(self, clock: Clock, node: Any) -> None:
        clock.time("lock", self.cache.inc_lock_ref, node)

    def insert(self, clock: Clock, ids: Any, values: Any) -> int:
        whole = len(ids) // self.page_size * self.page_size
        ids, values = ids[:whole], values[:whole]
        # as in cache_finished_req
        return clock.time("insert", lambda: self.cache.insert(self.key(ids), values.to(dtype=torch.int64, copy=True)))

    def unlock(self, clock: Clock, node: Any) -> None:
        clock.time("unlock", self.cache.dec_lock_ref, node)

    def evict(self, clock: Clock, count: int) -> np.ndarray:
        clock.time("evict", self.cache.evict, count)
        freed = torch.cat(self.freed).numpy()
        self.freed.clear()
        return freed

    def size(self) -> int:
        return self.cache.total_size()

    def memory_bytes(self) -> int:
        """Python objects of the tree, each once, and the memory of its tensors, without the C++ side of a tensor object."""
        total, nodes, seen = 0, [self.cache.root_node], set()
        while nodes:
            node = nodes.pop()
            nodes.extend(node.children.values())
            for thing in (node, node.__dict__, node.children, node.key, node.key.__dict__, node.key.token_ids, *node.key.token_ids):
                if id(thing) not in seen:
                    seen.add(id(thing))
                    total += sys.getsizeof(thing)
            if isinstance(node.value, torch.Tensor):
                storage = node.value.untyped_storage()
                total += sys.getsizeof(node.value)
                if storage.data_ptr() not in seen:
                    seen.add(storage.data_ptr())
                    total += storage.nbytes()
        return total


def load_sglang(directory: Path) -> tuple[ModuleType, str]:
    """SGLang's radix_cache module and version."""
    package = directory / "sglang"
    if not (package / "srt/mem_cache/radix_cache.py").is_file():
        raise SystemExit(
            f"{directory} has no sglang/srt/mem_cache/radix_cache.py: pip download --no-deps sglang==0.5.6 and unzip the wheel"
        )
    for name in ("sglang", "sglang.srt", "sglang.srt.mem_cache", "sglang.srt.disaggregation", "sglang.srt.metrics"):
        module = sys.modules[name] = ModuleType(name)  # in place of an __init__ that would import everything
        module.__path__ = [str(package.joinpath(*name.split(".")[1:]))]
    stand_ins = {
        "disaggregation.kv_events": ("AllBlocksCleared", "BlockRemoved", "BlockStored"),
        "mem_cache.allocator": ("BaseTokenToKVPoolAllocator",),
        "mem_cache.memory_pool": ("ReqToTokenPool",),
        "mem_cache.memory_pool_host": ("HostKVCache",),
        "mem_cache.utils": ("convert_to_bigram_key",),
        "metrics.collector": ("RadixCacheMetricsCollector",),
    }
    for name, members in stand_ins.items():
        module = sys.modules[f"sglang.srt.{name}"] = ModuleType(f"sglang.srt.{name}")
        for member in members:
            setattr(module, member, type(member, (), {}))
    versions = [path.name.removeprefix("sglang-").removesuffix(".dist-info") for path in directory.glob("sglang-*.dist-info")]
    return importlib.import_module("sglang.srt.mem_cache.radix_cache"), versions[0] if versions else "unknown"


# -- the run -----------------------------------------------------------------------------------------------------------


class Run(NamedTuple):
    clock: Clock
    hit_tokens: int
    size: int
    memory_bytes: int


def replay(side: Ours | Theirs, workload: Workload, clock: Clock, measure_memory: bool) -> Run:
    pool, hits = Pool(workload.pool_tokens), 0
    running: deque[tuple[np.ndarray, Any, np.ndarray, int]] = deque()
    size = side.page_size

    def finish() -> None:
        everything, node, slots, cached = running.popleft()
        whole = len(everything) // size * size
        present = side.insert(clock, side.ids(everything), side.values(slots[: len(everything)]))
        side.unlock(clock, node)
        pool.give(slots[cached:present])
        pool.give(slots[max(whole, present) :])

    for request in workload.requests:
        node, found = side.match(clock, side.ids(request.prompt))
        side.lock(clock, node)
        cached = len(found)
        hits += cached
        everything = np.concatenate(request)
        missing = -(-len(everything) // size) * size - cached
        if missing > pool.free:
            pool.give(side.evict(clock, missing - pool.free))
        running.append((everything, node, np.concatenate([found.astype(np.int32), pool.take(missing)]), cached))
        if len(running) == RUNNING:
            finish()
    while running:
        finish()
    if pool.free + side.size() != workload.pool_tokens:
        raise SystemExit(f"{type(side).__name__}: {pool.free} free and {side.size()} cached slots are not all {workload.pool_tokens}")
    return Run(clock, hits, side.size(), side.memory_bytes() if measure_memory else 0)


def per_request(run: Run, workload: Workload) -> dict[str, float]:
    """Microseconds per request."""
    count = len(workload.requests)
    return {name: run.clock.seconds[name] / count * 1e6 for name in OPERATIONS} | {"total": sum(run.clock.seconds.values()) / count * 1e6}


def measure(workload: Workload, page_size: int, module: ModuleType, rounds: int, now: Callable[[], float]) -> dict[str, Any]:
    times: dict[str, list[dict[str, float]]] = {"ours": [], "sglang": []}
    result: dict[str, Any] = {"requests": len(workload.requests), "pool_tokens": workload.pool_tokens}
    result["prompt_tokens"] = sum(len(request.prompt) for request in workload.requests)
    for number in range(rounds):
        for name, make in (("ours", lambda: Ours(page_size)), ("sglang", lambda: Theirs(module, page_size))):
            gc.collect()
            run = replay(make(), workload, Clock(now), measure_memory=number == rounds - 1)
            times[name].append(per_request(run, workload))
            if run.memory_bytes:
                result[name] = {
                    "hit_rate": round(run.hit_tokens / result["prompt_tokens"], 4),
                    "evict_calls": run.clock.calls["evict"],
                    "cached_tokens": run.size,
                    "bytes_per_cached_token": round(run.memory_bytes / run.size, 2),
                }
    keys = [*OPERATIONS, "total"]
    for name, samples in times.items():
        result[name]["us_per_request"] = {key: round(statistics.median(sample[key] for sample in samples), 2) for key in keys}
    pairs = list(zip(times["ours"], times["sglang"]))
    result["ratios"] = {
        key: round(statistics.median(theirs[key] / ours[key] for ours, theirs in pairs), 1)
        for key in keys
        if all(s[key] for p in pairs for s in p)
    }
    result["ratio_by_round"] = [round(theirs["total"] / ours["total"], 1) for ours, theirs in pairs]
    return result


def machine() -> dict[str, Any]:
    cpu = ""
    with contextlib.suppress(OSError):
        cpu = next(
            (line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), ""
        )
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": torch.__version__,
        "compiler": build_info()["compiler"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sglang", type=Path, required=True, metavar="DIR", help="unpacked wheel of SGLang 0.5.6 or a site-packages folder"
    )
    parser.add_argument("--mooncake", type=Path, metavar="FILE", help="Mooncake conversation trace")
    parser.add_argument(
        "--mooncake-requests", type=int, default=4000, help="requests of the trace to replay, from its beginning (default: 4000)"
    )
    parser.add_argument("--only", default="", help="workloads to run, separated by commas (default: all)")
    parser.add_argument("--page-sizes", default="1,16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    module, version = load_sglang(arguments.sglang)
    workloads: dict[str, Callable[[], Workload]] = {
        "multi_turn": multi_turn,
        "system_prompt": system_prompt,
        "tree_of_thought": tree_of_thought,
    }
    if arguments.mooncake is not None:
        workloads["mooncake"] = lambda: mooncake(arguments.mooncake, arguments.mooncake_requests)
    chosen = arguments.only.split(",") if arguments.only else list(workloads)
    report: dict[str, Any] = {"benchmark": "radix", **machine(), "sglang": version, "rounds": arguments.rounds, "clock": arguments.clock}
    report["results"] = {}
    now = time.thread_time if arguments.clock == "cpu" else time.perf_counter
    for name in chosen:
        if name not in workloads:
            raise SystemExit(f"--only: there is no workload {name} (mooncake needs --mooncake FILE); there are {', '.join(workloads)}")
        workload = workloads[name]()
        for page_size in map(int, arguments.page_sizes.split(",")):
            result = report["results"][f"{name} page_size={page_size}"] = measure(workload, page_size, module, arguments.rounds, now)
            print("\n".join(lines(f"{name} page_size={page_size}", result)), flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    target = arguments.out / f"radix-{report['date']}.json"
    target.write_text(json.dumps(report, indent=1) + "\n")
    print(f"wrote {target}")


def lines(title: str, result: dict[str, Any]) -> Iterator[str]:
    ours, theirs = result["ours"], result["sglang"]
    yield f"{title}: {result['requests']} requests, {result['prompt_tokens']} prompt tokens, pool {result['pool_tokens']}"
    for key, ratio in result["ratios"].items():
        mine, other = ours["us_per_request"][key], theirs["us_per_request"][key]
        yield f"  {key:8s} ours {mine:9.2f} us  sglang {other:10.2f} us  ratio {ratio:7.1f}"
    for label, key in (("hit rate", "hit_rate"), ("bytes per cached token", "bytes_per_cached_token")):
        yield f"  {label}: ours {ours[key]}, sglang {theirs[key]}"


if __name__ == "__main__":
    main()
