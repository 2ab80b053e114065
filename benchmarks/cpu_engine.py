"""Decode and prefill tokens/s of this engine (the real server, over HTTP) and of transformers, same GGUF weights, one run, alternating.

    python benchmarks/cpu_engine.py [--model smollm2-135m] [--dtypes float32,bfloat16] [--rounds 5] [--out benchmarks/results]

Both sides get the same random prompt ids and the same number of threads. transformers runs a bare forward loop (no HTTP,
no detokenisation, no scheduling); ours includes all of that. The ratio is the median over rounds of ours / peer within the round.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import http.client
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # the peer's threads wait as ours do; read when torch is loaded

import numpy as np
import torch

PROMPT_TOKENS = 128
DECODE_TOKENS = 96
PREFILL_TOKENS = 1024
BATCHES = (1, 16)


class Peer:
    """transformers with its default (SDPA) attention and a DynamicCache."""

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype).eval()

    @torch.inference_mode()
    def decode(self, prompts: np.ndarray) -> float:
        """Generated tokens/s of all sequences after the first token of each."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.config)
        step = (
            self.model(input_ids=torch.from_numpy(prompts), cache=cache, use_cache=True, logits_to_keep=1)
            .logits[:, -1]
            .argmax(-1, keepdim=True)
        )
        start = time.perf_counter()
        for _ in range(DECODE_TOKENS - 1):
            step = self.model(input_ids=step, cache=cache, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1, keepdim=True)
        return prompts.shape[0] * (DECODE_TOKENS - 1) / (time.perf_counter() - start)

    @torch.inference_mode()
    def prefill(self, prompt: np.ndarray) -> float:
        start = time.perf_counter()
        self.model(input_ids=torch.from_numpy(prompt), use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1)
        return prompt.size / (time.perf_counter() - start)


class Ours:
    """`gristmill serve`, driven over one HTTP connection."""

    def __init__(self, url: str, model: str) -> None:
        self.address, self.model = url.removeprefix("http://"), model

    def _stream(self, prompts: np.ndarray, max_tokens: int) -> tuple[float, float, list[float], float]:
        """(time sent, time of the last choice's first text, all arrival times, end)"""
        body = {
            "model": self.model, "prompt": prompts.tolist(), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True}, "logprobs": 0,
        }  # fmt: skip
        connection = http.client.HTTPConnection(self.address, timeout=600)
        sent = time.perf_counter()
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise SystemExit(response.read().decode())
        first: dict[int, float] = {}
        usage: dict[str, Any] = {}
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            now = time.perf_counter()
            chunk = json.loads(line[6:])
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                first.setdefault(choice["index"], now)
        end = time.perf_counter()
        assert usage["completion_tokens"] == prompts.shape[0] * max_tokens, usage
        connection.close()
        return sent, max(first.values()), sorted(first.values()), end

    def decode(self, prompts: np.ndarray) -> float:
        """As the peer's: from the moment that every sequence has its first token (logprobs make even textless tokens visible)."""
        _, all_started, _, end = self._stream(prompts, DECODE_TOKENS)
        return prompts.shape[0] * (DECODE_TOKENS - 1) / (end - all_started)

    def prefill(self, prompt: np.ndarray) -> float:
        sent, _, _, end = self._stream(prompt, 1)
        return prompt.size / (end - sent)


@contextlib.contextmanager
def serve(model: str, dtype: str, threads: int) -> Iterator[Ours]:
    command = [sys.executable, "-m", "gristmill", "serve", model, "--port", "0", "--dtype", dtype, "--threads", str(threads)]
    command += ["--no-radix-cache", "--pool-tokens", "16384", "--log-level", "warning"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert server.stdout is not None
        for line in server.stdout:
            if "ready" in line.lower() and (found := re.search(r"http://[\w.:\[\]-]+", line)):
                break
            print("  " + line, end="")
        else:
            raise SystemExit("the server did not start")
        yield Ours(found.group(), model)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)


def measure(peer: Peer, ours: Ours, rounds: int, vocab: int, rng: np.random.Generator) -> dict[str, Any]:
    cases = {f"decode_batch_{batch}": ("decode", (batch, PROMPT_TOKENS)) for batch in BATCHES}
    cases |= {f"prefill_{PREFILL_TOKENS}": ("prefill", (1, PREFILL_TOKENS))}
    results: dict[str, Any] = {}
    for name, (kind, shape) in cases.items():
        pairs = []
        for round_number in range(rounds + 1):
            prompts = rng.integers(3, vocab, size=shape, dtype=np.int64)
            sides = [("peer", getattr(peer, kind)), ("ours", getattr(ours, kind))]
            speeds = {side: run(prompts) for side, run in (sides if round_number % 2 else sides[::-1])}
            if round_number:  # the first warms both up
                pairs.append(speeds)
        ratio = statistics.median(pair["ours"] / pair["peer"] for pair in pairs)
        mine, theirs = (statistics.median(pair[side] for pair in pairs) for side in ("ours", "peer"))
        results[name] = {
            "ours_tokens_s": round(mine, 1),
            "transformers_tokens_s": round(theirs, 1),
            "ratio": round(ratio, 3),
            "rounds": pairs,
        }
        print(f"  {name:18s} ours {mine:8.1f} tokens/s   transformers {theirs:8.1f} tokens/s   ratio {ratio:.2f}", flush=True)
    return results


def machine() -> dict[str, Any]:
    model = ""
    with contextlib.suppress(OSError):
        model = next(
            (line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), ""
        )
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    import transformers

    import gristmill_kernels

    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "kernels_isa": gristmill_kernels.capabilities()["native"]["isa"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()

    from gristmill.catalogue import resolve_model

    path = Path(resolve_model(arguments.model).path)
    torch.set_num_threads(arguments.threads)
    report: dict[str, Any] = {"benchmark": "cpu_engine", **machine(), "model": arguments.model, "threads": arguments.threads, "results": {}}
    for dtype in arguments.dtypes.split(","):
        print(f"{arguments.model} {dtype}, {arguments.threads} threads, decode after {PROMPT_TOKENS} prompt tokens", flush=True)
        peer = Peer(path, getattr(torch, dtype))
        with serve(arguments.model, dtype, arguments.threads) as ours:
            vocab = peer.model.config.vocab_size
            report["results"][dtype] = measure(peer, ours, arguments.rounds, vocab, np.random.default_rng(arguments.seed))
        del peer
    arguments.out.mkdir(parents=True, exist_ok=True)
    target = arguments.out / f"cpu_engine-{report['date']}.json"
    target.write_text(json.dumps(report, indent=1) + "\n")
    print(f"wrote {target}")


if __name__ == "__main__":
    main()
