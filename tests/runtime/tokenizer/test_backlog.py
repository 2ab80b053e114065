"""What a slow reader piles up, and what a client that finds the queue full is told."""

from __future__ import annotations

import numpy as np

from gristmill.messages import Text, TokenLogprob, Usage, ints
from gristmill.tokenizer.backlog import MAX_UNREAD_BYTES, Turnover, Unread


def entry(token: int, top: int = 0) -> TokenLogprob:
    return TokenLogprob(token, "a", b"a", -1.0, [TokenLogprob(i, "b", b"b", -2.0) for i in range(top)])


def test_the_unread_texts_of_a_choice_become_one_and_lose_nothing() -> None:
    unread = Unread()
    for i in range(1000):
        unread.add(i % 2, Text("r", chr(97 + i % 26), ints([i]), [entry(i)]))
    unread.add(1, Text("r", "!", finish="stop", stop_reason="x", usage=Usage(3, 500)))
    batch = unread.take()
    assert [index for index, _ in batch] == [0, 1]
    for index, text in batch:
        own = range(index, 1000, 2)
        assert text.text == "".join(chr(97 + i % 26) for i in own) + "!" * index
        assert text.ids.dtype == np.int32 and text.ids.tolist() == list(own) == [logprob.id for logprob in text.logprobs]
    assert (batch[0][1].finish, batch[1][1].finish, batch[1][1].stop_reason, batch[1][1].usage) == (None, "stop", "x", Usage(3, 500))
    assert not unread and unread.size_bytes == 0 and unread.take() == []


def test_logprobs_count_for_what_they_are_and_plain_text_never_reaches_the_bound() -> None:
    unread = Unread()
    for i in range(131072):
        unread.add(0, Text("r", "four", ints([i])))
    assert unread.size_bytes < MAX_UNREAD_BYTES / 4
    for i in range(2000):
        unread.add(0, Text("r", "four", ints([i]), [entry(i, 20)]))
    assert unread.size_bytes > MAX_UNREAD_BYTES


def test_the_advice_follows_the_rate_at_which_choices_end() -> None:
    turnover = Turnover()
    turnover.busy(1000.0)
    for i in range(100):  # four a second
        turnover.ended(1000.0 + i / 4)
    now = 1025.0
    assert 3.9 < turnover.rate(now) < 4.2
    assert [turnover.seconds_until_free(1, now) for _ in range(8)] == [1, 1, 1, 1, 2, 2, 2, 2]  # each behind the one before
    assert turnover.seconds_until_free(32, now) == 10
    assert turnover.seconds_until_free(10_000, now) == turnover.seconds_until_free(1, now) == 60
    for _ in range(10_000):
        turnover.ended(now)
    assert turnover.seconds_until_free(1, now) == 1


def test_that_nothing_ends_is_known_too() -> None:
    turnover = Turnover()
    turnover.busy(0.0)
    assert turnover.seconds_until_free(1, 0.2) == 1  # nothing is known yet
    turnover.nobody_waits()
    assert turnover.seconds_until_free(1, 20.0) == 20
    turnover.nobody_waits()
    assert turnover.seconds_until_free(1, 500.0) == 60


def test_a_flood_of_ends_is_measured_over_the_newest() -> None:
    turnover = Turnover()
    turnover.busy(0.0)
    for i in range(5000):
        turnover.ended(i / 100)
    assert 95 < turnover.rate(50.0) < 105
