"""Sampling as a whole: the distribution it draws from, independence of batch and implementation, and broken rows amid many draws."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import gristmill_kernels as gk
from gristmill_kernels import dispatch
from tests.kernels.conformance.cases_logits import broken_rows

FAMILIES = [family for family in dispatch.families_of("sample") if dispatch.why_not("sample", family, ("cpu", torch.float32)) is None]


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Iterator[str]:
    with dispatch.using(request.param):
        yield request.param


def draws(family: str, number: int) -> int:
    """Plain PyTorch is slow, so it draws a tenth."""
    return number // 10 if family == "reference" else number


def draw(logits: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, **options: float) -> torch.Tensor:
    batch = logits.shape[0]
    given = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | options
    columns = [torch.full((batch,), given[name], dtype=torch.int32 if name == "top_k" else torch.float32) for name in given]
    return gk.sample(logits, *columns, seeds, positions.int())


def chi_square_p(observed: torch.Tensor, probability: torch.Tensor) -> float:
    """Probability of a deviation this large: upper tail of chi-square with len - 1 degrees of freedom."""
    expected = probability.double() * observed.sum()
    statistic = ((observed - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(observed) - 1) / 2).double(), statistic / 2))


@pytest.mark.parametrize("vary", ["positions", "seeds"])
@pytest.mark.parametrize(
    ("options", "survivors"),
    [({}, 13), ({"temperature": 0.6}, 13), ({"top_k": 4}, 4), ({"top_p": 0.7, "temperature": 1.3}, None), ({"min_p": 0.15}, None)],
    ids=["plain", "cold", "top_k", "top_p", "min_p"],
)
def test_tokens_are_drawn_with_their_probability(family: str, vary: str, options: dict, survivors: int | None, seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    row = torch.linspace(0.0, 3.0, 13)[torch.randperm(13, generator=source)]  # gaps keep every border away from rounding
    count = draws(family, 20_000)
    many, one = torch.arange(count) * 7919 + seed, torch.full((count,), seed)
    seeds, positions = (one, torch.arange(count)) if vary == "positions" else (many, torch.full((count,), 5))
    ids = draw(row.expand(count, -1).contiguous(), seeds, positions, **options)
    probability = torch.softmax(row.double() / options.get("temperature", 1.0), 0)
    ranked = probability.argsort(descending=True)
    kept = ranked[: options.get("top_k", 13)]
    if "top_p" in options:
        before = probability[ranked].cumsum(0) - probability[ranked]
        kept = ranked[before < options["top_p"]]
    if "min_p" in options:
        kept = ranked[probability[ranked] >= options["min_p"] * probability.max()]
    assert survivors in (None, len(kept))
    observed = torch.bincount(ids.long(), minlength=13)
    assert observed[kept].sum() == count, "only surviving tokens are drawn"
    assert chi_square_p(observed[kept], probability[kept] / probability[kept].sum()) > 1e-6


def test_a_draw_does_not_depend_on_the_batch(family: str, seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    logits = torch.randn(40, 333, generator=source)
    seeds, positions = torch.randint(-(2**62), 2**62, (40,), generator=source), torch.randint(0, 2**31 - 1, (40,), generator=source)
    together = draw(logits, seeds, positions, top_k=50, top_p=0.9)
    alone = [int(draw(logits[i : i + 1], seeds[i : i + 1], positions[i : i + 1], top_k=50, top_p=0.9)) for i in range(40)]
    assert together.tolist() == alone


def test_padding_the_vocabulary_does_not_change_a_draw(family: str, seed: int) -> None:
    logits = torch.randn(30, 203, generator=torch.Generator().manual_seed(seed))
    padded = torch.nn.functional.pad(logits, (0, 53), value=float("-inf"))
    seeds, positions = torch.arange(30) + seed, torch.arange(30)
    assert draw(logits, seeds, positions, temperature=0.8).tolist() == draw(padded, seeds, positions, temperature=0.8).tolist()


def test_every_implementation_draws_the_same_tokens(family: str, seed: int) -> None:
    logits = torch.randn(300, 151, generator=torch.Generator().manual_seed(seed)) * 2
    seeds, positions = torch.arange(300) + seed, torch.arange(300)
    ids = draw(logits, seeds, positions, temperature=0.9, top_p=0.95)
    with dispatch.using("reference"):
        expected = draw(logits, seeds, positions, temperature=0.9, top_p=0.95)
    # Scores closer than rounding may be told apart differently, which 300 rows do not meet more than once.
    assert (ids != expected).sum() <= 1


@pytest.mark.parametrize("options", [{}, {"top_k": 2**30}, {"top_k": 1}, {"top_p": 0.0}, {"top_p": 1e-9}, {"min_p": 1.0}], ids=str)
def test_broken_rows_are_marked_and_others_drawn_as_if_alone(family: str, options: dict, seed: int) -> None:
    rows = broken_rows(211)
    repeats = draws(family, 10_000) // len(rows)
    logits = rows.repeat(repeats, 1)
    seeds, positions = torch.arange(len(logits)) // len(rows) + seed, torch.arange(len(logits))
    ids = draw(logits, seeds, positions, **options).view(repeats, len(rows)).long()
    invalid = torch.tensor([True, True, False, False, True, True, False, False])
    assert (ids[:, invalid] == -1).all()
    assert ((ids[:, ~invalid] >= 0) & (ids[:, ~invalid] < 211)).all()
    assert (ids[:, 3] == 210).all(), "the only token of a one-hot row"
    assert (ids[:, 7] != 211 // 4).all(), "a token of probability 0"
    good = (~invalid).repeat(repeats)
    assert draw(logits[good], seeds[good], positions[good], **options).tolist() == ids.flatten()[good].tolist()
