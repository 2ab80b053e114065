"""What sampling holds per request slot: parameters, penalty counts, banned ids. Reset by every NewReq of that slot."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from gristmill.errors import ProtocolError
from gristmill.messages import NewReq, SamplingParams
from gristmill.worker.staging import to_device


@dataclass(slots=True)
class SlotState:
    """`prompt_mask` bool [1, vocab] and `output_counts` int32 [1, vocab] exist only for requests with a penalty."""

    n_prompt: int
    ids: np.ndarray
    sampling: SamplingParams
    banned: torch.Tensor  # int64 ids that min_tokens holds off
    logprobs: int
    prompt_logprobs_from: int
    bias_ids: np.ndarray
    bias_values: np.ndarray
    prompt_mask: torch.Tensor | None = None
    output_counts: torch.Tensor | None = None
    penalties: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None  # presence, frequency, repetition, [1] each


class SamplingState:
    """All slots. The parameters that a kernel takes per row are columns, so that a batch is one gather per parameter."""

    def __init__(self, max_reqs: int, vocab_size: int, device: str = "cpu") -> None:
        self.vocab_size, self.device = vocab_size, device
        self.slots: list[SlotState | None] = [None] * max_reqs
        self.temperature = np.ones(max_reqs, np.float32)
        self.top_k = np.zeros(max_reqs, np.int32)
        self.top_p = np.ones(max_reqs, np.float32)
        self.min_p = np.zeros(max_reqs, np.float32)
        self.seeds = np.zeros(max_reqs, np.int64)
        # anything that needs more than temperature .. min_p: such rows are looked at one by one
        self.special = np.zeros(max_reqs, bool)
        self.wants_logprobs = np.zeros(max_reqs, bool)

    def admit(self, new: NewReq) -> None:
        """Replace everything held for new.req_slot."""
        slot, sampling = new.req_slot, new.sampling
        self.temperature[slot], self.top_p[slot] = sampling.temperature, sampling.top_p
        self.top_k[slot] = min(sampling.top_k, self.vocab_size)
        self.min_p[slot], self.seeds[slot] = sampling.min_p, sampling.seed
        bias = {token: value for token, value in sampling.logit_bias.items() if 0 <= token < self.vocab_size}
        banned = [i for i in new.eos_ids if 0 <= i < self.vocab_size]
        state = SlotState(
            n_prompt=new.n_prompt,
            ids=np.array(new.ids, dtype=np.int32),
            sampling=sampling,
            banned=to_device([np.array(banned, np.int64)], self.device)[0],
            logprobs=new.logprobs,
            prompt_logprobs_from=new.prompt_logprobs_from,
            bias_ids=np.fromiter(bias.keys(), np.int32, len(bias)),
            bias_values=np.fromiter(bias.values(), np.float32, len(bias)),
        )
        if sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1.0:
            self._count(state)
        self.slots[slot] = state
        self.special[slot] = bool(bias) or state.penalties is not None or (sampling.min_tokens > 0 and len(banned) > 0)
        self.wants_logprobs[slot] = new.logprobs >= 0

    def _count(self, state: SlotState) -> None:
        """Mask and counts from all known ids; a resumed request has generated some of them already."""
        sampling, known = state.sampling, state.ids.astype(np.int64).clip(0, self.vocab_size - 1)
        parameters = np.array([sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty], np.float32)
        ids, values = to_device([known, parameters], self.device)
        prompt, output = ids[: state.n_prompt], ids[state.n_prompt :]
        state.prompt_mask = torch.zeros(1, self.vocab_size, dtype=torch.bool, device=self.device)
        state.prompt_mask[0].index_fill_(0, prompt, True)
        state.output_counts = torch.zeros(1, self.vocab_size, dtype=torch.int32, device=self.device)
        state.output_counts[0].index_add_(0, output, torch.ones_like(output, dtype=torch.int32))
        presence, frequency, repetition = values.split(1)
        state.penalties = (presence, frequency, repetition)

    def of(self, slot: int) -> SlotState:
        state = self.slots[slot]
        if state is None:
            raise ProtocolError(f"request slot {slot} was never admitted")
        return state
