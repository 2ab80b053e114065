"""What became of the requests of a trace, in the numbers that people compare: the same for a simulation and for a real run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass
class Record:
    """One request; times in seconds since the start, negative where it never came to that."""

    t_arrival: float
    prompt_tokens: int
    t_start: float = -1.0  # the first step that computes a part of it was planned; -1 in a real run, which does not see it
    t_first: float = -1.0  # the client has the first token
    t_last: float = -1.0
    output_tokens: int = 0
    cached_tokens: int = 0
    error: str = ""  # code of the refusal or failure
    reason: str = ""  # and its sentence

    @property
    def finished(self) -> bool:
        return self.output_tokens > 0 and not self.error


_TIMES: dict[str, Callable[[Record], float | None]] = {
    "ttft_s": lambda r: r.t_first - r.t_arrival,
    "tpot_s": lambda r: (r.t_last - r.t_first) / (r.output_tokens - 1) if r.output_tokens > 1 else None,
    "e2e_s": lambda r: r.t_last - r.t_arrival,
    "queue_s": lambda r: r.t_start - r.t_arrival if r.t_start >= 0 else None,
}


def summarize(records: Sequence[Record]) -> dict[str, Any]:
    """Throughput, latencies (mean and percentiles over the finished requests) and cache hits."""
    done = [record for record in records if record.finished]
    errors: dict[str, int] = {}
    for record in records:
        if record.error:
            errors[record.error] = errors.get(record.error, 0) + 1
    summary: dict[str, Any] = {"requests": len(records), "finished": len(done), "errors": errors}
    if not done:
        return summary
    duration = max(record.t_last for record in done) - min(record.t_arrival for record in records)
    prompt, output, cached = (sum(getattr(r, f"{kind}_tokens") for r in done) for kind in ("prompt", "output", "cached"))
    summary |= {
        "duration_s": duration,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "output_tokens_per_s": output / duration,
        "total_tokens_per_s": (prompt + output) / duration,
        "cache_hit_rate": cached / prompt,
    }
    for name, time_of in _TIMES.items():
        values = [value for record in done if (value := time_of(record)) is not None]
        if values:
            p50, p90, p99 = np.quantile(values, (0.5, 0.9, 0.99))
            summary[name] = {"mean": float(np.mean(values)), "p50": float(p50), "p90": float(p90), "p99": float(p99)}
    return summary
