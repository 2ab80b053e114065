"""Request traces: when requests arrive, how long prompt and output are, and which prompts begin alike.

Three formats, told apart by their first line (docs/simulate.md): the Azure LLM inference CSV, the Mooncake JSONL, and our own JSONL.
Token ids are made up, the same in every run: equal where the trace says that prompts share a prefix, different elsewhere.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from gristmill.errors import GristmillError
from gristmill.tokenizer.validate import MAX_PRIORITY

MOONCAKE_BLOCK_TOKENS = 512
DEFAULT_VOCAB = 1 << 20
_LOW = 3  # ids below tend to be special
_MOST = 1 << 24  # tokens of one prompt or output; a larger number is a mistake in the file
_AZURE_TIME = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(\.\d+)?(?:Z|\+00:00)?", re.ASCII)
_AZURE_HEADER = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]


@dataclass(frozen=True)
class TraceRequest:
    """One arrival. The prompt is `ids`, or the made-up tokens of `parts`: (name, tokens), where equal names begin alike."""

    t: float  # seconds since the first arrival
    output_tokens: int
    parts: tuple[tuple[str, int], ...] = ()
    ids: tuple[int, ...] = ()
    priority: int = 0

    @property
    def prompt_tokens(self) -> int:
        return len(self.ids) or sum(n for _, n in self.parts)

    def prompt(self, vocab_size: int = DEFAULT_VOCAB) -> np.ndarray:
        """The prompt's int32 ids, below `vocab_size`."""
        if self.ids:
            return np.array(self.ids, np.int32)
        return np.concatenate([_tokens_of(name, n, vocab_size) for name, n in self.parts])


def _tokens_of(name: str, n: int, vocab_size: int) -> np.ndarray:
    """The first `n` tokens of the endless random text that `name` stands for (splitmix64 of a hash of the name plus the position)."""
    seed = 0xCBF29CE484222325  # FNV-1a: str's own hash differs from run to run
    for byte in name.encode():
        seed = (seed ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    z = np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    low = min(_LOW, vocab_size - 1)
    return (z % np.uint64(vocab_size - low)).astype(np.int32) + np.int32(low)


def read_trace(path: str | Path, limit: int = 0) -> list[TraceRequest]:
    """The requests of a trace file in the order of their arrival, the first at t = 0.

    Args:
        limit: read so many requests only (0: all).

    Raises:
        GristmillError: one sentence with file and line.
    """
    requests: list[TraceRequest] = []
    parse: Callable[[str], TraceRequest] | None = None
    number = 0
    try:
        with open(path, encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                line = line.strip()
                if not line:
                    continue
                if parse is None:
                    parse = _parser(line)
                    if parse is _azure:
                        continue  # the header
                request = parse(line)
                # what no other request shares is named after its line
                parts = tuple((name or f"line {number}", n) for name, n in request.parts)
                requests.append(dataclasses.replace(request, parts=parts))
                if len(requests) == limit:
                    break
    except OSError as error:
        raise GristmillError(f"cannot read the trace {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise GristmillError(f"{path} is not a text file") from None
    except ValueError as error:
        raise GristmillError(f"{path}, line {number}: {error}") from None
    if not requests:
        raise GristmillError(f"{path} has no requests")
    first = min(request.t for request in requests)
    return sorted((dataclasses.replace(request, t=request.t - first) for request in requests), key=lambda request: request.t)


def rescale(requests: Sequence[TraceRequest], *, rate: float = 0.0, speed: float = 0.0) -> list[TraceRequest]:
    """The same arrivals `speed` times as fast, or stretched to `rate` requests per second on average (0: as they are)."""
    span = requests[-1].t
    if rate and span == 0:  # all at once: nothing to stretch
        return [dataclasses.replace(request, t=i / rate) for i, request in enumerate(requests)]
    factor = max(len(requests) - 1, 1) / (rate * span) if rate else 1 / speed if speed else 1.0
    return [dataclasses.replace(request, t=request.t * factor) for request in requests]


def _parser(first_line: str) -> Callable[[str], TraceRequest]:
    if not first_line.startswith("{"):
        if [name.strip() for name in first_line.split(",")] == _AZURE_HEADER:
            return _azure
        raise ValueError(f"a trace begins with {','.join(_AZURE_HEADER)} or with a JSON object, not with {_short(first_line)}")
    return _mooncake if "hash_ids" in _object(first_line) else _own


def _azure(line: str) -> TraceRequest:
    fields = [field.strip() for field in line.split(",")]
    if len(fields) != 3:
        raise ValueError(f"{len(fields)} fields where {','.join(_AZURE_HEADER)} are due")
    match = _AZURE_TIME.fullmatch(fields[0])
    if match is None:
        raise ValueError(f"TIMESTAMP must look like 2023-11-16 18:15:46.6805900, not {_short(fields[0])}")
    moment = datetime.datetime.strptime(f"{match[1]} {match[2]}", "%Y-%m-%d %H:%M:%S").replace(tzinfo=datetime.timezone.utc)
    counts = []
    for name, text in zip(_AZURE_HEADER[1:], fields[1:]):
        counts.append(_count(name, int(text) if re.fullmatch(r"\d{1,12}", text, re.ASCII) else text))
    return TraceRequest(moment.timestamp() + float(match[3] or 0), counts[1], (("", counts[0]),))


def _mooncake(line: str) -> TraceRequest:
    record = _Record(line, {"timestamp", "input_length", "output_length", "hash_ids"})
    n = _count("input_length", record.need("input_length"))
    hashes = record.need("hash_ids")
    if type(hashes) is not list or any(type(block) is not int for block in hashes):
        raise ValueError(f"hash_ids must be a list of integers, not {_short(hashes)}")
    if len(hashes) != -(-n // MOONCAKE_BLOCK_TOKENS):
        raise ValueError(f"{len(hashes)} hash_ids do not cover input_length {n} in blocks of {MOONCAKE_BLOCK_TOKENS}")
    parts = tuple((f"block {block}", min(MOONCAKE_BLOCK_TOKENS, n - i * MOONCAKE_BLOCK_TOKENS)) for i, block in enumerate(hashes))
    return TraceRequest(record.time("timestamp") / 1000, _count("output_length", record.need("output_length")), parts)


def _own(line: str) -> TraceRequest:
    record = _Record(line, {"t", "prompt", "output", "shared", "priority"})
    prompt, shared, priority = record.need("prompt"), record.get("shared", []), record.get("priority", 0)
    output = _count("output", record.need("output"))
    if type(priority) is not int or abs(priority) > MAX_PRIORITY:
        raise ValueError(f"priority must be an integer from {-MAX_PRIORITY} to {MAX_PRIORITY}, not {_short(priority)}")
    if type(prompt) is list:
        if not prompt or any(type(token) is not int or not 0 <= token < 1 << 31 for token in prompt):
            raise ValueError(f"prompt must be a number of tokens or a list of token ids, not {_short(prompt)}")
        if shared:
            raise ValueError("a prompt that is a list of ids has no shared parts")
        return TraceRequest(record.time("t"), output, ids=tuple(prompt), priority=priority)
    n = _count("prompt", prompt)
    parts = []
    for part in shared if type(shared) is list else _bad_shared(shared):
        if type(part) is not list or len(part) != 2 or type(part[0]) is not str or not part[0]:
            _bad_shared(shared)
        parts.append((f"shared {part[0]}", _count("the tokens of a shared part", part[1])))
    own = n - sum(tokens for _, tokens in parts)
    if own < 0:
        raise ValueError(f"the shared parts have {n - own} tokens, more than the prompt's {n}")
    return TraceRequest(record.time("t"), output, (*parts, *([("", own)] if own else [])), priority=priority)


def _bad_shared(shared: object) -> NoReturn:
    raise ValueError(f'shared must be a list of ["name", tokens] pairs, not {_short(shared)}')


class _Record:
    """One JSON line with known fields."""

    def __init__(self, line: str, known: set[str]) -> None:
        self._fields = _object(line)
        unknown = sorted(self._fields.keys() - known)
        if unknown:
            raise ValueError(f"{_short(unknown[0])} is not a field of this format; they are {', '.join(sorted(known))}")

    def get(self, name: str, default: Any) -> Any:
        return self._fields.get(name, default)

    def need(self, name: str) -> Any:
        if name not in self._fields:
            raise ValueError(f"{name} is missing")
        return self._fields[name]

    def time(self, name: str) -> float:
        value = self.need(name)
        if type(value) not in (int, float) or not 0 <= value < 1e15:
            raise ValueError(f"{name} must be a number, at least 0, not {_short(value)}")
        return float(value)


def _object(line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not valid JSON: {str(error)[:80]}") from None
    if not isinstance(value, dict):
        raise ValueError(f"a JSON {type(value).__name__} where an object is due")
    return value


def _count(name: str, value: object) -> int:
    if type(value) is not int or not 1 <= value <= _MOST:
        raise ValueError(f"{name} must be an integer from 1 to {_MOST}, not {_short(value)}")
    return value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
