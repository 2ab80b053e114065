"""Every option of the engine, in one dataclass: defaults, help texts, choices and validation.

The command line, the GRISTMILL_* environment variables and `gristmill.Engine(**options)` are all generated from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gristmill.errors import OptionError


def _opt(default: Any, help: str, *, choices: tuple[Any, ...] | None = None, low: float | None = None, high: float | None = None) -> Any:
    return field(default=default, metadata={"help": help, "choices": choices, "low": low, "high": high})


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of one engine. `model` is a directory, a .gguf file, a catalogue name or a hub id."""

    model: str = _opt("", "model directory, .gguf file, catalogue name or hub id")
    served_model_name: str = _opt("", "name in the API (default: the last part of MODEL)")
    revision: str = _opt("", "hub revision of MODEL (branch, tag or commit)")

    host: str = _opt("127.0.0.1", "address to listen on")
    port: int = _opt(8000, "port to listen on; 0 picks a free one", low=0, high=65535)

    device: str = _opt("cpu", "where the model runs", choices=("cpu",))
    dtype: str = _opt("auto", "dtype of weights and activations (auto: bfloat16 where the CPU has instructions for it, else float32)",
                      choices=("auto", "float32", "bfloat16"))
    attention_backend: str = _opt("auto", "attention backend by registered name, or auto")
    context_length: int = _opt(0, "longest prompt + output in tokens (0: what the model was trained for)", low=0)
    threads: int = _opt(0, "CPU threads of the model worker (0: the cores this process may use)", low=0)

    pool_tokens: int = _opt(0, "token slots of the KV pool (0: as many as kv_memory_fraction allows)", low=0)
    kv_memory_fraction: float = _opt(0.3, "share of the memory left after loading the weights that the KV pool may take", low=0.01, high=0.95)
    page_size: int = _opt(1, "tokens per page of the KV pool", low=1, high=64)
    max_running: int = _opt(64, "most requests in one step", low=1, high=4096)
    max_queued: int = _opt(1024, "most requests waiting; one more is refused with 503", low=1)

    overlap: bool = _opt(True, "plan and send step t+1 while step t runs")
    radix_cache: bool = _opt(True, "reuse the KV of common prefixes")
    chunk_tokens: int = _opt(512, "most prompt tokens computed in one step (0: no chunking)", low=0)
    mixed_chunks: bool = _opt(True, "run decode rows beside a prompt chunk in one step")

    max_body_bytes: int = _opt(16 << 20, "largest HTTP request body", low=1024)
    drain_s: float = _opt(30.0, "seconds that SIGTERM waits for open requests", low=0)
    log_level: str = _opt("info", "log level", choices=("debug", "info", "warning", "error"))
    trace: str = _opt("", "write a Chrome/Perfetto trace of all processes to this file")

    def __post_init__(self) -> None:
        for name, spec in self.__dataclass_fields__.items():
            value, meta, flag = getattr(self, name), spec.metadata, "--" + name.replace("_", "-")
            kind = type(spec.default)
            if kind is float and type(value) is int:
                object.__setattr__(self, name, float(value))
            elif type(value) is not kind:
                raise OptionError(f"{flag} must be {kind.__name__}, not {value!r}")
            if meta["choices"] and value not in meta["choices"]:
                raise OptionError(f"{flag} must be one of {', '.join(map(str, meta['choices']))}, not {value!r}")
            if meta["low"] is not None and not value >= meta["low"]:
                raise OptionError(f"{flag} must be at least {meta['low']}, not {value!r}")
            if meta["high"] is not None and not value <= meta["high"]:
                raise OptionError(f"{flag} must be at most {meta['high']}, not {value!r}")
