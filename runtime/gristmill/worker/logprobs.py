"""Natural-log probabilities of prompt and generated tokens: log-softmax of the raw float32 logits, before anything changes them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from gristmill.messages import LogprobBlock, floats, ints
from gristmill.sampling.state import SlotState

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


def prompt_block(
    row: int, state: SlotState, positions: range, hidden: torch.Tensor, logits_of: Callable[[torch.Tensor], torch.Tensor]
) -> LogprobBlock:
    """Score the tokens after `positions`; hidden[i] is the final hidden state at positions[i]."""
    ids = state.ids[positions.start + 1 : positions.stop + 1]
    k = max(state.logprobs, 0)
    values, top_ids, top_values = [], [], []
    for at in range(0, len(ids), _ROWS_AT_ONCE):
        scores = torch.log_softmax(logits_of(hidden[at : at + _ROWS_AT_ONCE]), dim=-1)
        part = torch.from_numpy(ids[at : at + _ROWS_AT_ONCE].astype(np.int64))
        values.append(scores.gather(1, part[:, None])[:, 0])
        if k:
            best = scores.topk(min(k, scores.shape[1]), dim=-1)
            top_values.append(best.values)
            top_ids.append(best.indices)
    return LogprobBlock(
        key=row,
        start=positions.start + 1,
        ids=ints(ids),
        values=floats(torch.cat(values).numpy()),
        k=min(k, scores.shape[1]),
        top_ids=ints(torch.cat(top_ids).numpy()) if k else ints(),
        top_values=floats(torch.cat(top_values).numpy()) if k else floats(),
    )


class RawLogprobs:
    """Log-probabilities of the rows that asked for them, taken before sampling changes the logits."""

    def __init__(self, logits: torch.Tensor, rows: list[tuple[int, int, SlotState]]) -> None:
        """rows: (row of the logits, row of the step, state of the request)."""
        self.rows = rows
        self.scores = torch.log_softmax(logits[[row for row, _, _ in rows]], dim=-1)

    def blocks(self, tokens: np.ndarray, positions: np.ndarray) -> list[LogprobBlock]:
        """One block per row whose token is valid; `tokens` and `positions` by row of the logits."""
        found = []
        for (row, step_row, state), scores in zip(self.rows, self.scores, strict=True):
            token = int(tokens[row])
            if token < 0:
                continue
            k = min(state.logprobs, scores.shape[0])
            block = LogprobBlock(key=step_row, start=int(positions[row]), ids=ints([token]), values=floats([float(scores[token])]), k=k)
            if k:
                best = scores.topk(k)
                block.top_ids, block.top_values = ints(best.indices.numpy()), floats(best.values.numpy())
            found.append(block)
        return found
