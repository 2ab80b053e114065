"""Draws from rows that are broken in every way, amid others: what must come out, whichever implementation draws.

`python -m tests.kernels.broken_distributions LIBRARY SEED OUT` does so with an emulated GPU library and saves the tokens.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import gristmill_kernels as gk
from gristmill_kernels import dispatch
from tests.kernels.conformance.cases_logits import broken_rows

OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
OPTIONS = [{}, {"top_k": 2**30}, {"top_k": 1}, {"top_k": 3}, {"top_p": 0.0}, {"top_p": 1e-9}, {"top_p": 0.5}, {"min_p": 1.0}]
OPTIONS += [{"temperature": float("inf"), "top_k": 5}, {"top_k": 40, "top_p": 0.9, "min_p": 0.05}]
INVALID = torch.tensor([True, True, False, False, True, True, False, False])
LARGE = 50_257


def draw(logits: torch.Tensor, seed: int, options: dict[str, float]) -> torch.Tensor:
    batch = logits.shape[0]
    given = OFF | options
    columns = [torch.full((batch,), given[name], dtype=torch.int32 if name == "top_k" else torch.float32) for name in OFF]
    return gk.sample(logits, *columns, torch.arange(batch) + seed, torch.arange(batch, dtype=torch.int32))


def draw_all(vocab_size: int, repeats: int, seed: int) -> list[torch.Tensor]:
    """Tokens [repeats, 8] of every entry of OPTIONS, having checked that each is one that can be."""
    rows = broken_rows(vocab_size)
    possible = rows > float("-inf")
    logits = rows.repeat(repeats, 1)
    drawn = []
    for options in OPTIONS:
        ids = draw(logits, seed, options).long().view(repeats, len(rows))
        drawn.append(ids)
        if vocab_size == 1:  # a row that names a token of its own may have lost it
            assert ((ids == -1) | (ids == 0)).all(), options
            continue
        assert (ids[:, INVALID] == -1).all(), options
        good = ids[:, ~INVALID]
        assert ((good >= 0) & (good < vocab_size)).all(), options
        assert possible[~INVALID].gather(1, good.T).all(), f"{options}: a token of probability 0"
    return drawn


def main() -> None:
    from tests.kernels.simt import suite

    library, seed, out = sys.argv[1:]
    torch.set_num_threads(1)
    suite.open_emulated(Path(library))
    with dispatch.using("native"):
        drawn = {size: draw_all(size, repeats, int(seed)) for size, repeats in sizes(1).items()}
    torch.save(drawn, out)


def sizes(scale: int) -> dict[int, int]:
    """How often each vocabulary is drawn from."""
    return {1: 4 * scale, 211: 25 * scale, LARGE: scale}


if __name__ == "__main__":
    main()
