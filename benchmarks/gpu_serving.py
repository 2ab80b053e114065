"""A closed loop through a real server on one GPU: output tokens per second, time to first token, time per token, inter-token latency.

    python benchmarks/gpu_serving.py [--model benchmarks/models/llama-3.1-8b] [--concurrent 64] [--requests 200] [--json results.json]
    python benchmarks/gpu_serving.py --url http://127.0.0.1:30000 --name default     # measures a server that runs already

Starts `gristmill serve` with random weights (or takes --url, any OpenAI server that takes token ids as prompts), keeps --concurrent
completions of --input random tokens in and --output tokens out open until --requests are done, and streams the answers. A warm-up round of
short answers comes first.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np

READY_S = 300.0


class Answer(NamedTuple):
    """Times are of time.perf_counter; `chunks` are the arrivals of the parts of a streamed answer."""

    start: float
    chunks: list[float]
    tokens: int


async def complete(url: str, name: str, ids: list[int], n_tokens: int) -> Answer:
    """One streamed completion over a connection of its own."""
    where = urlsplit(url)
    body = json.dumps(
        {
            "model": name, "prompt": ids, "max_tokens": n_tokens, "temperature": 0, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()  # fmt: skip
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {where.netloc}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    start, chunks, tokens = time.perf_counter(), [], 0
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    try:
        writer.write(head.encode() + b"Connection: close\r\n\r\n" + body)
        status = await reader.readline()
        if b" 200 " not in status:
            raise SystemExit(f"{url} answered {status.decode().strip()}: {(await reader.read(2000)).decode(errors='replace')}")
        async for line in reader:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            event = json.loads(line[6:])
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
            if event["choices"]:
                chunks.append(time.perf_counter())
    finally:
        writer.close()
    return Answer(start, chunks, tokens)


async def closed_loop(url: str, name: str, vocab: int, concurrent: int, requests: int, n_in: int, n_out: int) -> tuple[float, list[Answer]]:
    rng = random.Random(requests)
    prompts = [[rng.randrange(1000, vocab - 1000) for _ in range(n_in)] for _ in range(requests)]
    waiting, answers = iter(prompts), []

    async def worker() -> None:
        for prompt in waiting:
            answers.append(await complete(url, name, prompt, n_out))

    start = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(concurrent)))
    return time.perf_counter() - start, answers


def percentiles(values: Any) -> dict[str, float]:
    return {f"p{p}": round(float(np.percentile(values, p)), 3) for p in (50, 90, 99)}


def summary(seconds: float, answers: list[Answer]) -> dict[str, Any]:
    gaps = np.concatenate([np.diff(answer.chunks) for answer in answers]) * 1e3
    return {
        "seconds": seconds,
        "output_tokens_s": sum(answer.tokens for answer in answers) / seconds,
        "ttft_ms": percentiles([1e3 * (answer.chunks[0] - answer.start) for answer in answers]),
        "tpot_ms": percentiles([1e3 * (a.chunks[-1] - a.chunks[0]) / (a.tokens - 1) for a in answers]),
        "itl_ms": percentiles(gaps),
        "chunks_per_token": round(sum(len(answer.chunks) for answer in answers) / sum(answer.tokens for answer in answers), 3),
    }


@contextlib.contextmanager
def served(model: str, options: list[str]) -> Iterator[str]:
    """A server of ours with random weights; yields its URL."""
    command = [sys.executable, "-m", "gristmill", "serve", model, "--port=0", "--device=cuda", "--dtype=bfloat16", "--load-format=dummy"]
    process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if match := re.search(r"ready: .* at (http://\S+)", line):
                yield match[1]
                break
        else:
            raise SystemExit(f"the server ended with {process.wait()}")
    finally:
        process.terminate()
        process.wait(30)


def measure(url: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    vocab = json.loads((Path(arguments.model) / "config.json").read_text())["vocab_size"]
    name = arguments.name or Path(arguments.model).name
    shape = (arguments.concurrent, arguments.requests, arguments.input, arguments.output)
    asyncio.run(closed_loop(url, name, vocab, arguments.concurrent, arguments.concurrent, arguments.input, 32))
    found = []
    for _ in range(arguments.rounds):
        found.append(summary(*asyncio.run(closed_loop(url, name, vocab, *shape))))
        print(json.dumps(found[-1]), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(Path(__file__).parent / "models" / "llama-3.1-8b"))
    parser.add_argument("--url", default="")
    parser.add_argument("--name", default="")
    parser.add_argument("--concurrent", type=int, default=64)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--input", type=int, default=1024)
    parser.add_argument("--output", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", default="")
    parser.add_argument("options", nargs="*", help="options of `gristmill serve`, after --")
    arguments = parser.parse_args()
    defaults = ["--context-length=4096", "--no-radix-cache", "--graphs=start"]
    with contextlib.nullcontext(arguments.url) if arguments.url else served(arguments.model, [*defaults, *arguments.options]) as url:
        rounds = measure(url, arguments)
    if arguments.json:
        shown = {key: getattr(arguments, key) for key in ("model", "concurrent", "requests", "input", "output", "options")}
        Path(arguments.json).write_text(json.dumps({**shown, "url": arguments.url, "rounds": rounds}, indent=1) + "\n")


if __name__ == "__main__":
    main()
