"""One behaviour of the scheduler at a time: ends, caching, chunks, retraction, refusals, aborts, controls."""

from __future__ import annotations

import numpy as np
import pytest

from gristmill.errors import ProtocolError
from gristmill.messages import EMIT_NONE, Abort, Control, Done, Result, Stats, ints
from tests.runtime.scheduler.harness import EOS, Harness, expected

DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3])


# --- how a request ends


@DEPTHS
@pytest.mark.parametrize("max_tokens", [1, 2, 7])
def test_max_tokens_ends_with_length_and_plans_no_row_too_many(depth: int, max_tokens: int) -> None:
    h = Harness(depth)
    h.submit("r", 5, max_tokens=max_tokens)
    h.run()
    assert h.tokens["r"] == expected(5, max_tokens)
    assert h.reason("r") == "length"
    assert len(h.steps) == max_tokens
    assert h.scheduler.stats.zombie_rows == 0
    h.assert_idle()


@DEPTHS
@pytest.mark.parametrize("at", [1, 2, 5])
def test_eos_ends_at_any_position_and_the_rows_after_it_are_dropped(depth: int, at: int) -> None:
    h = Harness(depth)
    h.script["r", 5 + at - 1] = EOS
    h.submit("r", 5, max_tokens=50)
    h.run()
    assert h.tokens["r"] == [*expected(5, at - 1), EOS]
    assert h.reason("r") == "stop"
    assert h.scheduler.stats.zombie_rows == depth - 1
    h.assert_idle()


def test_stop_token_ids_end_one_request_and_no_other() -> None:
    h = Harness()
    h.submit("r", 5, max_tokens=9, stop_token_ids=(107,))
    h.submit("s", 5, max_tokens=9)
    h.run()
    assert (h.tokens["r"], h.reason("r")) == ([105, 106, 107], "stop")
    assert (h.tokens["s"], h.reason("s")) == (expected(5, 9), "length")


def test_ignore_eos_goes_on_but_stop_token_ids_still_end() -> None:
    h = Harness()
    h.script["r", 6] = EOS
    h.submit("r", 5, max_tokens=9, ignore_eos=True, stop_token_ids=(108,))
    h.run()
    assert (h.tokens["r"], h.reason("r")) == ([105, EOS, 107, 108], "stop")


def test_min_tokens_holds_off_eos_and_stop_ids_here_and_in_the_worker() -> None:
    h = Harness()
    h.script.update({("r", 5): EOS, ("r", 7): EOS, ("r", 8): EOS})
    h.submit("r", 5, max_tokens=9, min_tokens=3, stop_token_ids=(106,))
    h.run()
    assert h.steps[0].new[0].eos_ids == (EOS, 106)
    assert (h.tokens["r"], h.reason("r")) == ([EOS, 106, EOS, EOS], "stop")


def test_the_end_of_the_context_ends_with_length() -> None:
    h = Harness(2, max_context=12)
    h.submit("r", 5, max_tokens=10**12)
    h.run()
    assert (h.tokens["r"], h.reason("r")) == (expected(5, 7), "length")


@DEPTHS
def test_max_tokens_0_computes_the_prompt_and_emits_nothing(depth: int) -> None:
    h = Harness(depth, chunk_tokens=4)
    h.submit("r", 10, max_tokens=0, score_from=1)
    h.run()
    assert (h.tokens["r"], h.reason("r")) == ([], "length")
    assert [step.q_len.tolist() for step in h.steps] == [[4], [4], [2]]
    assert all(step.emit.tolist() == [EMIT_NONE] for step in h.steps)
    h.assert_idle()


@DEPTHS
def test_an_invalid_distribution_fails_that_request_alone(depth: int) -> None:
    h = Harness(depth)
    h.script["r", 6] = -1
    h.submit("r", 5, max_tokens=9)
    h.submit("s", 5, max_tokens=9)
    h.run()
    assert h.tokens["r"] == expected(5, 1)
    assert (h.reason("r"), h.closed["r"].code, h.closed["r"].status) == ("error", "invalid_distribution", 500)
    assert h.tokens["s"] == expected(5, 9)
    h.assert_idle()


# --- prefix cache


@pytest.mark.parametrize(
    ("page_size", "n_prompt", "cached"), [(1, 16, 15), (1, 33, 32), (16, 16, 0), (16, 32, 16), (16, 33, 32), (16, 64, 48)]
)
def test_a_cached_prompt_still_computes_its_last_token(page_size: int, n_prompt: int, cached: int) -> None:
    h = Harness(page_size=page_size)
    prompt = list(range(1000, 1000 + n_prompt))
    for rid in ("first", "second"):
        h.submit(rid, prompt, max_tokens=8)
        h.run()
    assert h.tokens["second"] == h.tokens["first"] == expected(n_prompt, 8)
    assert (h.closed["first"].cached_tokens, h.closed["second"].cached_tokens) == (0, cached)
    assert h.closed["second"].prompt_tokens == n_prompt
    h.assert_idle()


def test_positions_that_score_the_prompt_are_computed_again() -> None:
    h = Harness()
    prompt = list(range(1000, 1020))
    h.submit("warm", prompt)
    h.run()
    h.submit("scored", prompt, max_tokens=0, score_from=8)
    h.run()
    assert h.closed["scored"].cached_tokens == 7
    assert h.steps[-1].new[0].prompt_logprobs_from == 8


def test_output_is_cached_too_for_the_next_turn_of_a_chat() -> None:
    h = Harness(2)
    h.submit("one", [11, 12, 13], max_tokens=5)
    h.run()
    # the last token's KV was never computed
    h.submit("two", [11, 12, 13, *h.tokens["one"], 14], max_tokens=1)
    h.run()
    assert h.closed["two"].cached_tokens == 3 + 4


def test_namespaces_do_not_share_prefixes() -> None:
    h = Harness()
    for rid, key in (("a", "x"), ("b", "y"), ("c", "x")):
        h.submit(rid, [1, 2, 3, 4, 5], key=key)
        h.run()
    assert [h.closed[rid].cached_tokens for rid in "abc"] == [0, 0, 4]


def test_without_radix_cache_nothing_is_shared_and_all_is_given_back() -> None:
    h = Harness(2, radix_cache=False)
    for rid in "ab":
        h.submit(rid, [1, 2, 3, 4, 5])
        h.run()
    assert h.closed["b"].cached_tokens == 0
    assert h.scheduler.pool.counts().free == 1000


@pytest.mark.parametrize("page_size", [16, 32])
def test_pages_at_every_border_while_all_run_at_once(page_size: int) -> None:
    h = Harness(2, page_size=page_size, max_reqs=40)
    base = list(range(5000, 5024))
    lengths = [(n, shared) for n in (1, 15, 16, 17, 31, 32, 33) for shared in (8, 16, 24)]
    for n, shared in lengths:
        for out in (page_size - n % page_size, page_size - n % page_size + 1):
            h.submit(f"{n}-{shared}-{out}", (base[:shared] + [7] * n)[:n], max_tokens=out)
    h.run()
    for rid, closed in h.closed.items():
        n, _, out = map(int, rid.split("-"))
        assert h.tokens[rid] == expected(n, out)
        assert closed.reason == "length"
    h.assert_idle()


def test_lpm_admits_the_longest_cached_prefix_first() -> None:
    h = Harness(max_reqs=1, policy="lpm")
    h.submit("warm", [1, 2, 3, 4, 5, 6])
    h.run()
    h.submit("cold", 6)
    h.submit("hot", [1, 2, 3, 4, 5, 9])
    h.run()
    assert list(h.closed) == ["warm", "hot", "cold"]


# --- chunks


@DEPTHS
def test_a_long_prompt_is_computed_in_chunks(depth: int) -> None:
    h = Harness(depth, chunk_tokens=16)
    h.submit("r", 50)
    h.run()
    assert [int(step.q_len[0]) for step in h.steps[:4]] == [16, 16, 16, 2]
    assert [int(step.emit[0]) for step in h.steps[:4]] == [0, 0, 0, 1]
    assert h.tokens["r"] == expected(50, 4)
    assert h.scheduler.stats.chunks == 3


def test_mixed_chunks_run_decode_rows_beside_a_prompt() -> None:
    h = Harness(chunk_tokens=8)
    h.submit("r", 4, max_tokens=20)
    h.turn()
    h.submit("s", 40, max_tokens=1)
    h.turn()
    assert h.steps[-1].q_len.tolist() == [1, 8]


def test_without_mixed_chunks_prompts_and_decode_rows_have_their_own_steps_and_neither_starves() -> None:
    h = Harness(chunk_tokens=8, mixed_chunks=False)
    h.submit("r", 4, max_tokens=30)
    h.turn()
    h.submit("s", 200, max_tokens=1)
    h.run()
    kinds = ["prefill" if (step.q_len > 1).any() else "decode" for step in h.steps]
    assert all((step.q_len > 1).all() or (step.q_len == 1).all() for step in h.steps)
    # while the long prompt is computed, the other request still gets a token every few steps
    assert "decode" in kinds[1:11]
    assert h.tokens["r"] == expected(4, 30)


def test_one_step_computes_no_more_prompt_tokens_than_a_chunk() -> None:
    h = Harness(chunk_tokens=32, max_reqs=8)
    for n in range(6):
        h.submit(str(n), 20, max_tokens=1)
    h.run()
    assert max(int(step.q_len[step.q_len > 1].sum()) for step in h.steps) == 32


# --- out of slots


@DEPTHS
def test_retraction_changes_no_output(depth: int) -> None:
    h = Harness(depth, pool_tokens=64, new_token_ratio=0.0)
    for n in range(6):
        h.submit(str(n), 8, max_tokens=30)
    h.run()
    assert all(h.tokens[str(n)] == expected(8, 30) for n in range(6))
    assert h.scheduler.stats.retractions > 0
    h.assert_idle()


def test_the_victim_is_the_one_with_least_output_and_resumes_with_all_it_has() -> None:
    h = Harness(pool_tokens=40, new_token_ratio=0.0)
    h.submit("old", 8, max_tokens=24)
    for _ in range(4):
        h.turn()
    h.submit("young", 8, max_tokens=24)
    h.run()
    assert h.scheduler.stats.retractions > 0
    resumed = [new for step in h.steps for new in step.new if len(new.ids) > new.n_prompt]
    assert resumed
    assert all(new.ids[0] == sum(map(ord, "young")) * 1000 for new in resumed)
    assert all(new.ids[8:].tolist() == expected(8, len(new.ids) - 8) for new in resumed)
    assert h.tokens["young"] == expected(8, 24)
    # what was cached is told as of the first admission
    assert h.closed["young"].cached_tokens == 0


def test_a_low_priority_is_parked_before_a_high_one() -> None:
    h = Harness(pool_tokens=40, new_token_ratio=0.0)
    h.submit("low", 8, max_tokens=24, priority=0)
    for _ in range(4):
        h.turn()
    h.submit("high", 8, max_tokens=24, priority=5)
    h.run()
    assert list(h.closed) == ["high", "low"]
    assert h.tokens["low"] == expected(8, 24)


@DEPTHS
def test_a_sole_request_that_cannot_grow_fails_alone(depth: int) -> None:
    h = Harness(depth, pool_tokens=24)
    h.submit("big", 10, max_tokens=100)
    h.run()
    assert h.tokens["big"] == expected(10, 15)  # 24 slots hold 24 inputs, the 25th token is the last
    closed = h.closed["big"]
    assert (closed.reason, closed.code, closed.status) == ("error", "pool_exceeded", 400)
    assert closed.error is not None
    assert "24" in closed.error
    assert "10 prompt tokens" in closed.error
    h.submit("next", 10)
    h.run()
    assert h.reason("next") == "length"
    h.assert_idle()


def test_after_a_failed_request_the_waiting_ones_start() -> None:
    h = Harness(2, pool_tokens=24, max_reqs=1)
    h.submit("big", 10, max_tokens=100)
    h.submit("small", 10)
    h.run()
    assert (h.reason("big"), h.reason("small")) == ("error", "length")
    h.assert_idle()


# --- refusals


@pytest.mark.parametrize(("n", "code"), [(300, "pool_exceeded"), (512, "context_length_exceeded"), (5000, "context_length_exceeded")])
def test_what_can_never_fit_is_refused_at_once_and_the_next_request_runs(n: int, code: str) -> None:
    h = Harness(pool_tokens=256, max_context=512)
    h.submit("big", n)
    assert (h.reason("big"), h.closed["big"].status, h.closed["big"].code) == ("error", 400, code)
    assert h.closed["big"].prompt_tokens == n
    h.submit("small", 5)
    h.run()
    assert h.reason("small") == "length"


def test_exactly_at_the_limit_of_pool_and_context_works() -> None:
    h = Harness(pool_tokens=256, max_context=512)
    h.submit("pool", 256, max_tokens=1)
    h.run()
    assert h.tokens["pool"] == expected(256, 1)
    h = Harness(pool_tokens=512, max_context=512)
    h.submit("context", 511, max_tokens=1)
    h.run()
    assert h.tokens["context"] == expected(511, 1)


def test_one_request_more_than_max_queued_is_refused_with_503() -> None:
    h = Harness(max_reqs=1, max_queued=2)
    h.submit("running", 5)
    h.turn()
    for rid in ("a", "b", "c"):
        h.submit(rid, 5)
    assert (h.closed["c"].status, h.closed["c"].code) == (503, "queue_full")
    h.run()
    assert {h.reason(rid) for rid in ("running", "a", "b")} == {"length"}


def test_a_second_request_of_the_same_id_is_refused() -> None:
    h = Harness()
    h.submit("r", 5)
    h.submit("r", 5)
    assert h.closed["r"].code == "duplicate_request"


def test_max_context_tells_what_really_fits() -> None:
    stats = Harness(pool_tokens=100, max_context=500).scheduler.snapshot()
    assert (stats.max_context, stats.pool_total) == (100, 100)


# --- order


def test_a_long_prompt_starts_in_its_turn_amid_short_ones() -> None:
    h = Harness(2, pool_tokens=400, max_reqs=4)
    for n in range(10):
        h.submit(f"s{n}", 10, max_tokens=10)
    h.submit("long", 300, max_tokens=1)
    for n in range(10, 40):
        h.submit(f"s{n}", 10, max_tokens=10)
    h.run()
    order = list(h.closed)
    assert order.index("long") <= 15


def test_a_higher_priority_starts_first() -> None:
    h = Harness(max_reqs=1)
    for rid, priority in (("a", 0), ("b", 0), ("c", 7)):
        h.submit(rid, 5, priority=priority)
    h.run()
    assert list(h.closed) == ["c", "a", "b"]


# --- aborts


@DEPTHS
@pytest.mark.parametrize("turns", range(8))
def test_abort_at_every_point_leaves_the_others_and_the_pool_whole(depth: int, turns: int) -> None:
    h = Harness(depth, chunk_tokens=32)
    prompts = {"a": 70, "b": 80, "c": 90, "d": 5, "e": 5}
    for rid, n in prompts.items():
        h.submit(rid, n)
    for _ in range(turns):
        h.turn()
    closed = dict(h.closed)
    for rid in ("c", "d", "c", "nobody"):
        h.say(Abort(rid))
    for rid in "cd":
        assert h.reason(rid) == (closed[rid].reason if rid in closed else "abort")
    told = len(h.tokens["c"])
    h.run()
    assert len(h.tokens["c"]) == told, "tokens came after the abort"
    for rid in "abe":
        assert h.tokens[rid] == expected(prompts[rid], 4)
    h.assert_idle()


def test_abort_after_a_stop_string_closes_with_stop() -> None:
    h = Harness(2)
    h.submit("r", 5, max_tokens=50)
    h.turn()
    h.say(Abort("r", "stop"))
    assert h.reason("r") == "stop"
    h.run()
    assert h.scheduler.stats.aborts == 0
    h.assert_idle()


def test_an_aborted_request_is_computed_no_further() -> None:
    h = Harness(2)
    h.submit("r", 5, max_tokens=450)
    for _ in range(3):
        h.turn()
    h.say(Abort("r"))
    h.run()
    assert len(h.steps) <= 5


# --- controls


@DEPTHS
def test_flush_waits_for_the_steps_in_flight_and_then_forgets_everything(depth: int) -> None:
    h = Harness(depth)
    prompt = list(range(1000, 1020))
    h.submit("warm", prompt)
    h.run()
    h.submit("running", prompt, max_tokens=20)
    h.plan()
    h.say(Control(1, "flush"))
    assert not h.replies
    h.run()
    assert h.replies[0].seq == 1
    assert h.replies[0].result is not None
    assert h.replies[0].result["running"] == 1
    assert h.tokens["running"] == expected(20, 20)
    h.assert_idle()
    h.submit("after", prompt)
    h.run()
    assert h.closed["after"].cached_tokens == 0
    h.submit("again", prompt)
    h.run()
    assert h.closed["again"].cached_tokens == 19


def test_flush_in_a_tight_loop_never_stops_requests_from_ending() -> None:
    h = Harness(2, chunk_tokens=8)
    for n in range(4):
        h.submit(str(n), 30, max_tokens=10)
    for seq in range(200):
        h.say(Control(seq, "flush"))
        h.turn()
        assert h.scheduler.pool.counts().evictable <= 30 * 4
    h.run()
    assert all(h.tokens[str(n)] == expected(30, 10) for n in range(4))
    assert len(h.replies) == 200
    h.assert_idle()


def test_pause_holds_all_planning_until_continue() -> None:
    h = Harness(2)
    h.submit("r", 5)
    h.turn()
    h.say(Control(1, "pause"))
    h.run()
    assert h.replies[0].result == {"paused": True}
    h.submit("s", 5)
    h.run()
    assert not h.closed
    h.say(Control(2, "continue"))
    h.run()
    assert h.replies[1].result == {"paused": False}
    assert (h.reason("r"), h.reason("s")) == ("length", "length")


def test_a_worker_operation_runs_between_steps_and_waits_for_every_rank() -> None:
    h = Harness(2, n_ranks=2)
    h.submit("r", 5)
    h.turn()
    h.say(Control(1, "profile", {"steps": 3}))
    h.run()
    assert [control.args for control in h.scheduler.controls.take_worker_controls()] == [{"steps": 3}]
    h.say(Done(1, 0, result={"file": "x"}))
    h.run()
    assert not h.replies
    assert not h.closed
    h.say(Done(1, 1, error="no profiler"))
    h.run()
    assert h.replies[0].error == "rank 1: no profiler"
    assert h.reason("r") == "length"


def test_an_unknown_operation_is_answered() -> None:
    h = Harness()
    h.say(Control(9, "explode"))
    assert h.replies[0].seq == 9
    assert "explode" in (h.replies[0].error or "")


def test_shutdown_with_drain_finishes_what_is_open_and_takes_nothing_new() -> None:
    h = Harness(2)
    h.submit("r", 5)
    h.turn()
    h.say(Control(1, "shutdown", {"drain": True}))
    h.submit("late", 5)
    assert (h.closed["late"].status, h.closed["late"].code) == (503, "shutting_down")
    assert not h.scheduler.finished
    h.run()
    assert h.reason("r") == "length"
    assert h.scheduler.finished


def test_shutdown_without_drain_closes_everything_at_once_even_during_a_drain() -> None:
    h = Harness(2)
    h.submit("r", 5, max_tokens=100)
    h.turn()
    h.say(Control(1, "shutdown", {"drain": True}))
    h.say(Control(2, "shutdown"))
    assert (h.reason("r"), h.closed["r"].code) == ("error", "shutting_down")
    assert h.scheduler.finished
    assert h.scheduler.controls.shutdowns == [1, 2]


# --- results that break the protocol


def test_results_out_of_order_or_of_another_size_are_fatal() -> None:
    h = Harness()
    h.submit("r", 5)
    step = h.plan()
    assert step is not None
    with pytest.raises(ProtocolError, match="result of step 7 where that of step 1 was due"):
        h.scheduler.apply(step, Result(7, ints([1])))
    h = Harness()
    h.submit("r", 5)
    step = h.plan()
    assert step is not None
    with pytest.raises(ProtocolError, match="2 ids for 1 rows"):
        h.scheduler.apply(step, Result(1, ints([1, 2])))
    h = Harness()
    h.submit("r", 5)
    step = h.plan()
    assert step is not None
    with pytest.raises(ProtocolError, match="token -2 for a row that emits"):
        h.scheduler.apply(step, Result(1, ints([-2])))


def test_a_message_that_nobody_sends_it_is_fatal() -> None:
    with pytest.raises(ProtocolError, match="got a Stats"):
        Harness().say(Stats())


def test_steps_are_consecutive_and_name_each_request_once() -> None:
    h = Harness(2)
    for n in range(5):
        h.submit(str(n), 5 + n)
    h.run()
    assert [step.step for step in h.steps] == list(range(1, len(h.steps) + 1))
    assert all(np.unique(step.req_slot).size == step.req_slot.size for step in h.steps)
