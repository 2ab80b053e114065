"""The order of sampling: logit_bias, penalties, mask, min_tokens ban, temperature, top-k, top-p, min-p; keyed by (seed, position).

Everything up to the ban changes the logits in place, the rest is one op of gristmill_kernels.
"""

from __future__ import annotations

import numpy as np
import torch

from gristmill.errors import ProtocolError
from gristmill.messages import Mask
from gristmill.sampling.state import SamplingState, SlotState
from gristmill_kernels import sampling as kernels

_NEG_INF = float("-inf")


def sample(
    logits: torch.Tensor, slots: np.ndarray, positions: np.ndarray, state: SamplingState, allowed: dict[int, np.ndarray] | None = None
) -> np.ndarray:
    """Draw one token per row and count it.

    Args:
        logits: float32 [rows, vocab]; changed.
        slots: int32 [rows], request slot of each row.
        positions: int32 [rows], position of the new token.
        allowed: row -> bool [vocab], from the grammar.

    Returns:
        int32 [rows]; -1 where the row has no valid distribution.
    """
    special = np.flatnonzero(state.special[slots])
    if special.size:
        states = {int(row): state.of(int(slots[row])) for row in special}
        _apply_bias(logits, states)
        _apply_penalties(logits, states)
    if allowed:
        for row, bits in allowed.items():
            logits[row].masked_fill_(~torch.from_numpy(bits), _NEG_INF)
    if special.size:
        _ban(logits, states, positions)
    temperature = state.temperature[slots]
    if not temperature.any():
        ids = kernels.greedy(logits)
    else:
        columns = (temperature, state.top_k[slots], state.top_p[slots], state.min_p[slots], state.seeds[slots], positions)
        ids = kernels.sample(logits, *(torch.from_numpy(column) for column in columns))
    tokens: np.ndarray = ids.numpy()
    if special.size:
        for row, slot in states.items():
            if slot.output_counts is not None and tokens[row] >= 0:
                slot.output_counts[0, int(tokens[row])] += 1
    return tokens


def _apply_bias(logits: torch.Tensor, states: dict[int, SlotState]) -> None:
    counts = np.zeros(logits.shape[0] + 1, np.int32)
    for row, slot in states.items():
        counts[row + 1] = slot.bias_ids.size
    if counts.any():
        ordered = [states[row] for row in sorted(states)]
        ids = torch.from_numpy(np.concatenate([slot.bias_ids for slot in ordered]))
        values = torch.from_numpy(np.concatenate([slot.bias_values for slot in ordered]))
        kernels.apply_logit_bias(logits, torch.from_numpy(counts.cumsum(dtype=np.int32)), ids, values)


def _apply_penalties(logits: torch.Tensor, states: dict[int, SlotState]) -> None:
    for row, slot in states.items():
        if slot.penalties is not None and slot.prompt_mask is not None and slot.output_counts is not None:
            kernels.apply_penalties(logits[row : row + 1], slot.prompt_mask, slot.output_counts, *slot.penalties)


def _ban(logits: torch.Tensor, states: dict[int, SlotState], positions: np.ndarray) -> None:
    for row, slot in states.items():
        if int(positions[row]) - slot.n_prompt < slot.sampling.min_tokens:
            logits[row].index_fill_(0, slot.banned, _NEG_INF)


def allowed_rows(mask: Mask, row_of: dict[int, int], vocab_size: int) -> dict[int, np.ndarray]:
    """The bitmask of each masked row as bool [vocab]. `row_of` maps rows of the step to rows of the logits."""
    words = -(-vocab_size // 32)
    if mask.bits.size != words * mask.rows.size:
        raise ProtocolError(f"Mask of step {mask.step} holds {mask.bits.size} words for {mask.rows.size} rows of {words} words")
    bits = mask.bits.astype("<i4").reshape(-1, words).view(np.uint8)
    unpacked = np.unpackbits(bits, axis=1, bitorder="little")[:, :vocab_size].astype(bool)
    return {row_of[int(row)]: unpacked[i] for i, row in enumerate(mask.rows) if int(row) in row_of}
