"""How well the simulator predicts this machine: calibrate on one set of requests, then compare prediction and reality on others.

    python benchmarks/simulate.py [--model smollm2-135m] [--dtype bfloat16] [--threads 1] [--loads 0.5,0.8,1.4] [--seeds 1,2,3]
                                  [--seconds 25] [--trace FILE --length-scale 8] [--out benchmarks/results]

One engine runs everything: a round of calibration, a held-out trace (open loop), a round of calibration, the next trace, and so on. The
prediction for a trace uses the rounds right before and after it and nothing of the trace's own run, so a machine that becomes slower
disturbs both alike. The bars are for the traces of all seeds of a load together; single ones are reported too. Held-out traces are
random (Poisson arrivals, log-normal lengths, half of the prompts behind one of four shared prefixes), or taken from FILE with its
lengths divided. Their rate is a share (--loads) of the throughput that a short first calibration predicts for all requests at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as the server's worker runs; read when torch is loaded

import numpy as np

from gristmill.options import Options
from gristmill.simulation.calibrate import MeasuredRun, calibrate, fit_profile, phases, read_run, run_phase, traced_engine
from gristmill.simulation.profile import Profile
from gristmill.simulation.replay import replay
from gristmill.simulation.report import Record, summarize
from gristmill.simulation.simulator import simulate
from gristmill.simulation.traces import TraceRequest, read_trace, rescale

ROUND_PHASES = 16  # of `phases`; about one of each design
# what is compared, and how far it may be off
BARS = {"output_tokens_per_s": 0.15, "tpot_s mean": 0.15, "ttft_s p90": 0.25}
ALSO = ("total_tokens_per_s", "cache_hit_rate", "tpot_s p90", "ttft_s mean", "ttft_s p50", "e2e_s mean", "e2e_s p90")


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """A held-out trace as it really ran."""

    load: float
    seed: int
    requests: list[TraceRequest]
    records: list[Record]
    steps: range
    load_average: tuple[float, float]


def random_trace(n: int, seed: int) -> list[TraceRequest]:
    """`n` requests, one per second on average."""
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1.0, n))
    requests = []
    for i in range(n):
        own = int(np.clip(rng.lognormal(4.6, 0.8), 4, 1200))
        output = int(np.clip(rng.lognormal(3.2, 0.7), 2, 200))
        parts = ((f"held-out {seed} {i}", own),)
        if rng.random() < 0.5:
            parts = ((f"prefix {seed} {rng.integers(4)}", 160), *parts)
        requests.append(TraceRequest(float(times[i] - times[0]), output, parts))
    return requests


def from_file(path: Path, n: int, seed: int, scale: int) -> list[TraceRequest]:
    """`n` requests of a trace file, further on for each seed, with all lengths divided by `scale`."""
    requests = read_trace(path, n * (seed + 1))[n * seed :]
    scaled = []
    for request in requests:
        parts = tuple((name, max(2, tokens // scale)) for name, tokens in request.parts)
        scaled.append(
            dataclasses.replace(request, t=request.t - requests[0].t, output_tokens=max(1, request.output_tokens // scale), parts=parts)
        )
    return scaled


def together(parts: Sequence[Sequence[Record]]) -> list[Record]:
    """The records of several runs as if one had come after the other."""
    records: list[Record] = []
    start = 0.0
    for part in parts:
        records += [dataclasses.replace(r, t_arrival=r.t_arrival + start, t_first=r.t_first + start, t_last=r.t_last + start) for r in part]
        start = max(record.t_last for record in records)
    return records


def value(summary: dict[str, Any], name: str) -> float:
    key, _, part = name.partition(" ")
    return summary[key][part] if part else summary[key]


def compare(measured: Sequence[Record], predicted: Sequence[Record]) -> dict[str, dict[str, float]]:
    real_summary, guess_summary = summarize(measured), summarize(predicted)
    rows = {}
    for name in (*BARS, *ALSO):
        real, guess = value(real_summary, name), value(guess_summary, name)
        rows[name] = {"measured": round(real, 5), "predicted": round(guess, 5), "error": round(guess / real - 1, 4) if real else 0.0}
    return rows


def step_error(run: MeasuredRun, numbers: Sequence[int], profile: Profile) -> float:
    """Relative error of the summed step times of the held-out run: the part of the error that is the cost model's and the machine's."""
    steps = [step for step in run.steps if step.step in numbers]
    return sum(profile.step_s.seconds(step.work) for step in steps) / sum(step.end - step.start for step in steps) - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--loads", default="0.5,0.8,1.4")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--seconds", type=float, default=25.0, help="about how long each held-out trace takes")
    parser.add_argument("--trace", type=Path, help="held-out requests from this file")
    parser.add_argument("--length-scale", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    options = Options(
        model=arguments.model,
        dtype=arguments.dtype,
        threads=arguments.threads,
        pool_tokens=16384,
        context_length=2048,
        max_running=32,
        chunk_tokens=256,
        log_level="warning",
    )

    def held_out(n: int, seed: int) -> list[TraceRequest]:
        return from_file(arguments.trace, n, seed, arguments.length_scale) if arguments.trace else random_trace(n, seed)

    first = calibrate(options, 40.0)
    burst = [dataclasses.replace(request, t=0.0) for request in held_out(64, 0)]
    capacity = 64 / simulate(burst, first, options).summary()["duration_s"]
    print(f"{first.model} on {first.hardware}: about {capacity:.2f} requests/s at most", flush=True)

    cases = [(float(load), int(seed)) for seed in arguments.seeds.split(",") for load in arguments.loads.split(",")]
    runs: list[Run] = []
    rounds: list[range] = []
    with traced_engine(options) as (engine, trace):
        stats = engine.stats
        phase = phases(stats, np.random.default_rng(0))
        run_phase(engine, next(phase))

        def round_of_calibration() -> None:
            start = engine.stats.sent_step + 1
            for _ in range(ROUND_PHASES):
                run_phase(engine, next(phase))
            rounds.append(range(start, engine.stats.sent_step + 1))

        round_of_calibration()
        for load, seed in cases:
            rate = load * capacity
            requests = rescale(held_out(max(8, round(arguments.seconds * rate)), seed), rate=rate)
            engine.flush()
            start = engine.stats.sent_step + 1
            before = os.getloadavg()[0]
            records = engine.run_on_manager(lambda manager, requests=requests: replay(manager, requests))
            steps = range(start, engine.stats.sent_step + 1)
            runs.append(Run(load, seed, requests, records, steps, (round(before, 2), round(os.getloadavg()[0], 2))))
            print(f"  ran load {load}, seed {seed}: {max(record.t_last for record in records):.0f} s", flush=True)
            round_of_calibration()
    measured = read_run(trace())

    details = []
    predicted: dict[Run, list[Record]] = {}
    for number, case in enumerate(runs):
        profile = fit_profile(measured, {*rounds[number], *rounds[number + 1]}, stats, options)
        predicted[case] = simulate(case.requests, profile, options).records
        details.append(
            {
                "load": case.load,
                "seed": case.seed,
                "requests": len(case.requests),
                "compared": compare(case.records, predicted[case]),
                "step_time_error": round(step_error(measured, case.steps, profile), 4),
                "calibration_drift": [round(step_error(measured, part, profile), 4) for part in rounds[number : number + 2]],
                "load_average": case.load_average,
                "profile": json.loads(profile.to_json()),
            }
        )
    results = []
    for load in dict.fromkeys(case.load for case in runs):
        chosen = [case for case in runs if case.load == load]
        rows = compare(together([case.records for case in chosen]), together([predicted[case] for case in chosen]))
        met = all(abs(rows[name]["error"]) <= bar for name, bar in BARS.items())
        results.append({"load": load, "requests_per_s": round(load * capacity, 4), "compared": rows, "met": met})
        print(
            f"load {load}, {sum(len(case.requests) for case in chosen)} requests at {load * capacity:.2f}/s: {'met' if met else 'MISSED'}"
        )
        for name, row in rows.items():
            bar = f"  (bar {BARS[name]:.0%})" if name in BARS else ""
            print(f"  {name:22s} measured {row['measured']:10.4f}  predicted {row['predicted']:10.4f}  {row['error']:+7.1%}{bar}")
        for detail in details:
            if detail["load"] == load:
                errors = ", ".join(f"{name} {detail['compared'][name]['error']:+.1%}" for name in BARS)
                before, after = detail["calibration_drift"]
                print(f"    seed {detail['seed']}: {errors}; step times {detail['step_time_error']:+.1%}", end="")
                print(f" (calibration before {before:+.1%}, after {after:+.1%}), load average {detail['load_average']}")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    report = {
        "benchmark": "simulate",
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "model": arguments.model,
        "held_out": f"{arguments.trace.name}, lengths divided by {arguments.length_scale}" if arguments.trace else "random",
        "bars": BARS,
        "met": sum(result["met"] for result in results),
        "of": len(results),
        "results": results,
        "traces": details,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    kind = f"-{arguments.trace.stem}" if arguments.trace else ""
    target = arguments.out / f"simulate{kind}-{report['date']}.json"
    target.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{report['met']} of {report['of']} within the bars; wrote {target}")


if __name__ == "__main__":
    main()
