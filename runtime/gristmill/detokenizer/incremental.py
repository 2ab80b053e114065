"""Incremental UTF-8: bytes of one choice in, text out, never a U+FFFD for a character that later bytes complete."""

from __future__ import annotations

import codecs

_new_decoder = codecs.getincrementaldecoder("utf-8")


class IncrementalText:
    """Text of one growing byte sequence.

    Joined results of `feed` and `finish` do not depend on how the bytes were cut. A sequence that stays incomplete becomes one
    U+FFFD at the end, one that turns out invalid one U+FFFD per maximal subpart (what `bytes.decode(errors="replace")` gives).

    Args:
        context: the last bytes of the prompt. A character begun there and completed by the output belongs to the output;
            whatever else the prompt holds, complete or broken, never does.
        strip_space: drop one space at the very start (SentencePiece's prefix space of a text that begins here).
    """

    def __init__(self, context: bytes = b"", *, strip_space: bool = False) -> None:
        self._decoder = _new_decoder(errors="replace")
        self._decoder.decode(context[-16:])
        self._borrowed: bytes = self._decoder.getstate()[0]  # bytes of an incomplete character at the prompt's end
        self._fed = False
        self._strip = strip_space

    def feed(self, raw: bytes) -> str:
        """Characters that `raw` completes."""
        if not raw:
            return ""
        self._fed = True
        if not self._borrowed:
            return self._stripped(self._decoder.decode(raw))
        return self._resolve(raw, final=False)

    def breaks(self, raw: bytes) -> bool:
        """Whether an incomplete character is held back that `raw` does not continue: it becomes U+FFFD before the text of `raw`."""
        held = self._decoder.getstate()[0]
        return bool(held and raw) and not _fits(held, raw[:1])

    def finish(self) -> str:
        """What is left: at most one U+FFFD, for a character whose end never came."""
        if self._borrowed and not self._fed:
            return ""
        return self._resolve(b"", final=True) if self._borrowed else self._decoder.decode(b"", final=True)

    def _resolve(self, raw: bytes, final: bool) -> str:
        """Decode while the first character began in the prompt; its U+FFFD is dropped when not one byte of ours fits it."""
        joined = self._decoder.getstate()[0] + raw
        text = self._decoder.decode(raw, final=final)
        if not text:
            return ""
        borrowed, self._borrowed = self._borrowed, b""
        follows = joined[len(borrowed) : len(borrowed) + 1]
        return self._stripped(text if _fits(borrowed, follows) else text[1:])

    def _stripped(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text[1:] if text[0] == " " else text
        return text


def _fits(begun: bytes, byte: bytes) -> bool:
    """Whether `byte` continues the character that `begun` begins."""
    try:
        _new_decoder().decode(begun + byte)
    except UnicodeDecodeError:
        return False
    return True
