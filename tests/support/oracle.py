"""The solo greedy run: transformers on the same float32 weights, one sequence at a time, no cache sharing, no batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

NEAR_TIE = 1e-4  # closer best logits than this may come out in either order


@dataclass(frozen=True)
class GreedyRun:
    """Per generated token: the oracle's best id, its runner-up, and their logits."""

    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    runner_up: tuple[int, ...]
    margin: tuple[float, ...]  # best minus second-best logit


def load_gguf_oracle(path: Path) -> Any:
    """transformers' own reading of a GGUF, dequantised to float32: independent of our loader."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


def greedy(
    model: Any,
    prompt: Sequence[int],
    n_tokens: int,
    eos_ids: Sequence[int] = (),
    *,
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
) -> GreedyRun:
    """`n_tokens` greedy tokens after `prompt`; stops after one of `eos_ids`, like an engine does. Penalties as in the APIs: repetition for
    tokens of prompt and output, presence and frequency for those of the output."""
    from transformers import DynamicCache

    ids, second, margin = [], [], []
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        step = torch.tensor([list(prompt)])
        while len(ids) < n_tokens:
            output = model(input_ids=step, cache=cache, use_cache=True, logits_to_keep=1)
            logits = output.logits[0, -1].float()
            if repetition != 1 or presence or frequency:
                seen = torch.tensor(sorted({*prompt, *ids}))
                logits[seen] = torch.where(logits[seen] > 0, logits[seen] / repetition, logits[seen] * repetition)
                counts = torch.bincount(torch.tensor(ids, dtype=torch.int64), minlength=len(logits))
                logits -= frequency * counts + presence * (counts > 0)
            best = logits.topk(2)
            ids.append(int(best.indices[0]))
            second.append(int(best.indices[1]))
            margin.append(float(best.values[0] - best.values[1]))
            if ids[-1] in eos_ids:
                break
            step = torch.tensor([[ids[-1]]])
    return GreedyRun(tuple(prompt), tuple(ids), tuple(second), tuple(margin))


def check_same(run: GreedyRun, ids: Sequence[int], alternatives: Sequence[dict[int, float]] | None = None) -> int:
    """Assert that `ids` is the oracle's run; returns how many tokens were compared.

    At the first token where the oracle's two best logits are closer than NEAR_TIE the comparison ends: either of the two
    is right there, and `alternatives` (id -> logprob per position), when given, must hold both within 2 * NEAR_TIE.
    """
    for position, (want, second, margin) in enumerate(zip(run.ids, run.runner_up, run.margin)):
        if margin < NEAR_TIE:
            assert position < len(ids) and ids[position] in (want, second), (
                f"token {position}: {ids[position]} is neither {want} nor {second}"
            )
            if alternatives is not None:
                gap = abs(alternatives[position][want] - alternatives[position][second])
                assert gap < 2 * NEAR_TIE, f"token {position}: logits {gap} apart, the oracle's {margin}"
            return position
        assert ids[position] == want, f"token {position} of {list(ids)}: expected {want} (margin {margin:.2g})"
    assert len(ids) == len(run.ids), f"{len(ids)} tokens, the oracle has {len(run.ids)}"
    return len(run.ids)
