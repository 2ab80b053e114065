"""`make demo`: serve SmolLM2-135M-Instruct, ask it a question over HTTP with streaming, show the answer and the speed, stop cleanly."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
import urllib.request

QUESTION = "Explain in three sentences why the sky is blue."


def start_server() -> tuple[subprocess.Popen[str], str]:
    """The server process and its base URL, read from the line it prints when it is ready."""
    command = [sys.executable, "-m", "gristmill", "serve", "smollm2-135m", "--port", "0"]
    print("$ gristmill serve smollm2-135m --port 0", flush=True)
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert server.stdout is not None
    for line in server.stdout:
        print("  " + line, end="", flush=True)
        if "ready" in line.lower() and (found := re.search(r"http://[\w.:\[\]-]+", line)):
            return server, found.group()
    raise SystemExit(f"the server ended with exit code {server.wait()} before it was ready")


def ask(url: str) -> None:
    body = {
        "model": "smollm2-135m",
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 128,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request = urllib.request.Request(url + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    print(f"\nuser: {QUESTION}\nassistant: ", end="", flush=True)
    start, first, last, tokens = time.monotonic(), 0.0, 0.0, 0
    with urllib.request.urlopen(request, timeout=300) as response:
        for raw in response:
            line = raw.decode().strip()
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line[6:])
            if chunk.get("usage"):
                tokens = chunk["usage"]["completion_tokens"]
            for choice in chunk["choices"]:
                if text := choice["delta"].get("content"):
                    last = time.monotonic()
                    first = first or last
                    print(text, end="", flush=True)
    speed = (tokens - 1) / (last - first) if last > first else 0.0
    print(f"\n\n{tokens} tokens, first after {1000 * (first - start):.0f} ms, then {speed:.1f} tokens/s", flush=True)


def main() -> int:
    server, url = start_server()
    try:
        ask(url)
    finally:
        server.send_signal(signal.SIGTERM)
        code = server.wait(timeout=30)
    print(f"server stopped with exit code {code}")
    return code


if __name__ == "__main__":
    sys.exit(main())
