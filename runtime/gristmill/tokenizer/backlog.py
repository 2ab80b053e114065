"""What piles up in process A: text that a client has not read yet, and clients that come while the queue is full. No I/O, no clock."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np

from gristmill.messages import Text

MAX_UNREAD_BYTES = 8 << 20  # of one request: far more than the text of any context, about 1,500 tokens with 20 alternatives each
RETRY_AFTER_S = (1, 60)  # shortest and longest advice

_PARTS = 32  # unread texts of a choice that are kept apart: joining is then cheap on average, and so is their memory
_TEXT_BYTES, _ENTRY_BYTES = 512, 256  # what a Text and a TokenLogprob cost beside their arrays and strings, roughly
_WINDOW_S = 60.0
_MOST_ENDS = 1024


def joined(parts: Sequence[Text]) -> Text:
    """Successive texts of one choice as one."""
    if len(parts) == 1:
        return parts[0]
    last = parts[-1]
    return Text(
        last.rid,
        "".join([part.text for part in parts]),
        np.concatenate([part.ids for part in parts]),
        [entry for part in parts for entry in part.logprobs],
        [entry for part in parts for entry in part.prompt_logprobs],
        last.finish,
        last.stop_reason,
        last.usage,
        last.error,
        last.status,
        last.code,
    )


def size_bytes(text: Text) -> int:
    """About how much memory `text` takes."""
    entries = sum(1 + len(entry.top) for entries in (text.logprobs, text.prompt_logprobs) for entry in entries)
    return len(text.text) + text.ids.nbytes + _ENTRY_BYTES * entries


class Unread:
    """The texts of one request that nobody has taken: one per choice, however many came."""

    def __init__(self) -> None:
        self._parts: dict[int, list[Text]] = {}
        self.size_bytes = 0

    def __bool__(self) -> bool:
        return bool(self._parts)

    def add(self, index: int, text: Text) -> None:
        parts = self._parts.setdefault(index, [])
        if not parts:
            self.size_bytes += _TEXT_BYTES
        parts.append(text)
        self.size_bytes += size_bytes(text)
        if len(parts) == _PARTS:
            parts[:] = [joined(parts)]

    def take(self) -> list[tuple[int, Text]]:
        """All of it, in the order in which the choices had something new."""
        batch = [(index, joined(parts)) for index, parts in self._parts.items()]
        self.clear()
        return batch

    def clear(self) -> None:
        self._parts.clear()
        self.size_bytes = 0


class Turnover:
    """How soon there will be places in a full queue, from how many choices ended lately. Each one that ends lets a waiting one start.

    Who is refused gets a place behind those refused before: a thousand clients that are told the same second would only meet again.
    Times are seconds of one clock.
    """

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=_MOST_ENDS)
        self._busy_since = 0.0
        self._promised = 0.0  # places for which refused clients were told to come back

    def busy(self, now: float) -> None:
        """The first choice after a time without any."""
        self._busy_since = now
        self._ends.clear()

    def ended(self, now: float) -> None:
        self._ends.append(now)
        self._promised = max(0.0, self._promised - 1)

    def nobody_waits(self) -> None:
        self._promised = 0.0

    def rate(self, now: float) -> float:
        """Choices that end per second. Always above 0: that none has ended for t seconds says that it is no more than about 1 / t."""
        while self._ends and self._ends[0] < now - _WINDOW_S:
            self._ends.popleft()
        begin = max(now - _WINDOW_S, self._busy_since)
        if len(self._ends) == _MOST_ENDS:
            begin = max(begin, self._ends[0])
        return (len(self._ends) + 1) / max(1.0, now - begin)

    def seconds_until_free(self, places: int, now: float) -> int:
        """When to come back for `places` places, which count as taken from now on."""
        least, most = RETRY_AFTER_S
        rate = self.rate(now)
        self._promised = min(self._promised + places, rate * most + places)
        return min(most, max(least, math.ceil(self._promised / rate)))
