"""A request of several choices is queued whole or refused whole."""

from __future__ import annotations

from typing import Any

import msgspec

from gristmill.messages import Out, SamplingParams, Submit, ints
from gristmill.scheduler.scheduler import Scheduler, SchedulerConfig


def scheduler(max_queued: int) -> Scheduler:
    return Scheduler(SchedulerConfig(pool_tokens=256, max_reqs=1, max_context=64, max_queued=max_queued))


def submit(to: Scheduler, name: str, n: int) -> None:
    for i in range(n):
        to.handle(Submit(f"{name}-{i}", ints([5, 6, 7]), SamplingParams(max_tokens=4), queue_places=0 if i else n))


def refused(to: Scheduler) -> dict[str, Any]:
    outs = [message for message in to.take() if isinstance(message, Out)]
    rids = {opened.idx: opened.rid for out in outs for opened in out.open}
    return {rids[closed.idx]: closed for out in outs for closed in out.close}


def test_all_choices_of_a_request_are_refused_when_they_do_not_all_fit() -> None:
    machine = scheduler(5)
    submit(machine, "a", 3)
    submit(machine, "b", 3)  # there are two places
    submit(machine, "c", 2)
    submit(machine, "d", 1)
    closed = refused(machine)
    assert set(closed) == {"b-0", "b-1", "b-2", "d-0"}
    assert {(close.status, close.code) for close in closed.values()} == {(503, "queue_full")}
    assert "3 of at most 5 requests" in closed["b-2"].error and "5 of at most 5" in closed["d-0"].error
    assert machine.snapshot().waiting == 5


def test_a_refused_request_leaves_the_next_one_its_chance() -> None:
    machine = scheduler(2)
    submit(machine, "a", 3)
    submit(machine, "b", 2)
    assert set(refused(machine)) == {"a-0", "a-1", "a-2"}


def test_a_submit_that_knows_nothing_of_groups_takes_one_place() -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(Submit("r", 0, SamplingParams())), type=dict).get("queue_places") is None  # type: ignore[arg-type]
    machine = scheduler(1)
    for rid in ("a", "b"):
        machine.handle(Submit(rid, ints([5]), SamplingParams(max_tokens=1)))
    assert set(refused(machine)) == {"b"}
