"""What tests read out of a merged trace."""

from __future__ import annotations

import json
from pathlib import Path


def spans(trace: Path, name: str) -> dict[int, tuple[float, float]]:
    """Start and end (microseconds) of each span of this name that belongs to a step, by step."""
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["name"] == name]
    return {event["args"]["step"]: (event["ts"], event["ts"] + event["dur"]) for event in events if "step" in event.get("args", {})}


def process_names(trace: Path) -> list[str]:
    events = json.loads(trace.read_text())["traceEvents"]
    return [event["args"]["name"] for event in events if event["name"] == "process_name"]
