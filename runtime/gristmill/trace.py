"""Chrome/Perfetto traces from several processes: each writes its own part file while it runs, `merge_traces` makes one JSON of them.

A part is JSON lines, so a process that is killed costs at most its last moments, never the other parts.
All times are time.monotonic() seconds, which processes of one machine share.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

_FLUSH_BYTES = 64 << 10
_FLUSH_S = 0.25
_NO_SPAN: AbstractContextManager[None] = nullcontext()
_ORDER = ("server", "engine", "scheduler", "worker", "detokenizer")  # rows in the viewer, top to bottom


class NullTracer:
    """The interface of Tracer when tracing is off: every call returns at once."""

    enabled = False

    def span(self, name: str, **args: Any) -> AbstractContextManager[None]:
        return _NO_SPAN

    def complete(self, name: str, t_start: float, t_end: float, **args: Any) -> None:
        return

    def instant(self, name: str, **args: Any) -> None:
        return

    def counter(self, name: str, **values: float) -> None:
        return

    def flush(self) -> None:
        return

    def close(self) -> None:
        return


NULL_TRACER = NullTracer()


class Tracer(NullTracer):
    """Writes the events of one process (or of one part of the in-process engine) below `trace_dir`; usable from any thread."""

    enabled = True

    def __init__(self, trace_dir: str | os.PathLike[str], process_name: str) -> None:
        safe = re.sub(r"[^A-Za-z0-9_-]", "_", process_name)
        self._lock = threading.Lock()
        self._threads: set[int] = set()
        self._lines: list[str] = []
        self._bytes = 0
        self._flushed = time.monotonic()
        # exclusive names: two tracers of one process (in-process engine) must never share a part
        for attempt in range(1000):
            path = Path(trace_dir) / f"part-{os.getpid()}-{safe}-{attempt}.jsonl"
            try:
                self._file = open(path, "xb", buffering=0)  # noqa: SIM115 (closed by close)
                break
            except FileExistsError:
                continue
        else:
            raise FileExistsError(f"too many trace parts of {process_name} in {trace_dir}")
        self._write({"process": process_name, "os_pid": os.getpid()})
        self.flush()

    @contextmanager
    def span(self, name: str, **args: Any) -> Iterator[None]:
        """Record the time that the with-block takes."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.complete(name, start, time.monotonic(), **args)

    def complete(self, name: str, t_start: float, t_end: float, **args: Any) -> None:
        """Record an interval measured by the caller in time.monotonic() seconds."""
        self._event({"name": name, "ph": "X", "ts": t_start * 1e6, "dur": max(0.0, t_end - t_start) * 1e6}, args)

    def instant(self, name: str, **args: Any) -> None:
        """Record a moment."""
        self._event({"name": name, "ph": "i", "s": "p", "ts": time.monotonic() * 1e6}, args)

    def counter(self, name: str, **values: float) -> None:
        """Record values that the viewer draws as a graph."""
        self._event({"name": name, "ph": "C", "ts": time.monotonic() * 1e6}, values)

    def flush(self) -> None:
        with self._lock:
            self._flush_locked()

    def close(self) -> None:
        with self._lock:
            self._flush_locked()
            self._file.close()

    def _event(self, event: dict[str, Any], args: dict[str, Any]) -> None:
        tid = threading.get_ident()
        event["tid"] = tid
        if args:
            event["args"] = args
        if tid not in self._threads:
            self._threads.add(tid)
            self._write({"thread": tid, "name": threading.current_thread().name})
        self._write(event)

    def _write(self, record: dict[str, Any]) -> None:
        line = json.dumps(record, default=str, separators=(",", ":"))
        with self._lock:
            self._lines.append(line)
            self._bytes += len(line)
            if self._bytes >= _FLUSH_BYTES or time.monotonic() - self._flushed >= _FLUSH_S:
                self._flush_locked()

    def _flush_locked(self) -> None:
        self._flushed = time.monotonic()
        if self._lines and not self._file.closed:
            self._file.write(("\n".join(self._lines) + "\n").encode())
        self._lines.clear()
        self._bytes = 0


def open_tracer(trace_dir: str, process_name: str) -> NullTracer:
    """A Tracer into `trace_dir`, or NULL_TRACER when `trace_dir` is empty."""
    return Tracer(trace_dir, process_name) if trace_dir else NULL_TRACER


def merge_traces(trace_dir: str | os.PathLike[str], out_file: str | os.PathLike[str]) -> int:
    """Merge all parts of `trace_dir` into one Chrome trace; returns the number of events (metadata not counted).

    A cut last line, as a killed process leaves it, is skipped. Times are shifted so that the first event is at 0.
    """
    parts = [part for path in sorted(Path(trace_dir).glob("part-*.jsonl")) if (part := _read_part(path))]
    parts.sort(key=lambda part: (_rank(part[0]["process"]), part[0]["process"]))
    origin = min((event["ts"] for part in parts for event in part if "ts" in event), default=0.0)
    events: list[dict[str, Any]] = []
    count = 0
    for pid, part in enumerate(parts, start=1):
        # one viewer row per part: parts of the in-process engine share an OS pid, so that cannot be the row
        label = f"{part[0]['process']} (pid {part[0]['os_pid']})"
        events.append({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": label}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}})
        tids: dict[int, int] = {}
        for record in part[1:]:
            if "thread" in record:
                tid = tids.setdefault(record["thread"], len(tids) + 1)
                events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": record["name"]}})
            elif "ts" in record:
                record.update(pid=pid, tid=tids.setdefault(record["tid"], len(tids) + 1), ts=round(record["ts"] - origin, 3))
                if "dur" in record:
                    record["dur"] = round(record["dur"], 3)
                events.append(record)
                count += 1
    temporary = Path(f"{os.fspath(out_file)}.tmp{os.getpid()}")
    temporary.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    temporary.replace(out_file)
    return count


def _read_part(path: Path) -> list[dict[str, Any]]:
    records = []
    for line in path.read_bytes().splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            continue  # the line a killed process was writing
    return records if records and "process" in records[0] else []


def _rank(process: str) -> int:
    return next((index for index, prefix in enumerate(_ORDER) if process.startswith(prefix)), len(_ORDER))
