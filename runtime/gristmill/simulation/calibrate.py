"""Measures a profile: runs an engine on a designed set of requests with tracing on, and fits the cost model to the steps of the trace.

Any trace of an engine says of every step what it asked of the worker and how long it took, so nothing here reaches into the engine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import json
import platform
import tempfile
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import gristmill
from gristmill.engine import Engine
from gristmill.errors import GristmillError
from gristmill.messages import Stats
from gristmill.options import Options
from gristmill.simulation.fit import fit_steps
from gristmill.simulation.profile import FORMAT, HostCost, Profile
from gristmill.simulation.replay import replay
from gristmill.simulation.traces import TraceRequest
from gristmill.worker.work import StepWork

_BATCHES = (1, 2, 4, 8, 16, 32, 64)
_PROMPTS = (24, 100, 400, 1000)


class MeasuredStep(NamedTuple):
    """A step as a trace shows it; all times in seconds."""

    step: int
    work: StepWork
    plan_start: float
    plan_end: float
    start: float  # the worker's
    end: float
    recv_start: float
    recv_end: float
    apply_end: float


@dataclasses.dataclass(frozen=True)
class MeasuredRun:
    """What a trace says: its steps in order, when requests were submitted, when the server had got a text. Times in seconds."""

    steps: list[MeasuredStep]
    submits: list[float]
    texts: list[float]


def calibrate(options: Options, seconds: float, tell: Callable[[str], None] = lambda line: None) -> Profile:
    """A profile of the model, hardware and compute options of `options`, from about `seconds` of measuring.

    Raises:
        GristmillError: the engine cannot be started, or too little could be measured.
    """
    with traced_engine(options) as (engine, trace):
        stats = engine.stats
        rng = np.random.default_rng(0)
        run_phase(engine, next(phases(stats, rng)))  # warms up
        first_step = engine.stats.sent_step + 1
        deadline = time.monotonic() + seconds
        for number, phase in enumerate(phases(stats, rng), start=1):
            run_phase(engine, phase)
            tell(f"phase {number}: {len(phase)} requests, {engine.stats.sent_step + 1 - first_step} steps so far")
            if time.monotonic() >= deadline:
                break
        last_step = engine.stats.sent_step
    run = read_run(trace())
    return fit_profile(run, range(first_step, last_step + 1), stats, options)


@contextlib.contextmanager
def traced_engine(options: Options) -> Iterator[tuple[Engine, Callable[[], dict[str, Any]]]]:
    """An engine that traces, and the function that returns the trace; to be called when the block has ended."""
    trace: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="gristmill-calibrate-") as folder:
        path = Path(folder) / "trace.json"
        with Engine.from_options(dataclasses.replace(options, trace=str(path))) as engine:
            yield engine, lambda: trace
        trace.update(json.loads(path.read_text()))


def run_phase(engine: Engine, phase: Sequence[TraceRequest]) -> None:
    """Run one phase to its end. Raises GristmillError when a request failed."""
    for record in engine.run_on_manager(lambda manager: replay(manager, phase)):
        if record.error:
            why = record.reason or record.error
            raise GristmillError(f"a request of {record.prompt_tokens} prompt tokens failed while calibrating: {why}")


def phases(stats: Stats, rng: np.random.Generator) -> Iterator[list[TraceRequest]]:
    """Endless rounds of small sets of requests, each round in another order, the set of the first round from small to large.

    Together they vary the terms of the cost model independently: alone and in batches, short and long contexts, with and without a prompt
    beside the decode rows.
    """
    context = stats.max_context
    prompts = sorted({min(n, context // 2) for n in (*_PROMPTS, *(n for n in (2000,) if n <= context // 4))})
    batches = [n for n in _BATCHES if n <= stats.max_reqs]
    designs: list[tuple[int, int, bool]] = [(1, n, False) for n in prompts]
    for batch in batches[1:]:
        # a short and a long context for every batch size, as far as the pool has room for it
        fitting = [n for n in prompts if batch * (n + 32) <= stats.pool_total * 3 // 4] or prompts[:1]
        designs += [(batch, fitting[0], False), (batch, fitting[min(len(fitting) - 1, 2)], True)]
    names = itertools.count()
    order = np.arange(len(designs))
    while True:
        for index in order:
            batch, prompt, staggered = designs[int(index)]
            yield _phase(batch, prompt, staggered, context, names, rng)
        order = rng.permutation(len(designs))


def _phase(batch: int, prompt: int, staggered: bool, context: int, names: Iterator[int], rng: np.random.Generator) -> list[TraceRequest]:
    """`batch` requests at once, or `staggered`: their prompts come while others decode, because outputs end at different times."""
    requests = []
    for i in range(batch):
        n_prompt = max(2, int(prompt * rng.uniform(0.7, 1.3)))
        n_output = int(rng.integers(4, 28)) if staggered else 10
        late = 1e-3 * i if staggered and i >= batch // 2 else 0.0
        n_prompt, n_output = min(n_prompt, context - n_output - 1), max(1, min(n_output, context // 4))
        requests.append(TraceRequest(late, n_output, ((f"calibration {next(names)}", n_prompt),)))
    return sorted(requests, key=lambda request: request.t)


# --- from a trace to a profile


def read_run(trace: dict[str, Any]) -> MeasuredRun:
    """The steps of a merged trace (gristmill.trace) that it shows from plan to apply."""
    labels: dict[int, str] = {}
    spans: dict[str, dict[int, tuple[float, float]]] = {name: {} for name in ("plan", "forward", "sample", "recv", "apply")}
    work: dict[int, StepWork] = {}
    submits, texts = [], []
    for event in trace["traceEvents"]:
        name, args = event["name"], event.get("args", {})
        if event["ph"] == "M":
            if name == "process_name":
                labels[event["pid"]] = args["name"].split(" ", 1)[0]
            continue
        role, start = labels.get(event["pid"], ""), event["ts"] / 1e6
        end = start + event.get("dur", 0.0) / 1e6
        if name in spans and "step" in args and role in ("scheduler", "worker0"):
            spans[name][args["step"]] = (start, end)
            if name == "forward" and "prefill_pairs" in args:
                work[args["step"]] = StepWork(*(args[field] for field in StepWork._fields))
        elif role == "server" and name == "submit":
            submits.append(start)
        elif role == "server" and name == "dispatch" and args.get("message") == "Text":
            texts.append(end)
    steps = []
    for number in sorted(work):
        if all(number in spans[name] for name in ("plan", "forward", "recv", "apply")):
            plan, forward, recv = spans["plan"][number], spans["forward"][number], spans["recv"][number]
            end = max(forward[1], spans["sample"].get(number, forward)[1])
            steps.append(MeasuredStep(number, work[number], *plan, forward[0], end, *recv, spans["apply"][number][1]))
    return MeasuredRun(steps, sorted(submits), sorted(texts))


def fit_profile(run: MeasuredRun, numbers: Collection[int], stats: Stats, options: Options) -> Profile:
    """The profile that the steps with these numbers give."""
    steps = [step for step in run.steps if step.step in numbers]
    cost, quality = fit_steps([step.work for step in steps], [step.end - step.start for step in steps])
    caps = stats.caps
    return Profile(
        format=FORMAT,
        model=options.model,
        hardware=f"{_cpu_name()}, {caps.get('threads', 1)} threads, {caps.get('dtype', 'no dtype')}",
        step_s=cost,
        host_s=host_cost(run, numbers),
        pool_tokens=stats.pool_total,
        max_context=stats.max_context,
        page_size=options.page_size,
        made={
            "how": "gristmill simulate --calibrate",
            "date": datetime.date.today().isoformat(),
            "gristmill": gristmill.__version__,
            "fit": quality,
            "largest": {name: max(getattr(step.work, name) for step in steps) for name in StepWork._fields},
        },
    )


def host_cost(run: MeasuredRun, numbers: Collection[int]) -> HostCost:
    """From the moments that show one cost alone: an idle worker's step, a busy worker's next step, a submit to an idle engine."""
    plans, applies, edges, gaps, submits, delivers = [], [], [], [], [], []
    pairs = [(before, step) for before, step in itertools.pairwise(run.steps) if step.step in numbers and before.step == step.step - 1]
    for before, step in pairs:
        plans.append(step.plan_end - step.plan_start)
        applies.append(step.apply_end - step.recv_end)
        if step.recv_start < step.end:  # the scheduler was waiting for it
            edges.append(step.recv_end - step.end)
        if before.end < step.plan_start:
            edges.append(step.start - step.plan_end)
            first = bisect_right(run.submits, before.apply_end)
            if first < len(run.submits) and run.submits[first] < step.plan_start:
                submits.append(step.plan_start - run.submits[first])
        elif step.plan_end < before.end:
            gaps.append(step.start - before.end)
        text = bisect_left(run.texts, step.apply_end)
        if text < len(run.texts):
            delivers.append(run.texts[text] - step.apply_end)
    return HostCost(*(_usual(values) for values in (submits, plans, applies, edges, gaps, delivers)))


def _usual(values: Sequence[float]) -> float:
    """The mean without the largest twentieth: these times add up along the pipeline, but one may have waited for something else."""
    kept = sorted(values)[: -(-len(values) * 19 // 20)]
    return max(0.0, float(np.mean(kept))) if kept else 0.0


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
