"""Incremental UTF-8: the same text however the bytes are cut (CASES 11)."""

from __future__ import annotations

import itertools
import random

import pytest

from gristmill.detokenizer.incremental import IncrementalText

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def cuts(raw: bytes) -> list[list[bytes]]:
    """`raw` in every possible division into pieces."""
    n = len(raw) - 1
    result = []
    for chosen in itertools.product((False, True), repeat=n):
        edges = [0, *(i + 1 for i, cut in enumerate(chosen) if cut), len(raw)]
        result.append([raw[a:b] for a, b in itertools.pairwise(edges)])
    return result


@pytest.mark.parametrize(
    "raw", ["é🙂字x".encode(), b"a\xf0\x9f\x99b", b"\xe5\xad\xff\xc3", b"\xed\xa0\x80\xf0\x9f\x99\x82", b"\xc3\xc3\xa9\x80"]
)
def test_every_division_gives_the_text_of_the_whole(raw: bytes) -> None:
    for pieces in cuts(raw):
        text = IncrementalText()
        joined = "".join(map(text.feed, pieces)) + text.finish()
        assert joined == raw.decode("utf-8", "replace"), pieces


def test_no_replacement_character_before_a_character_is_complete() -> None:
    raw = "é🙂字x".encode()
    for stop in range(len(raw) + 1):
        text = IncrementalText()
        shown = "".join(text.feed(raw[i : i + 1]) for i in range(stop))
        assert REPLACEMENT not in shown
        assert raw[:stop].decode("utf-8", "ignore") == shown
        whole = "é🙂字x".startswith(shown) and len(shown.encode()) == stop
        assert text.finish() == ("" if whole else REPLACEMENT)


def test_random_bytes_in_random_pieces(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(300):
        raw = bytes(rng.choice(b"a\xc3\xa9\xf0\x9f\x99\x82\xe5\xad\x97\xff\x80") for _ in range(rng.randrange(30)))
        text, at, joined = IncrementalText(), 0, ""
        while at < len(raw):
            step = rng.randrange(1, 5)
            joined += text.feed(raw[at : at + step])
            at += step
        assert joined + text.finish() == raw.decode("utf-8", "replace")


@pytest.mark.parametrize(
    ("context", "pieces", "expected"),
    [
        (b"x\xf0\x9f", [b"\x99", b"\x82!"], "🙂!"),  # begun in the prompt, completed by the output: the output's
        (b"x\xf0\x9f", [b"a"], "a"),  # the prompt's broken tail is the prompt's
        (b"x\xf0\x9f", [], ""),
        (b"x\xf0\x9f", [b"\x99"], REPLACEMENT),  # never completed, and one of the bytes is ours
        (b"x\xf0\x9f", [b"\x99", b"a"], REPLACEMENT + "a"),
        (b"x\xef\xbf", [b"\xbd"], REPLACEMENT),  # a real U+FFFD
        (b"x\xef\xbf", [b"\xff"], REPLACEMENT),  # the prompt's is dropped, ours is shown
        ("prompt é".encode(), [b"\x80"], REPLACEMENT),
    ],
)
def test_a_character_cut_by_the_end_of_the_prompt(context: bytes, pieces: list[bytes], expected: str) -> None:
    text = IncrementalText(context)
    assert "".join(map(text.feed, pieces)) + text.finish() == expected


def test_one_space_is_stripped_at_the_start_of_a_text_only() -> None:
    text = IncrementalText(strip_space=True)
    assert [text.feed(piece) for piece in (b"", b" a", b" b")] == ["", "a", " b"]
    text = IncrementalText(strip_space=True)
    assert [text.feed(piece) for piece in (b"a", b" b")] == ["a", " b"]
