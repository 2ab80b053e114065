"""`gristmill simulate`: predict what an engine would do with a trace of requests, or measure the profile that this needs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gristmill.cli.arguments import add_options, options_from
from gristmill.errors import OptionError
from gristmill.logs import setup_logging
from gristmill.options import FIELDS, flag

if TYPE_CHECKING:
    from gristmill.simulation.profile import Profile

_BOTH = frozenset(
    {name for name, spec in FIELDS.items() if spec.metadata["group"] in ("scheduling", "memory")} | {"context_length", "max_queued"}
)
_CALIBRATE_ONLY = frozenset(
    {name for name, spec in FIELDS.items() if spec.metadata["group"] == "compute"} | {"mem_fraction", "revision", "log_level"}
)
_SKIP = frozenset(FIELDS) - _BOTH - _CALIBRATE_ONLY
_EXTRAPOLATION = 2.0  # a prediction that needs steps so many times as large as any that was measured says so


def add_arguments(parser: argparse.ArgumentParser) -> None:
    own = parser.add_argument_group("simulation")
    own.add_argument(
        "--trace", dest="trace_file", metavar="FILE", help="requests to simulate: Azure CSV, Mooncake JSONL or our own (docs/simulate.md)"
    )
    own.add_argument("--profile", metavar="FILE", help="what steps cost (JSON); written by --calibrate, read otherwise")
    own.add_argument("--rate", type=_positive, metavar="X", help="stretch the arrivals to X requests per second on average")
    own.add_argument("--speed", type=_positive, metavar="X", help="let the requests come X times as fast as in the trace")
    own.add_argument("--limit", type=_count, default=0, metavar="N", help="only the first N requests of the trace")
    own.add_argument("--calibrate", metavar="MODEL", help="run MODEL here, measure its steps and write --profile")
    own.add_argument(
        "--calibrate-seconds", type=_positive, default=60.0, metavar="S", help="about how long --calibrate measures (default: 60)"
    )
    own.add_argument("--json", action="store_true", help="print everything as one JSON object, the pool over time included")
    add_options(parser, _SKIP, model=False)
    parser.usage = (
        f"{parser.prog} --trace FILE --profile PROFILE [options]\n       {parser.prog} --calibrate MODEL --profile PROFILE [options]"
    )


def run(arguments: argparse.Namespace) -> int:
    if not arguments.profile:
        raise OptionError("--profile is missing: the file that --calibrate writes and a simulation reads")
    return _calibrate(arguments) if arguments.calibrate else _simulate(arguments)


def _simulate(arguments: argparse.Namespace) -> int:
    if not arguments.trace_file:
        raise OptionError("a simulation needs --trace FILE (or --calibrate MODEL to measure a profile)")
    if arguments.rate and arguments.speed:
        raise OptionError("--rate and --speed both say how fast requests come; give one of them")
    for name in sorted(_CALIBRATE_ONLY):
        if hasattr(arguments, name):
            raise OptionError(f"{flag(name)} goes with --calibrate: a profile is of one model on one hardware already")
    from gristmill.simulation.profile import load_profile
    from gristmill.simulation.simulator import simulate
    from gristmill.simulation.traces import read_trace, rescale

    profile = load_profile(arguments.profile)
    options = options_from(
        arguments,
        skip=_SKIP | _CALIBRATE_ONLY,
        model=profile.model or "profile",
        page_size=profile.page_size,
        pool_tokens=profile.pool_tokens,
    )
    requests = read_trace(arguments.trace_file, arguments.limit)
    requests = rescale(requests, rate=arguments.rate or 0.0, speed=arguments.speed or 0.0)
    summary = simulate(requests, profile, options).summary()
    if arguments.json:
        print(json.dumps({"trace": arguments.trace_file, "profile": arguments.profile, **summary}))
    else:
        print("\n".join(_lines(summary, profile)))
    return 0


def _calibrate(arguments: argparse.Namespace) -> int:
    if arguments.trace_file or arguments.rate or arguments.speed or arguments.limit:
        raise OptionError("--calibrate makes its own requests: --trace, --rate, --speed and --limit go with a simulation")
    options = options_from(arguments, skip=_SKIP, model=arguments.calibrate, log_level="warning")
    target = Path(arguments.profile)
    if target.is_dir() or not target.absolute().parent.is_dir():
        raise OptionError(f"--profile {arguments.profile!r} is not a file that can be written")
    setup_logging(options.log_level, "gristmill")
    from gristmill.simulation.calibrate import calibrate

    profile = calibrate(options, arguments.calibrate_seconds, lambda line: print(line, file=sys.stderr))
    target.write_text(profile.to_json())
    if arguments.json:
        print(profile.to_json(), end="")
        return 0
    cost, fit = profile.step_s, profile.made["fit"]
    print(f"{profile.model} on {profile.hardware}: a step takes")
    for name in cost.__struct_fields__:
        print(f"  {getattr(cost, name) * 1e6:12.4f} us{'' if name == 'constant' else ' per ' + name.replace('_', ' ')}")
    print(f"{fit['steps']} steps, typically {fit['median_error']:.1%} off (9 of 10 within {fit['p90_error']:.1%}); written to {target}")
    return 0


def _lines(summary: dict[str, Any], profile: Profile) -> list[str]:
    """The summary for people."""
    errors = "".join(f", {count} refused: {code}" for code, count in summary["errors"].items())
    lines = [f"{profile.model} on {profile.hardware}: {summary['finished']} of {summary['requests']} requests finished{errors}"]
    if not summary["finished"]:
        return lines
    lines += [
        f"  throughput     {summary['output_tokens_per_s']:10.1f} output tokens/s, {summary['total_tokens_per_s']:.1f} with the prompts, "
        f"over {summary['duration_s']:.1f} s; worker busy {summary['worker_busy']:.0%}",
        f"  {'seconds':14s} {'mean':>10s} {'p50':>10s} {'p90':>10s} {'p99':>10s}",
    ]
    for name, label in (("ttft_s", "first token"), ("tpot_s", "per token"), ("e2e_s", "whole request"), ("queue_s", "in the queue")):
        if name in summary:
            lines.append(f"  {label:14s} " + " ".join(f"{summary[name][kind]:10.4f}" for kind in ("mean", "p50", "p90", "p99")))
    pool = summary["pool"]
    used = [(sample["locked"], sample["locked"] + sample["evictable"]) for sample in pool]
    lines += [
        f"  prefix cache   {summary['cache_hit_rate']:.1%} of the prompt tokens found",
        f"  pool           in use {_mean_most([u[0] for u in used], summary['most_locked'], summary['pool_tokens'])}; "
        f"with what is cached {_mean_most([u[1] for u in used], summary['most_occupied'], summary['pool_tokens'])}",
        f"  requests       running at most {summary['most_running']}, waiting at most {summary['most_waiting']}",
        f"  steps          {summary['steps']}; retractions {summary['retractions']}, preemptions {summary['preemptions']}",
    ]
    measured = profile.made.get("largest")
    for name, value in summary["largest"].items():
        most = measured.get(name) if isinstance(measured, dict) else None
        if isinstance(most, (int, float)) and value > _EXTRAPOLATION * most:
            lines.append(f"  note: steps had up to {value} {name.replace('_', ' ')}; the profile was measured up to {most}")
    return lines


def _mean_most(values: Sequence[float], most: int, total: int) -> str:
    return f"{sum(values) / len(values) / total:.0%} on average, {most / total:.0%} at most"


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e12:
        raise argparse.ArgumentTypeError(f"must be a number greater than 0, not {text}")
    return value


def _count(text: str) -> int:
    value = int(text) if text.isascii() and text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number, at least 1, not {text}")
    return value
