"""Hypothesis writes the schedules: the same rules as in test_simulator.py, and a failure shrinks to a few readable lines.

GRISTMILL_TEST_EXAMPLES=N draws N new ones instead of the fixed few of CI.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st

from gristmill.messages import Abort, SamplingParams, Submit, ints
from tests.runtime.scheduler.faults import NOTICED, planted
from tests.runtime.scheduler.model import VOCAB, Case, make_config, with_window
from tests.runtime.scheduler.servers import Event, ScriptedServer
from tests.runtime.scheduler.simulator import run_case

N_EXAMPLES = int(os.environ.get("GRISTMILL_TEST_EXAMPLES") or 0)
PROFILE: dict[str, Any] = {
    "database": None,
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "phases": [Phase.explicit, Phase.generate, Phase.shrink],
}
BASES = ([3, 1, 4, 1, 5, 2, 6, 5, 3, 5, 1, 7, 7, 3, 2, 3], [2, 7, 1, 2, 2, 1, 2, 2, 4, 5, 7, 4, 5, 2, 3, 5])


@dataclass(frozen=True)
class Ask:
    """A request whose prompt begins with `shared` tokens of a base that others begin with, too."""

    base: int = 0
    shared: int = 0
    tail: tuple[int, ...] = (1,)
    max_tokens: int = 1
    seed: int = 0
    priority: int = 0
    masked: bool = False
    penalty: float = 0.0
    stop: tuple[int, ...] = ()
    min_tokens: int = 0
    score_from: int = -1

    def submit(self, number: int) -> Submit:
        prompt = [*BASES[self.base][: self.shared], *self.tail]
        sampling = SamplingParams(
            seed=self.seed,
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            stop_token_ids=self.stop,
            frequency_penalty=self.penalty,
            presence_penalty=self.penalty,
            repetition_penalty=1 + self.penalty / 2,
        )
        score_from = self.score_from if self.score_from <= len(prompt) else -1
        rid = f"{number}g" if self.masked else f"{number}"
        return Submit(rid, ints(prompt), sampling, priority=self.priority, logprobs=0, prompt_logprobs_from=score_from)


@dataclass(frozen=True)
class Cut:
    """The abort of an earlier request."""

    number: int
    reason: str = "client"


@dataclass(frozen=True)
class Do:
    """A control."""

    op: str


@dataclass(frozen=True)
class Line:
    """`what` is said `wait` moments after the line before."""

    wait: int
    what: Ask | Cut | Do


def to_events(script: list[Line]) -> list[Event]:
    events: list[Event] = []
    submits: list[Submit] = []
    moment = 0
    for line in script:
        moment += line.wait
        what = line.what
        if isinstance(what, Ask):
            submits.append(what.submit(len(submits)))
            events.append((moment, submits[-1]))
        elif isinstance(what, Cut):
            if submits:
                events.append((moment, Abort(submits[what.number % len(submits)].rid, what.reason)))
        elif what.op == "drain":
            events.append((moment, ("shutdown", {"drain": True})))
        else:
            events.append((moment, (what.op, {})))
    return events


asks = st.builds(
    Ask,
    base=st.integers(0, 1),
    shared=st.integers(0, 16),
    tail=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3).map(tuple),
    max_tokens=st.integers(0, 14),
    seed=st.integers(0, 2),
    priority=st.sampled_from([0, 0, 1, 20]),
    masked=st.booleans(),
    penalty=st.sampled_from([0.0, 0.0, 1.0]),
    stop=st.sampled_from([(), (), (4,)]),
    min_tokens=st.sampled_from([0, 0, 2]),
    score_from=st.sampled_from([-1, -1, 1, 4]),
)
lines = st.builds(
    Line,
    wait=st.integers(0, 12),
    what=st.one_of(
        asks,
        asks,
        st.builds(Cut, st.integers(0, 7), st.sampled_from(["client", "stop"])),
        st.builds(Do, st.sampled_from(["flush", "flush", "pause", "continue", "shutdown", "drain"])),
    ),
)
scripts = st.tuples(st.lists(st.builds(Line, wait=st.integers(0, 3), what=asks), min_size=1, max_size=4), st.lists(lines, max_size=10)).map(
    lambda pair: pair[0] + pair[1]
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    page = draw(st.sampled_from([1, 2, 4]))
    config = make_config(
        pool_tokens=draw(st.sampled_from([24, 32, 200])),
        max_reqs=draw(st.sampled_from([2, 3, 8])),
        max_context=draw(st.sampled_from([300, 24])),
        page_size=page,
        chunk_tokens=draw(st.sampled_from([100, 0, 1, 4])),
        mixed_chunks=draw(st.booleans()),
        radix_cache=draw(st.sampled_from([True, True, True, False])),
        policy=draw(st.sampled_from(["fcfs", "lpm", "dfs-weight", "shortest-prefill", "hrrn"])),
        eviction_policy=draw(st.sampled_from(["lru", "lfu", "fifo", "priority", "slru"])),
        preempt_threshold=draw(st.sampled_from([0, 1, 10])),
        max_prefill_tokens=draw(st.sampled_from([1000, 8])),
        lookahead_tokens=draw(st.sampled_from([1, 4])),
        new_token_ratio=draw(st.sampled_from([0.0, 0.4])),
    )
    window = draw(st.sampled_from([0, 0, 3, 8]))
    if window:
        config = with_window(config, window, draw(st.sampled_from([0, 20])))
    return Case(
        seed=0,
        depth=draw(st.integers(1, 3)),
        config=config,
        eos_permille=draw(st.sampled_from([0, 100])),
        invalid_permille=draw(st.sampled_from([0, 0, 10])),
        min_shared_tokens=draw(st.sampled_from([4, 2])),
    )


def test_written_schedules_keep_every_rule() -> None:
    totals: Counter[str] = Counter()

    @settings(max_examples=N_EXAMPLES or 400, derandomize=not N_EXAMPLES, **PROFILE)
    @given(case=cases(), script=scripts)
    def run(case: Case, script: list[Line]) -> None:
        totals.update(run_case(case, ScriptedServer(to_events(script))))

    run()
    for happened in (
        "retractions",
        "preemptions",
        "prefix_waits",
        "chunks",
        "zombie_rows",
        "aborts",
        "evicted",
        "flushes",
        "pauses",
        "masked rows",
        "penalized",
        "scored prompts",
        "with a window pool",
        "results after the end",
        "closed by stop",
        "closed by length",
        "closed by shutting_down",
    ):
        assert totals[happened] > 0, f"no schedule had any {happened}"


def test_a_fault_shrinks_to_a_schedule_that_can_be_read() -> None:
    def fails(pair: tuple[Case, list[Line]]) -> bool:
        try:
            run_case(pair[0], ScriptedServer(to_events(pair[1])))
        except NOTICED:
            return True
        return False

    with planted("penalty counts are not reset"):
        _, script = find(st.tuples(cases(), scripts), fails, settings=settings(max_examples=1000, derandomize=True, **PROFILE))
    assert len(script) <= 3, script
    assert all(isinstance(line.what, Ask) for line in script), script
