"""Stop strings are text, not tokens (CASES 08)."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import pytest

from gristmill.detokenizer.stop import StopHit, StopScanner

# 24 tokens of a made-up reference text, with repeats, a character of several units and line ends
TOKENS = [
    "The",
    " cat",
    "",
    " sat",
    "\n\n",
    "on",
    " the",
    " the",
    "\n",
    "mat",
    ".",
    " Ünder",
    "🙂",
    "🙂",
    " aba",
    "bab",
    "a",
    " is",
    " it",
    " sat",
    "\n\n",
    "E",
    "N",
    "D",
]
TEXT = "".join(TOKENS)


def first_occurrence(text: str, stops: Sequence[str]) -> StopHit | None:
    """The specification, on the whole text."""
    found = [(at, len(stop), stop) for stop in stops if (at := text.find(stop)) >= 0]
    if not found:
        return None
    at, length, stop = min(found)
    return StopHit(at, at + length, stop)


def run(pieces: Sequence[str], stops: Sequence[str], include: bool = False) -> tuple[str, StopHit | None, list[str]]:
    scanner = StopScanner(stops, include)
    shown = []
    for piece in pieces:
        shown.append(scanner.feed(piece))
        if scanner.hit is not None:
            break
    shown.append(scanner.finish() if scanner.hit is None else "")
    return "".join(shown), scanner.hit, shown


def test_every_substring_of_the_text_as_stop() -> None:
    started, cases = time.perf_counter(), 0
    for start in range(len(TEXT)):
        for length in range(1, 7):
            stop = TEXT[start : start + length]
            expected = first_occurrence(TEXT, [stop])
            assert expected is not None
            for include in (False, True):
                text, hit, _ = run(TOKENS, [stop], include)
                assert hit == expected, (stop, include)
                assert text == TEXT[: expected.end if include else expected.start], (stop, include)
                cases += 1
    assert cases > 500
    assert time.perf_counter() - started < 1


def test_of_two_stops_the_one_that_occurs_earlier_ends_the_text() -> None:
    assert run(TOKENS, ["sat", " cat"])[:2] == ("The", StopHit(3, 7, " cat"))
    assert run(TOKENS, [" cat", "sat"])[:2] == ("The", StopHit(3, 7, " cat"))


def test_a_stop_that_starts_earlier_wins_although_it_ends_later() -> None:
    assert run(list("xabcd"), ["bc", "abcd"])[:2] == ("x", StopHit(1, 5, "abcd"))
    assert run(list("xabce"), ["bc", "abcd"])[:2] == ("xa", StopHit(2, 4, "bc"))
    assert run(list("xabc"), ["bc", "abcd"])[:2] == ("xa", StopHit(2, 4, "bc"))  # the text ends while waiting
    assert run(list("xab"), ["ab", "abc"], True)[:2] == ("xab", StopHit(1, 3, "ab"))


def test_random_texts_stops_and_divisions(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(2000):
        text = "".join(rng.choice("ab\n") for _ in range(rng.randrange(1, 25)))
        stops = ["".join(rng.choice("ab\n") for _ in range(rng.randrange(1, 6))) for _ in range(rng.randrange(1, 5))]
        pieces, at = [], 0
        while at < len(text):
            step = rng.randrange(1, 6)
            pieces.append(text[at : at + step])
            at += step
        include = rng.random() < 0.5
        expected = first_occurrence(text, stops)
        shown, hit, _ = run(pieces, stops, include)
        assert hit == expected, (text, stops, pieces)
        assert shown == (text if expected is None else text[: expected.end if include else expected.start]), (text, stops, pieces)


def test_text_is_held_back_only_while_it_may_be_part_of_a_stop() -> None:
    scanner = StopScanner(["END"])
    assert [scanner.feed(piece) for piece in ("aE", "N", "x", "EEN", "DONE")] == ["a", "", "ENx", "E", ""]
    assert scanner.hit == StopHit(5, 8, "END")


def test_nothing_follows_a_hit() -> None:
    scanner = StopScanner(["b"])
    assert scanner.feed("abc") == "a"
    assert scanner.feed("def") == "" and scanner.finish() == ""


@pytest.mark.parametrize("stop", ["a" * 1000 + "b", "ab" * 500 + "c"])
def test_time_is_linear_in_the_text(stop: str) -> None:
    text = stop[:-1] * 60
    started = time.perf_counter()
    assert run([text], [stop])[1] is None
    assert time.perf_counter() - started < 2  # quadratic would be a minute
