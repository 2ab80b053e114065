"""The simulator against timelines that were worked out by hand, with costs of whole units."""

import pytest

from gristmill.errors import GristmillError
from gristmill.options import Options
from gristmill.simulation.profile import FORMAT, HostCost, Profile, StepCost
from gristmill.simulation.report import Record, summarize
from gristmill.simulation.simulator import simulate
from gristmill.simulation.traces import TraceRequest


def profile(*, host: HostCost = HostCost(), pool_tokens: int = 1000, **cost: float) -> Profile:
    step = StepCost(**{"constant": 1.0, "prefill_token": 0.0, "decode_row": 0.0, "decode_kv_token": 0.0, "prefill_pair": 0.0, **cost})
    return Profile(FORMAT, "m", "paper", step, pool_tokens, 500, host_s=host)


def request(t: float, prompt: int, output: int, name: str = "", **fields: int) -> TraceRequest:
    return TraceRequest(t, output, ((name or f"{t} {prompt}", prompt),), **fields)


def options(**fields: object) -> Options:
    return Options(model="m", **fields)


def test_one_request_takes_its_prompt_step_and_its_decode_steps():
    """Prefill of 10 at 0.1 each: 1 + 1 = 2 s; then two decode steps of 1 s + 0.5 per row."""
    [record] = simulate([request(0, 10, 3)], profile(prefill_token=0.1, decode_row=0.5), options()).records
    assert (record.t_start, record.t_first, record.t_last) == pytest.approx((0, 2, 5))
    assert (record.output_tokens, record.prompt_tokens, record.cached_tokens) == (3, 10, 0)


def test_kv_read_and_attention_pairs_are_paid_for():
    """The chunk of 4 has 4 * 5 / 2 = 10 pairs; the decode steps read 5 and 6 tokens."""
    [record] = simulate([request(0, 4, 3)], profile(prefill_pair=0.1, decode_kv_token=0.01), options()).records
    assert (record.t_first, record.t_last) == pytest.approx((2, 2 + 1.05 + 1.06))


@pytest.mark.parametrize(("overlap", "first"), [(False, 3), (True, 4)])
def test_a_request_that_comes_during_a_step(overlap, first):
    """A runs in [0,1) [1,2) [2,3) [3,4). B comes at 1.5 and is planned at 2: for [2,3), or for [3,4) when [2,3) was sent at 1 already."""
    records = simulate([request(0, 5, 4), request(1.5, 5, 2)], profile(), options(overlap=overlap)).records
    assert (records[0].t_first, records[0].t_last) == pytest.approx((1, 4))
    assert (records[1].t_start, records[1].t_first, records[1].t_last) == pytest.approx((2, first, first + 1))


def test_host_costs_without_overlap():
    """submit 1, plan 2, edge 4, step 1, edge 4, apply 8, deliver 16; the second token: plan, edge, step, edge, apply again."""
    host = HostCost(submit=1, plan=2, apply=8, edge=4, deliver=16)
    [record] = simulate([request(0, 5, 2)], profile(host=host), options(overlap=False)).records
    assert record.t_first == pytest.approx(1 + 2 + 4 + 1 + 4 + 8 + 16)
    assert record.t_last - record.t_first == pytest.approx(2 + 4 + 1 + 4 + 8)


def test_the_most_that_ran_waited_and_filled_the_pool_is_exact():
    """Between two samples of the pool, too: three requests of 10 + 2 tokens in one millisecond, two of them at a time."""
    requests = [request(0, 10, 2, name) for name in "abc"]
    counters = simulate(requests, profile(constant=1e-4), options(max_running=2)).counters
    assert (counters["most_running"], counters["most_waiting"]) == (2, 1)
    assert counters["most_locked"] >= 20 and counters["most_occupied"] >= counters["most_locked"]


def test_a_worker_that_has_its_next_step_pays_the_gap():
    [record] = simulate([request(0, 5, 3)], profile(host=HostCost(gap=0.25)), options()).records
    assert (record.t_first, record.t_last) == pytest.approx((1, 3.5))


def test_overlap_hides_the_host():
    """Steps of 10 s and 2 s of planning: with two steps in flight the worker never waits, with one it does for every step."""
    host = HostCost(plan=2)
    times = {
        overlap: simulate([request(0, 5, 11)], profile(constant=10, host=host), options(overlap=overlap)).records[0]
        for overlap in (True, False)
    }
    assert times[True].t_last - times[True].t_first == pytest.approx(100)
    assert times[False].t_last - times[False].t_first == pytest.approx(120)


def test_a_shared_prefix_is_computed_once():
    """The second prompt of 20 comes when the first is done and shares all of it: only its last token is computed."""
    both = [request(0, 20, 1, "same"), request(5, 20, 1, "same")]
    result = simulate(both, profile(prefill_token=0.1, decode_row=0.1), options())
    assert [record.cached_tokens for record in result.records] == [0, 19]
    assert [record.t_last - record.t_arrival for record in result.records] == pytest.approx([3, 1.1])
    assert result.summary()["cache_hit_rate"] == pytest.approx(19 / 40)
    assert [r.cached_tokens for r in simulate(both, profile(), options(radix_cache=False)).records] == [0, 0]


def test_one_at_a_time_waits_in_the_queue():
    records = simulate([request(0, 5, 2), request(0, 6, 2)], profile(), options(max_running=1, overlap=False)).records
    assert [(r.t_start, r.t_last) for r in records] == [pytest.approx((0, 2)), pytest.approx((2, 4))]
    assert summarize(records)["queue_s"]["mean"] == pytest.approx(1)


def test_a_prompt_goes_in_chunks():
    [record] = simulate([request(0, 25, 1)], profile(), options(chunk_tokens=10)).records
    assert record.t_first == pytest.approx(3)


def test_a_full_pool_retracts():
    """Two requests of 10 + 30 tokens in a pool of 50 cannot both end there at once."""
    result = simulate([request(0, 10, 30), request(0, 11, 30)], profile(pool_tokens=50), options())
    assert result.counters["retractions"] >= 1
    assert [record.output_tokens for record in result.records] == [30, 30]
    assert max(sample["locked"] for sample in result.pool) <= 50


def test_a_higher_priority_preempts():
    """One place: B comes at 2.5 with a priority that beats A's by the threshold, runs first, and A ends as if it had only waited."""
    trace = [request(0, 5, 6), request(2.5, 6, 2, priority=20)]
    result = simulate(trace, profile(), options(max_running=1, preempt_threshold=10))
    assert result.counters["preemptions"] == 1
    first, second = result.records
    assert second.t_last < first.t_last
    assert (first.output_tokens, second.output_tokens) == (6, 2)


def test_what_is_refused_is_counted():
    result = simulate([request(0, 600, 1), request(0, 5, 1)], profile(), options())
    summary = result.summary()
    assert summary["errors"] == {"context_length_exceeded": 1}
    assert (summary["requests"], summary["finished"]) == (2, 1)


def test_the_throughput_and_the_percentiles():
    records = [Record(0.0, 10, 0.0, 1.0, 5.0, 5), Record(1.0, 30, 1.0, 4.0, 11.0, 1, 15), Record(2.0, 30, error="queue_full")]
    summary = summarize(records)
    assert (summary["output_tokens_per_s"], summary["total_tokens_per_s"]) == pytest.approx((6 / 11, 46 / 11))
    assert (summary["ttft_s"]["mean"], summary["ttft_s"]["p90"]) == pytest.approx((2, 2.8))
    assert summary["tpot_s"]["mean"] == pytest.approx(1)
    assert summary["cache_hit_rate"] == pytest.approx(15 / 40)


def test_a_context_beyond_the_profile_is_refused():
    with pytest.raises(GristmillError, match="--context-length 501 is more than the profile's max_context 500"):
        simulate([request(0, 5, 1)], profile(), options(context_length=501))


def test_the_same_trace_gives_the_same_numbers():
    trace = [request(0.3 * i, 20 + 7 * i % 50, 1 + i % 9, f"{i % 4}") for i in range(60)]
    first, second = (simulate(trace, profile(prefill_token=0.01), options(policy="lpm", pool_tokens=400)) for _ in range(2))
    assert first == second


def test_the_pool_samples_stay_few():
    result = simulate([request(0, 5, 400)], profile(constant=0.5), options())
    assert 100 <= len(result.pool) <= 201
    assert [sample["t"] for sample in result.pool] == sorted(sample["t"] for sample in result.pool)
