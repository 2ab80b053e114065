"""`python -m gristmill_kernels`: print what the package can do here, as a table or with --json. Commands: bench.py and selftest.py."""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from gristmill_kernels import __version__


def _table_rows(ops: dict[str, Any]) -> Iterator[tuple[str, str, str, str, str]]:
    """(op, device, dtypes, implementation, why); dtypes with the same answer share a row."""
    for name, by_device in ops.items():
        for device, entries in by_device.items():
            answers: dict[tuple[str, str], list[str]] = {}
            for entry in entries:
                answers.setdefault((entry["implementation"] or "none", entry["why"]), []).append(entry["dtype"])
            for (implementation, why), dtypes in answers.items():
                yield name, device, " ".join(dtypes), implementation, why


def format_report(report: dict[str, Any]) -> str:
    """The report of `capabilities()` for a person."""
    native, gpu = report["native"], report["native_gpu"]
    present = [name for name, has in report["cpu_features"].items() if has]
    lines = [
        f"gristmill_kernels {report['version']}  platform {report['platform']}  torch {report['torch']}  python {report['python']}",
        f"native library    {native['isa']}  {native['library']}"
        if native["reason"] is None
        else f"native library    none: {native['reason']}",
        f"GPU library       {' '.join(gpu['archs'])}  {gpu['library']}"
        if gpu["reason"] is None
        else f"GPU library       none: {gpu['reason']}",
        f"ISA levels usable {' '.join(native['usable_levels']) or 'unknown'}",
        f"CPU features      {' '.join(present) or report['host_error'] or 'none known'}",
        f"devices           {' '.join(report['devices'])}",
        *(f"{name}={value}" for name, value in report["environment"].items()),
        "",
    ]
    header = ("op", "device", "dtypes", "implementation", "why")
    rows = [header, *_table_rows(report["ops"])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    return "\n".join(lines)


_COMMANDS = {
    "bench": "times the kernels on this machine",
    "selftest": "compares them with the reference and writes a report for an issue",
}
_PLATFORMS = {"cpu": "CPU", "cuda": "NVIDIA and AMD GPUs", "mps": "Apple GPUs"}


def format_platforms(report: dict[str, Any]) -> str:
    """Which implementations there are per op and platform, as a Markdown table: what docs/kernels-table.md holds."""
    lines = ["| op | " + " | ".join(_PLATFORMS.values()) + " |", "|---" * (1 + len(_PLATFORMS)) + "|"]
    for name, by_device in report["families"].items():
        lines.append(f"| `{name}` | " + " | ".join(", ".join(by_device[device]) for device in _PLATFORMS) + " |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] in _COMMANDS:
        return import_module(f"gristmill_kernels.{arguments[0]}").main(arguments[1:])
    parser = argparse.ArgumentParser(
        prog="python -m gristmill_kernels",
        description="What gristmill_kernels can do on this machine, and why.",
        epilog="Commands: " + "; ".join(f"`{name}` {what}" for name, what in _COMMANDS.items()) + ". Each has a --help of its own.",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--platforms", action="store_true", help="print which implementations there are per op and platform, as Markdown")
    parser.add_argument("--version", action="version", version=f"gristmill_kernels {__version__}")
    options = parser.parse_args(arguments)
    try:
        from gristmill_kernels._capabilities import capabilities

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # the report itself tells of a fallback
            report = capabilities()
    except (ImportError, ValueError) as error:
        print(f"gristmill_kernels: {error}", file=sys.stderr)
        return 1
    try:
        form = format_platforms if options.platforms else format_report
        print(json.dumps(report, indent=2) if options.json else form(report), flush=True)
    except BrokenPipeError:  # the reader, `head` for example, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the flush at exit complains too
        print(f"gristmill_kernels: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
