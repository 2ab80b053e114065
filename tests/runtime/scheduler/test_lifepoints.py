"""Everything that can happen to a request, at every point of its life: small fixed schedules, one thing more at each moment in turn.

A moment lies between any two actions of the loop (see simulator.FakeIO). The referee looks at all slots after each, every output
is the solo run's (or a beginning of it, where something cut it short), and all slots are back at the end.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import pytest

from gristmill.messages import INVALID_TOKEN, Abort, SamplingParams, Submit, ints
from tests.runtime.scheduler.model import EOS, Case, make_config, solo, with_window
from tests.runtime.scheduler.servers import Event, ScriptedServer
from tests.runtime.scheduler.simulator import FakeIO, run_case

DEPTHS, CHUNKS, MIXED, PAGES = (1, 2, 3), (0, 4), (True, False), (1, 4)
# In CI the long enumerations run every pair of settings at every depth (half of all combinations), `make fuzz` runs all of them.
ALL = os.environ.get("GRISTMILL_TEST_ALL") == "1"
PUT_BACK = "put back"  # retracted or preempted
SHARED = [3, 1, 4, 1, 5]  # the beginning of some prompts


def submit(rid: str, prompt: list[int], seed: int, max_tokens: int, *, priority: int = 0, score_from: int = -1, **sampling: Any) -> Submit:
    params = SamplingParams(seed=seed, max_tokens=max_tokens, **sampling)
    return Submit(rid, ints(prompt), params, priority=priority, logprobs=0, prompt_logprobs_from=score_from)


# Four requests in a pool that holds two and a half of them: one waits for a request slot, one is retracted, one is masked, two penalized.
REQUESTS = (
    submit("0", [*SHARED, 7, 7], 10, 6),
    submit("1", [*SHARED[:4], 2], 11, 6, frequency_penalty=1.0, presence_penalty=1.0),
    submit("2g", [5, 5, 1], 12, 4, score_from=1),
    submit("3", [*SHARED, 6], 13, 3, priority=20, repetition_penalty=1.5, min_tokens=2),
)
ARRIVAL_MOMENTS = (0, 0, 6, 16)
ARRIVALS: tuple[Event, ...] = tuple(zip(ARRIVAL_MOMENTS, REQUESTS))


def small_case(depth: int, chunk: int, mixed: bool, page: int, **settings: Any) -> Case:
    config = {
        "pool_tokens": 20,
        "max_reqs": 3,
        "max_context": 40,
        "page_size": page,
        "chunk_tokens": chunk,
        "mixed_chunks": mixed,
        "lookahead_tokens": 1,
        "new_token_ratio": 0.0,
        "check": False,
        "preempt_threshold": 10 if mixed == bool(chunk) else 0,
    }
    made = make_config(**{**config, **settings})
    if page > 1 and chunk:  # these have sliding-window layers, too
        made = with_window(made, 3, spare=40)
    return Case(seed=0, depth=depth, config=made)


def combinations(half: bool = False) -> list[Any]:
    """Every combination of settings; `half`: those in which any two of chunks, mixed and pages still meet in every way."""
    cases = []
    for depth, chunk, mixed, page in itertools.product(DEPTHS, CHUNKS, MIXED, PAGES):
        if half and (bool(chunk) + mixed + (page > 1)) % 2 == depth % 2:
            continue
        name = f"depth {depth}, {f'chunks of {chunk}' if chunk else 'whole prompts'}, {'mixed' if mixed else 'apart'}, pages of {page}"
        cases.append(pytest.param(small_case(depth, chunk, mixed, page), id=name))
    return cases


some = pytest.mark.parametrize("case", combinations(half=not ALL))
every = pytest.mark.parametrize("case", combinations())


class _Recorder(ScriptedServer):
    """Notes at which moments each request was open."""

    def __init__(self) -> None:
        super().__init__(ARRIVALS)
        self.lives: dict[str, list[int]] = defaultdict(list)

    def at(self, io: FakeIO, moment: str) -> bool:
        said = super().at(io, moment)
        for rid in io.open_rids():
            self.lives[rid].append(io.n_moments)
        return said


def lives(case: Case) -> dict[str, range]:
    """The moments from before each request came until after it was closed, when nothing disturbs."""
    recorder = _Recorder()
    run_case(case, recorder)
    return {rid: range(max(0, moments[0] - 1), moments[-1] + 3) for rid, moments in recorder.lives.items()}


def run_all(case: Case, scripts: Iterable[Sequence[Event]]) -> Counter[str]:
    """Run `case` with each script in addition to the arrivals; a failure names the script."""
    totals: Counter[str] = Counter()
    for script in scripts:
        try:
            totals += run_case(case, ScriptedServer([*ARRIVALS, *script]))
        except Exception as error:
            raise AssertionError(f"with {script}: {error}") from error
        totals["schedules"] += 1
    return totals


def n_moments(case: Case) -> int:
    return run_case(case, ScriptedServer(ARRIVALS))["moments"]


def happened(totals: Counter[str], *names: str) -> None:
    for name in names:
        assert totals[name] > 0, f"no schedule had any {name}: {dict(totals)}"


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("preempt", [0, 10])
def test_the_undisturbed_schedule_has_what_the_others_are_about(depth: int, preempt: int) -> None:
    totals: Counter[str] = Counter()
    for chunk, mixed, page in itertools.product(CHUNKS, MIXED, PAGES):
        what = run_all(small_case(depth, chunk, mixed, page, preempt_threshold=preempt), [()])
        happened(what, "cached_tokens", "masked rows", "penalized", "scored prompts", "preemptions" if preempt else "retractions")
        assert (what["chunks"] > 0) == bool(chunk)
        assert what["closed by length"] == len(REQUESTS)
        assert bool(what["with a window pool"]) == (page > 1 and chunk > 0)
        totals += what
    happened(totals, "prefix_waits")


@some
@pytest.mark.parametrize("reason", ["client", "stop"])
def test_an_abort_at_every_moment(case: Case, reason: str) -> None:
    rids = [request.rid for request in REQUESTS if ALL or reason == "client" or request.rid in ("0", "2g")]
    totals = run_all(case, ([(moment, Abort(rid, reason))] for rid, life in lives(case).items() if rid in rids for moment in life))
    happened(totals, "closed by abort" if reason == "client" else "closed by stop", PUT_BACK, "masked rows", "zombie_rows")
    assert (totals["aborts"] > 0) == (reason == "client")


@some
def test_a_flush_at_every_moment(case: Case) -> None:
    totals = run_all(case, ([(moment, ("flush", {}))] for moment in range(n_moments(case))))
    happened(totals, "stale prefixes kept over a flush", PUT_BACK)
    assert totals["flushes"] == totals["schedules"]
    assert totals["closed by length"] == totals["schedules"] * len(REQUESTS)


@some
def test_a_pause_at_every_moment(case: Case) -> None:
    scripts = []
    for moment in range(n_moments(case)):
        scripts.append([(moment, ("pause", {}))] + ([(moment + 4, ("continue", {}))] if moment % 2 else []))
    totals = run_all(case, scripts)
    happened(totals, PUT_BACK)
    assert totals["pauses"] == totals["schedules"]
    assert totals["closed by length"] == totals["schedules"] * len(REQUESTS)


@some
def test_a_shutdown_at_every_moment(case: Case) -> None:
    totals = run_all(case, ([(moment, ("shutdown", {}))] for moment in range(n_moments(case))))
    happened(totals, "closed by shutting_down", "closed by length")
    assert (totals["results after the end"] > 0) == (case.depth > 1)


@some
def test_a_shutdown_with_drain_at_every_moment(case: Case) -> None:
    drain: tuple[str, dict[str, bool]] = ("shutdown", {"drain": True})
    moments = range(n_moments(case))
    totals = run_all(case, ([(moment, drain)] for moment in moments))
    happened(totals, "closed by shutting_down", "closed by length", PUT_BACK)
    assert not totals["results after the end"]
    totals = run_all(case, ([(moment, drain), (moment + 5, ("shutdown", {}))] for moment in moments[::3]))
    assert (totals["results after the end"] > 0) == (case.depth > 1)


def _finish_at(position: int, request: Submit, how: str) -> tuple[Submit, int | None, str]:
    """`request` so that it ends with the token at output `position`: (request, token forced there, close reason)."""
    if how == "length":
        return msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, max_tokens=position + 1)), None, "length"
    if how == "stop id":
        return msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, stop_token_ids=(6,))), 6, "stop"
    return request, *{"eos": (EOS, "stop"), "invalid": (INVALID_TOKEN, "error")}[how]


@every
@pytest.mark.parametrize("how", ["eos", "stop id", "length", "invalid"])
def test_an_end_at_every_position(case: Case, how: str) -> None:
    totals: Counter[str] = Counter()
    for number, request in enumerate(REQUESTS):
        for position in range(request.sampling.max_tokens):
            ends, token, reason = _finish_at(position, request, how)
            forced = {(request.sampling.seed, n): 1 for n in range(position)}
            if token is not None:
                forced[request.sampling.seed, position] = token
            variant = dataclasses.replace(case, forced=forced)
            arrivals = [*ARRIVALS]
            arrivals[number] = (ARRIVAL_MOMENTS[number], ends)
            tokens, wanted = solo(ends, variant)
            if how == "invalid" or position >= request.sampling.min_tokens:
                assert (len(tokens), wanted) == (position + (how != "invalid"), reason)
            try:
                totals += run_case(variant, ScriptedServer(arrivals))
            except Exception as error:
                raise AssertionError(f"request {request.rid} ends at {position}: {error}") from error
            totals[f"expected {wanted}"] += 1
    happened(
        totals,
        PUT_BACK,
        "masked rows",
        f"expected {reason}",
        "closed by invalid_distribution" if how == "invalid" else f"closed by {reason}",
    )
    # who ends by length is never planned past it; any other end is learnt when the next row is on its way
    assert (totals["zombie_rows"] > 0) == (how != "length" and case.depth > 1)


@pytest.mark.parametrize("page", [1, 3, 4])
@pytest.mark.parametrize("chunk", [0, 1, 3, 4, 5])
@pytest.mark.parametrize("depth", DEPTHS)
def test_prompts_of_every_length_around_chunks_and_pages(depth: int, chunk: int, page: int) -> None:
    totals: Counter[str] = Counter()
    for n_prompt, mixed in itertools.product(range(1, 14), MIXED):
        case = small_case(depth, chunk, mixed, page, pool_tokens=48)
        prompt = [1 + position * 5 % 7 for position in range(n_prompt)]
        submits = [submit(f"{n}", prompt, n, n_out, presence_penalty=1.0) for n, n_out in enumerate((3, 1, 0))]
        submits += [submit("3", [*prompt, 1], 3, 2, score_from=n_prompt), submit("4", prompt[:-1] or [2], 4, 2)]
        arrivals = list(zip((0, 2, 6, 8, 10), submits))
        totals += run_case(case, ScriptedServer(arrivals))
    happened(totals, "cached_tokens", "scored prompts")
    if chunk:
        happened(totals, "chunks")
