"""What the scheduler has to say to the detokenizer since it was last asked, and the small numbers (idx) by which the two name a choice."""

from __future__ import annotations

import numpy as np

from gristmill.messages import Close, Ints, LogprobBlock, Message, Open, Out, Reply, ints


class Outbox:
    """Collects opens, tokens, logprobs, closes and replies.

    An idx is given out again only after the Out that closed it was taken: within one Out the receiver handles opens first.
    """

    def __init__(self) -> None:
        self._free: list[int] = []
        self._n_idx = 0
        self._reset()

    def _reset(self) -> None:
        self._opens: list[Open] = []
        self._idx: list[Ints] = []
        self._tok: list[Ints] = []
        self._logprobs: list[LogprobBlock] = []
        self._closes: list[Close] = []
        self._cached: list[int] = []
        self._replies: list[Reply] = []

    def new_idx(self) -> int:
        """A number that no open choice has."""
        if self._free:
            return self._free.pop()
        self._n_idx += 1
        return self._n_idx - 1

    def open(self, opened: Open) -> None:
        self._opens.append(opened)

    def tokens(self, idx: Ints, tok: Ints) -> None:
        """One token for each of the choices `idx`."""
        if idx.size:
            self._idx.append(idx)
            self._tok.append(tok)

    def logprobs(self, block: LogprobBlock) -> None:
        self._logprobs.append(block)

    def cached(self, idx: int, tokens: int) -> None:
        """How much of its prompt a choice found in the cache; goes with the next Out."""
        self._cached += [idx, tokens]

    def close(self, closed: Close) -> None:
        self._closes.append(closed)

    def reply(self, reply: Reply) -> None:
        self._replies.append(reply)

    def take_out(self) -> Out | None:
        """Everything about choices since the last call as one Out, or None when there is nothing."""
        if not (self._opens or self._idx or self._closes or self._logprobs):
            return None
        out = Out(
            open=self._opens,
            idx=_join(self._idx),
            tok=_join(self._tok),
            logprobs=self._logprobs,
            close=self._closes,
            cached=ints(self._cached),
        )
        self._free += [closed.idx for closed in self._closes]
        replies = self._replies
        self._reset()
        self._replies = replies
        return out

    def take(self) -> list[Message]:
        """Everything since the last call, replies after what came before them."""
        out = self.take_out()
        messages: list[Message] = [out] if out is not None else []
        messages += self._replies
        self._replies = []
        return messages


def _join(parts: list[Ints]) -> Ints:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else ints()
