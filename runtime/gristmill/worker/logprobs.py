"""Natural-log probabilities of prompt and generated tokens: log-softmax of the raw float32 logits, before anything changes them.

Scores are tensors of the device; the blocks that go to the scheduler are made of them once they are on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from gristmill.messages import LogprobBlock, floats, ints
from gristmill.sampling.state import SlotState
from gristmill.worker.staging import to_device

_ROWS_AT_ONCE = 64  # prompt positions scored at once; bounds the memory at 64 x vocab floats


def prompt_positions(state: SlotState, start: int, end: int) -> range:
    """Positions in [start, end) of a chunk whose logits score a prompt token that was asked for.

    The row at position q scores ids[q + 1], so scored tokens are [prompt_logprobs_from, n_prompt) and the chunk's last row scores
    ids[kv_len], the first token beyond the chunk.
    """
    first = state.prompt_logprobs_from
    if first < 0:
        return range(0)
    return range(max(start, first - 1, 0), min(end, state.n_prompt - 1))


@dataclass
class PromptScores:
    """Log-probabilities of the tokens after `positions` of one row: [n], and [n, k] of the k best alternatives with their ids."""

    row: int
    start: int
    ids: np.ndarray
    k: int
    tensors: list[torch.Tensor]

    def block(self, arrays: Iterator[np.ndarray]) -> LogprobBlock:
        """`arrays`: what `tensors` hold, on the host."""
        values = next(arrays)
        top_values, top_ids = (next(arrays), next(arrays)) if self.k else (np.empty(0), np.empty(0))
        return LogprobBlock(
            key=self.row,
            start=self.start,
            ids=ints(self.ids),
            values=floats(values),
            k=self.k,
            top_ids=ints(top_ids.reshape(-1)),
            top_values=floats(top_values.reshape(-1)),
        )


def prompt_scores(
    row: int, state: SlotState, positions: range, hidden: torch.Tensor, logits_of: Callable[[torch.Tensor], torch.Tensor]
) -> PromptScores:
    """Score the tokens after `positions`; hidden[i] is the final hidden state at positions[i]."""
    ids = state.ids[positions.start + 1 : positions.stop + 1]
    wanted = to_device([ids.astype(np.int64)], hidden.device.type)[0]
    k = max(state.logprobs, 0)
    values, top_ids, top_values = [], [], []
    for at in range(0, len(ids), _ROWS_AT_ONCE):
        scores = torch.log_softmax(logits_of(hidden[at : at + _ROWS_AT_ONCE]), dim=-1)
        k = min(k, scores.shape[1])
        values.append(scores.gather(1, wanted[at : at + _ROWS_AT_ONCE, None])[:, 0])
        if k:
            best = scores.topk(k, dim=-1)
            top_values.append(best.values)
            top_ids.append(best.indices)
    tensors = [torch.cat(values), *((torch.cat(top_values), torch.cat(top_ids)) if k else ())]
    return PromptScores(row, positions.start + 1, ids, k, tensors)


class RawLogprobs:
    """Log-probabilities of the rows that asked for them, taken before sampling changes the logits."""

    def __init__(self, logits: torch.Tensor, rows: list[tuple[int, int, SlotState]]) -> None:
        """rows: (row of the logits, row of the step, state of the request)."""
        self.rows = rows
        self._at = to_device([np.array([row for row, _, _ in rows], np.int64)], logits.device.type)[0]
        self._scores = torch.log_softmax(logits.index_select(0, self._at), dim=-1)
        self.k = min(max(state.logprobs for _, _, state in rows), logits.shape[1])
        self.tensors: list[torch.Tensor] = []

    def choose(self, tokens: torch.Tensor) -> None:
        """Find the scores of `tokens` (by row of the logits) and the best alternatives."""
        chosen = tokens.index_select(0, self._at).to(torch.int64).clamp_(min=0)
        self.tensors = [self._scores.gather(1, chosen[:, None])[:, 0]]
        if self.k:
            best = self._scores.topk(self.k, dim=-1)
            self.tensors += [best.values, best.indices]

    def blocks(self, tokens: np.ndarray, positions: np.ndarray, arrays: Iterator[np.ndarray]) -> list[LogprobBlock]:
        """One block per row whose token is valid; `tokens` and `positions` by row of the logits, `arrays` as `tensors` on the host."""
        values = next(arrays)
        top_values, top_ids = (next(arrays), next(arrays)) if self.k else (None, None)
        found = []
        for i, (row, step_row, state) in enumerate(self.rows):
            token = int(tokens[row])
            if token < 0:
                continue
            k = min(state.logprobs, self.k)
            block = LogprobBlock(key=step_row, start=int(positions[row]), ids=ints([token]), values=floats([float(values[i])]), k=k)
            if k and top_values is not None and top_ids is not None:
                block.top_ids, block.top_values = ints(top_ids[i, :k]), floats(top_values[i, :k])
            found.append(block)
        return found
