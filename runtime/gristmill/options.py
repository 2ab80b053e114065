"""Every option of the engine, in one dataclass: defaults, help texts, choices and validation.

The command line (cli/arguments.py), the GRISTMILL_* environment variables and `gristmill.Engine(**options)` are all generated from it.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gristmill import device
from gristmill.device import DEVICES
from gristmill.errors import OptionError

ENV_PREFIX = "GRISTMILL_"
# variables with our prefix that other parts read: the kernels package, the build of its wheels, our tests and checks
KERNELS_ENV = ("GRISTMILL_KERNELS_IMPL", "GRISTMILL_KERNELS_ISA", "GRISTMILL_KERNELS_STRICT")
_FOREIGN_ENV = ("GRISTMILL_PLATFORM", "GRISTMILL_TEST_", "GRISTMILL_CHECK")
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def _opt(
    default: Any, help: str, *, group: str, choices: tuple[Any, ...] | None = None, low: float | None = None, high: float | None = None
) -> Any:
    return field(default=default, metadata={"help": help, "group": group, "choices": choices, "low": low, "high": high})


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of one engine. `model` is a directory, a .gguf file, a catalogue name or a hub id."""

    model: str = _opt("", "model directory, .gguf file, catalogue name or hub id", group="model")
    served_model_name: str = _opt("", "name in the API (default: the last part of MODEL)", group="server")
    revision: str = _opt("", "hub revision of MODEL (branch, tag or commit)", group="model")

    host: str = _opt("127.0.0.1", "address to listen on", group="server")
    port: int = _opt(8000, "port to listen on; 0 picks a free one", low=0, high=65535, group="server")

    device: str = _opt("auto", "where the model runs (auto: an NVIDIA GPU if there is one, else the CPU)", choices=DEVICES, group="compute")
    dtype: str = _opt(
        "auto",
        "dtype of weights and activations (auto: bfloat16 where the device has instructions for it, else float32)",
        choices=("auto", "float32", "bfloat16"),
        group="compute",
    )
    attention_backend: str = _opt(
        "auto",
        "attention backend by name, or auto, or two as PREFILL+DECODE (flashinfer+cuda): one for prompts, another for decode steps",
        group="compute",
    )
    graphs: str = _opt(
        "lazy",
        "on a GPU, captured graphs of decode steps: lazy (a batch size is captured when it first comes), start (all before serving), off",
        choices=("lazy", "start", "off"),
        group="compute",
    )
    load_format: str = _opt(
        "auto",
        "auto: the weights of MODEL; dummy: random ones, for measuring a model of which only config.json is there",
        choices=("auto", "dummy"),
        group="model",
    )
    context_length: int = _opt(0, "longest prompt + output in tokens (0: what the model was trained for)", low=0, group="model")
    threads: int = _opt(0, "CPU threads of the model worker (0: the cores this process may use)", low=0, high=1024, group="compute")

    kv_dtype: str = _opt(
        "auto",
        "dtype of keys and values in the pool (auto: that of the activations; 8-bit floats hold twice as many tokens, less exactly)",
        choices=("auto", "fp8_e4m3", "fp8_e5m2"),
        group="memory",
    )
    pool_tokens: int = _opt(0, "token slots of the KV pool (0: as many as mem_fraction allows)", low=0, group="memory")
    mem_fraction: float = _opt(
        0.0,
        "CPU: share of the memory left after loading the weights that the KV pool may take; GPU: share of its memory that "
        "the engine may take in all (0: 0.3 on a CPU, 0.9 on a GPU)",
        low=0,
        high=0.98,
        group="memory",
    )
    page_size: int = _opt(1, "tokens per page of the KV pool", low=1, high=256, group="memory")
    max_running: int = _opt(0, "most requests in one step (0: 64 on a CPU, 256 on a GPU)", low=0, high=4096, group="scheduling")
    max_queued: int = _opt(1024, "most requests waiting; one more is refused with 503", low=1, group="server")

    overlap: bool = _opt(True, "plan and send step t+1 while step t runs", group="scheduling")
    radix_cache: bool = _opt(True, "reuse the KV of common prefixes", group="memory")
    eviction_policy: str = _opt(
        "lru",
        "which cached prefix goes first: lru, lfu (fewest uses), fifo (oldest), priority (lowest), slru (used once before reused)",
        choices=("lru", "lfu", "fifo", "priority", "slru"),
        group="memory",
    )
    kv_events: str = _opt("", "ipc:// endpoint on which to publish what enters and leaves the prefix cache", group="operation")
    chunk_tokens: int = _opt(
        -1, "most prompt tokens computed in one step (0: no chunking; -1: 512 on a CPU, 8192 on a GPU)", low=-1, group="scheduling"
    )
    max_prefill_tokens: int = _opt(
        16384, "without chunking: most prompt tokens in one step (a longer prompt gets a step of its own)", low=1, group="scheduling"
    )
    policy: str = _opt(
        "fcfs",
        "order of waiting requests of one priority: fcfs (first come, first served), lpm (longest cached prefix first), dfs-weight "
        "(most wanted part of the prefix cache first), shortest-prefill (fewest tokens to compute), hrrn (the same, with aging)",
        choices=("fcfs", "lpm", "dfs-weight", "shortest-prefill", "hrrn"),
        group="scheduling",
    )
    preempt_threshold: int = _opt(
        10, "put running requests back for a waiting one whose priority is higher by this much (0: never)", low=0, group="scheduling"
    )
    mixed_chunks: bool = _opt(True, "run decode rows beside a prompt chunk in one step", group="scheduling")

    max_body_bytes: int = _opt(16 << 20, "largest HTTP request body", low=1024, group="server")
    drain_s: float = _opt(30.0, "seconds that SIGTERM waits for open requests", low=0, group="server")
    watchdog_s: float = _opt(
        300.0,
        "seconds without progress after which the engine counts as hung: stacks are logged, then it ends (0: never)",
        low=0,
        group="operation",
    )
    log_level: str = _opt("info", "log level", choices=("debug", "info", "warning", "error"), group="operation")
    trace: str = _opt("", "write a Chrome/Perfetto trace of all processes to this file", group="operation")

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            value = getattr(self, spec.name)
            if type(spec.default) is float and type(value) is int:
                value = float(value)
                object.__setattr__(self, spec.name, value)
            check_value(spec, value, flag(spec.name))
        self._settle()
        if 0 < self.pool_tokens < self.page_size:
            raise OptionError(f"--pool-tokens {self.pool_tokens} is less than one page: --page-size is {self.page_size}")
        _check_kv_events(self.kv_events, self.radix_cache)

    def _settle(self) -> None:
        """Replace "auto" of the device and what depends on it by their values: every process then reads the same."""
        object.__setattr__(self, "device", device.resolve(self.device))
        for name, (unset, on_cpu, on_gpu) in _BY_DEVICE.items():
            if getattr(self, name) == unset:
                object.__setattr__(self, name, on_cpu if self.device == "cpu" else on_gpu)


# option -> the value that stands for "by the device", and what it is on a CPU and on a GPU
_BY_DEVICE: dict[str, tuple[Any, Any, Any]] = {
    "chunk_tokens": (-1, 512, 8192),
    "max_running": (0, 64, 256),
    "mem_fraction": (0.0, 0.3, 0.9),
}

FIELDS: dict[str, dataclasses.Field[Any]] = {spec.name: spec for spec in dataclasses.fields(Options)}


def flag(name: str) -> str:
    """The command-line spelling of the option `name`."""
    return "MODEL" if name == "model" else "--" + name.replace("_", "-")


def env_name(name: str) -> str:
    """The environment variable of the option `name`."""
    return ENV_PREFIX + name.upper()


def wanted(spec: dataclasses.Field[Any]) -> str:
    """What a right value of an option looks like, in words."""
    meta, kind = spec.metadata, type(spec.default)
    if meta["choices"]:
        return "one of " + ", ".join(map(str, meta["choices"]))
    if kind is bool:
        return "true or false"
    if kind is str:
        return "text"
    low, high = meta["low"], meta["high"]
    words = "a whole number" if kind is int else "a number"
    if low is not None and high is not None:
        return f"{words} from {low} to {high}"
    return f"{words}, at least {low}" if low is not None else words


def check_value(spec: dataclasses.Field[Any], value: Any, label: str) -> None:
    """Raise OptionError, naming `label`, when `value` is of another type than the option or out of its range."""
    meta = spec.metadata
    good = (
        type(value) is type(spec.default)
        and (not meta["choices"] or value in meta["choices"])
        and (type(value) is not float or math.isfinite(value))
        and (meta["low"] is None or value >= meta["low"])
        and (meta["high"] is None or value <= meta["high"])
    )
    if not good:
        raise OptionError(f"{label} must be {wanted(spec)}, not {value!r}")


def _check_kv_events(endpoint: str, radix_cache: bool) -> None:
    """The stream tells what prompts were like, so only sockets that file permissions protect are taken."""
    if not endpoint:
        return
    if not re.fullmatch(r"ipc://[^@*].*", endpoint):
        raise OptionError(
            f"{flag('kv_events')} must be ipc:// and a path, which file permissions protect, not {endpoint!r}: "
            "a socket that others can reach would have to be authenticated"
        )
    if not radix_cache:
        raise OptionError(f"{flag('kv_events')} publishes what the prefix cache does, and --no-radix-cache switches that off")


def parse_value(spec: dataclasses.Field[Any], text: str, label: str) -> Any:
    """The value that `text` from a command line or the environment spells; raises OptionError naming `label`."""
    kind = type(spec.default)
    value: Any = text
    if kind is bool:
        lowered = text.strip().lower()
        value = True if lowered in _TRUE else False if lowered in _FALSE else text
    elif kind is int and re.fullmatch(r"\s*[+-]?[0-9]{1,18}\s*", text, re.ASCII):
        value = int(text)
    elif kind is float and re.fullmatch(r"\s*[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?\s*", text, re.ASCII):
        value = float(text)
    check_value(spec, value, label)
    return value


def from_environment(environ: Mapping[str, str], names: Iterable[str] = tuple(FIELDS)) -> tuple[dict[str, Any], list[str]]:
    """Options set by GRISTMILL_* variables, and a warning for each variable with that prefix that is no option.

    An empty variable counts as unset. Only `names` are read, so a command is not stopped by a variable that is of no use to it.
    """
    values: dict[str, Any] = {}
    warnings = []
    for name in names:
        text = environ.get(env_name(name), "")
        if text != "":
            values[name] = parse_value(FIELDS[name], text, env_name(name))
    known = [*(env_name(name) for name in FIELDS), *KERNELS_ENV]
    for variable in sorted(environ):
        if variable.startswith(ENV_PREFIX) and variable not in known and not variable.startswith(_FOREIGN_ENV):
            whom = "a variable of the kernels" if variable.startswith("GRISTMILL_KERNELS_") else "an option of gristmill"
            warnings.append(f"environment variable {variable} is not {whom}{suggestion(variable, known)}")
    return values, warnings


def suggestion(word: str, known: Iterable[str]) -> str:
    """` (did you mean X?)`, or nothing when no known word is close."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean {close[0]}?)" if close else ""


def make_options(model: str, options: Mapping[str, Any]) -> Options:
    """Options from keyword arguments, for the Python API; an unknown name is an OptionError with a suggestion."""
    for name in options:
        if name not in FIELDS:
            raise OptionError(f"there is no option {name!r}{suggestion(name, FIELDS)}")
    return Options(**{**options, "model": model})
