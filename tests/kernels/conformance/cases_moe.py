"""Cases of the choice of experts: every number of experts a warp or a vector ends within, ties, groups, biases, and rows with infinities,
NaN or tiny scores. Cases of the sort by expert: from no ids to several chunks of them, ids that are no expert's, all ids alike."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.kernels.conformance.harness import DTYPES, Call, Case, Inputs, Output, anything, short
from tests.kernels.conformance.oracle_moe import Row, blocks_of

NAN, INF = float("nan"), float("inf")
LAYOUTS = ("dense", "padded", "ragged")


def odd_rows(experts: int) -> Tensor:
    """One row per way in which logits can be broken, degenerate or tiny; between them ordinary ones."""
    rows = torch.linspace(-2, 2, experts).repeat(16, 1)
    last = experts - 1
    rows[0, last] = NAN
    rows[1, experts // 2] = INF
    rows[2, [0, last]] = INF
    rows[3, 0], rows[3, last] = INF, NAN
    rows[4] = -INF
    rows[5] = NAN
    rows[6] = -120.0
    rows[7] = -120.0 - torch.arange(experts) * 0.25
    rows[8] = 0.75
    rows[9] = -INF
    rows[9, experts // 3] = 1.0  # one to choose
    rows[10] = 3e38 if experts > 1 else 0.0
    rows[10, 0] = -3e38
    rows[11] = 0.0
    rows[11, : experts // 2] = -0.0
    rows[12] = INF
    rows[13] = torch.arange(experts) % 3
    rows[14, last] = -INF
    rows[15] = 3e38
    rows[15, last // 2] = INF
    return rows


def topk_case(
    op: str,
    name: str,
    logits_of: Callable[[Inputs], Tensor],
    top_k: int,
    dtype: torch.dtype = torch.float32,
    layout: str = "dense",
    *,
    bias_of: Callable[[Inputs], Tensor] | None = None,
    groups: tuple[int, int] = (1, 1),
    scaling: float = 1.0,
    sigmoid: bool = False,
    renormalize: bool = True,
) -> Case:
    def build(inputs: Inputs) -> Call:
        logits = inputs.of(logits_of(inputs), layout, dtype)
        bias = None if bias_of is None else inputs.of(bias_of(inputs))
        tokens = logits.shape[0]
        weights, ids = inputs.blank((tokens, top_k), torch.float32, layout), inputs.blank((tokens, top_k), torch.int32, layout)
        rows = [Row(row, None if bias is None else bias.double().tolist(), sigmoid, *groups) for row in logits.double().tolist()]

        def verify() -> None:
            for t, row in enumerate(rows):
                chosen, got = ids[t].tolist(), weights[t].double().tolist()
                assert row.allows(chosen), f"{op}: row {t} chose {chosen} of {row.choice[:12]}"
                for k, (right, slack) in enumerate(row.weights(chosen, renormalize, scaling)):
                    assert abs(got[k] - right) <= slack, (
                        f"{op}: row {t} weighs {chosen[k]} with {got[k]!r}, expected {right!r} +- {slack:.3g}"
                    )

        options: dict[str, tuple] = {
            "topk_softmax": (renormalize,),
            "topk_sigmoid": (bias, renormalize),
            "grouped_topk": (bias, *groups, scaling, sigmoid, renormalize),
        }
        return Call((weights, ids, logits, *options[op]), [anything(weights), anything(ids)], verify)

    marks = [name, f"k{top_k}", short(dtype), layout, f"g{groups[0]}of{groups[1]}" if groups[0] > 1 else "", "bias" * (bias_of is not None)]
    marks += ["sigmoid" if sigmoid else "softmax", "renorm" * renormalize, f"x{scaling:g}" if scaling != 1 else ""]
    return Case(op, "-".join(mark for mark in marks if mark), build, ("cpu", dtype))


def random_rows(tokens: int, experts: int, scale: float = 2.0) -> Callable[[Inputs], Tensor]:
    return lambda inputs: torch.randn(tokens, experts, generator=inputs.generator) * scale


def random_bias(experts: int, dtype: torch.dtype = torch.float32) -> Callable[[Inputs], Tensor]:
    return lambda inputs: (torch.randn(experts, generator=inputs.generator) * 0.3).to(dtype)


def few_values(tokens: int, experts: int) -> Callable[[Inputs], Tensor]:
    """Many ties."""
    return lambda inputs: torch.randint(-2, 3, (tokens, experts), generator=inputs.generator).float()


def odd_bias(experts: int) -> Tensor:
    bias = torch.zeros(experts)
    bias[0], bias[1], bias[experts - 1], bias[experts // 3] = 9.0, NAN, -INF, INF
    return bias


def plain_cases(op: str) -> list[Case]:
    sigmoid = op == "topk_sigmoid"
    sizes = (1, 2, 7, 8, 31, 60, 64, 65, 128, 129, 160, 256, 257, 384, 512, 513, 1000, 1024)
    cases = []
    for number, experts in enumerate(sizes):
        for dtype, layout in zip(DTYPES, LAYOUTS[number % 3 :] + LAYOUTS[: number % 3]):
            for top_k, renormalize in ((min(8, experts), True), (min(1 + number, experts), False)):
                rows = random_rows(5, experts)
                cases.append(topk_case(op, f"random-{experts}", rows, top_k, dtype, layout, sigmoid=sigmoid, renormalize=renormalize))
        cases.append(topk_case(op, f"ties-{experts}", few_values(4, experts), min(32, experts), sigmoid=sigmoid))
    for experts in (1, 8, 40, 300):
        for dtype in DTYPES:
            for renormalize in (True, False):
                odd = lambda inputs, experts=experts: odd_rows(experts)  # noqa: E731
                top_k = min(experts, 8)
                cases.append(topk_case(op, f"odd-{experts}", odd, top_k, dtype, "padded", sigmoid=sigmoid, renormalize=renormalize))
    cases.append(topk_case(op, "many-8", random_rows(131, 8), 2, torch.bfloat16, "ragged", sigmoid=sigmoid))
    cases.append(topk_case(op, "wide-64", random_rows(6, 64, 60.0), 8, sigmoid=sigmoid))
    return [*cases, topk_case(op, "none", random_rows(0, 8), 2, sigmoid=sigmoid)]


def biased_cases() -> list[Case]:
    cases = []
    for number, experts in enumerate((1, 8, 33, 64, 256, 300, 1024)):
        for dtype, bias_dtype in zip(DTYPES, (torch.float32, torch.bfloat16, torch.float32)):
            bias = random_bias(experts, bias_dtype)
            name = f"biased-{experts}-{short(bias_dtype)}"
            rows, top_k = random_rows(5, experts), min(8, experts)
            layout = LAYOUTS[number % 3]
            cases.append(
                topk_case("topk_sigmoid", name, rows, top_k, dtype, layout, bias_of=bias, sigmoid=True, renormalize=number % 2 == 0)
            )
            for sigmoid in (False, True):
                options = {"bias_of": bias, "sigmoid": sigmoid, "scaling": 2.5, "renormalize": number % 2 == 1}
                cases.append(topk_case("grouped_topk", name, rows, top_k, dtype, layout, **options))
    for experts in (8, 40):
        for dtype in DTYPES[:2]:
            for sigmoid in (False, True):
                odd, odd_biases = lambda inputs, experts=experts: odd_rows(experts), lambda inputs, experts=experts: odd_bias(experts)
                for name, bias in (
                    ("odd", random_bias(experts)),
                    ("odd-bias", odd_biases),
                    ("odd-zero", lambda inputs, n=experts: torch.zeros(n)),
                ):
                    options = {"bias_of": bias, "sigmoid": sigmoid, "groups": (4, 2), "scaling": 2.5}
                    cases.append(topk_case("grouped_topk", f"{name}-{experts}", odd, 6, dtype, **options))
    return cases


def grouped_cases() -> list[Case]:
    shapes = [(8, 2, 1, 2), (16, 4, 2, 4), (60, 3, 2, 6), (64, 8, 3, 6), (160, 8, 3, 6), (256, 8, 4, 8), (24, 24, 5, 3), (96, 32, 7, 8)]
    shapes += [(1024, 32, 5, 32), (512, 1, 1, 10), (130, 26, 26, 9), (12, 6, 2, 6), (160, 5, 1, 32), (70, 7, 3, 8)]
    cases = []
    for number, (experts, groups, kept, top_k) in enumerate(shapes):
        dtype, layout = DTYPES[number % 3], LAYOUTS[(number // 3) % 3]
        for sigmoid, biased, renormalize in ((False, False, False), (True, True, True), (True, False, True), (False, True, False)):
            bias = random_bias(experts, (torch.float32, torch.bfloat16)[number % 2]) if biased else None
            options = {"groups": (groups, kept), "sigmoid": sigmoid, "renormalize": renormalize, "bias_of": bias, "scaling": 1.5}
            cases.append(topk_case("grouped_topk", f"{experts}", random_rows(6, experts), top_k, dtype, layout, **options))
        ties = {"groups": (groups, kept), "sigmoid": True, "bias_of": lambda inputs, n=experts: torch.zeros(n)}
        cases.append(topk_case("grouped_topk", f"ties-{experts}", few_values(4, experts), top_k, **ties))
        cases.append(topk_case("grouped_topk", f"unbiased-ties-{experts}", few_values(4, experts), top_k, groups=(groups, kept)))
    for experts in (8, 40):
        for sigmoid in (False, True):
            odd = lambda inputs, experts=experts: odd_rows(experts)  # noqa: E731
            for top_k, groups in ((2, (2, 1)), (6, (4, 2)), (8, (1, 1)), (8, (8, 5))):
                cases.append(topk_case("grouped_topk", f"odd-{experts}", odd, top_k, groups=groups, sigmoid=sigmoid, scaling=2.5))
    return [*cases, topk_case("grouped_topk", "none", random_rows(0, 8), 2, groups=(2, 1))]


def align_case(
    name: str,
    shape: tuple[int, int],
    num_experts: int,
    block_size: int,
    ids_of: Callable[[Inputs], Tensor] | None = None,
    *,
    layout: str = "dense",
    map_of: Callable[[Inputs], Tensor] | None = None,
    spare: int = 0,
) -> Case:
    """`spare`: how many blocks the outputs are longer than they need to be."""

    def build(inputs: Inputs) -> Call:
        expert_map = None if map_of is None else inputs.of(map_of(inputs).to(torch.int32))
        drawn = torch.randint(0, num_experts, shape, generator=inputs.generator) if ids_of is None else ids_of(inputs)
        ids = inputs.of(drawn.to(torch.int32), layout)
        count = ids.numel()
        entries, owners = blocks_of(ids.flatten().tolist(), None if expert_map is None else expert_map.tolist(), num_experts, block_size)
        room = (count + min(count, num_experts) * (block_size - 1)) // block_size + spare
        places, blocks = inputs.blank((room * block_size,), torch.int32), inputs.blank((room,), torch.int32)
        padded = inputs.blank((1,), torch.int32)
        outputs = [
            Output(places, torch.tensor(entries + [count] * (len(places) - len(entries))), None),
            Output(blocks, torch.tensor(owners + [-1] * (room - len(owners))), None),
            Output(padded, torch.tensor([len(entries)]), None),
        ]
        return Call((places, blocks, padded, ids, expert_map, num_experts, block_size), outputs)

    marks = [name, f"{shape[0]}x{shape[1]}", f"e{num_experts}", f"b{block_size}", layout, f"spare{spare}" if spare else ""]
    return Case("align_block_size", "-".join(mark for mark in marks if mark), build, ("cpu",))


def align_cases() -> list[Case]:
    def between(low: int, high: int, *shape: int) -> Callable[[Inputs], Tensor]:
        return lambda inputs: torch.randint(low, high, shape, generator=inputs.generator)

    def extremes(inputs: Inputs) -> Tensor:
        ids = torch.randint(-3, 12, (40, 4), generator=inputs.generator)
        ids[:6, 0] = torch.tensor([-(2**31), 2**31 - 1, -1, 8, 7, 1 << 30])
        return ids

    def shards(size: int, kept: int) -> Callable[[Inputs], Tensor]:
        """Some of `size` experts live here."""
        return lambda inputs: torch.where(torch.arange(size) % 3 == 1, torch.arange(size) // 3 % kept, -1)

    cases = [align_case("random", *rest) for rest in (
        ((1, 1), 1, 1), ((1, 8), 256, 16), ((64, 8), 256, 16), ((33, 2), 8, 64), ((7, 3), 5, 1), ((128, 8), 64, 32), ((129, 8), 64, 32),
        ((20, 6), 160, 7), ((300, 4), 513, 16), ((100, 8), 1024, 8), ((513, 1), 2, 128),
    )]  # fmt: skip
    cases += [align_case("chunks", (tokens, top_k), experts, 16) for tokens, top_k, experts in (
        (129, 8, 8), (700, 8, 256), (2049, 1, 3), (1300, 2, 1024), (350, 8, 600),
    )]  # fmt: skip
    for layout in ("padded", "ragged"):
        cases += [align_case("strided", (50, 6), 12, 16, layout=layout), align_case("strided", (400, 6), 12, 16, layout=layout)]
    cases += [align_case("no-ids", shape, 8, 16, lambda inputs, shape=shape: torch.zeros(shape)) for shape in ((0, 2), (3, 0))]
    cases += [align_case("no-ids", (0, 4), 8, 16, between(0, 1, 0, 4), spare=3), align_case("random", (30, 4), 20, 16, spare=5)]
    cases += [align_case("one-expert", (tokens, 2), 40, 16, lambda inputs, n=tokens: torch.full((n, 2), 17)) for tokens in (40, 600)]
    cases += [align_case("nowhere", (tokens, 4), 8, 16, lambda inputs, n=tokens: torch.full((n, 4), -1)) for tokens in (9, 500)]
    cases += [align_case("any-id", (tokens, 4), 8, 16, between(-9, 30, tokens, 4)) for tokens in (50, 600)]
    cases.append(align_case("extremes", (40, 4), 8, 16, extremes))
    cases += [align_case("map", (tokens, 4), 10, 16, between(-2, 33, tokens, 4), map_of=shards(30, 10)) for tokens in (50, 600)]
    # a map that names experts that are not, is shorter than the ids, or is empty
    wild = lambda inputs: torch.tensor([3, -1, 99, 0, -5, 3, 2**31 - 1, 7])  # noqa: E731
    cases.append(align_case("wild-map", (60, 3), 8, 4, between(-1, 10, 60, 3), map_of=wild))
    cases.append(align_case("empty-map", (6, 3), 8, 4, map_of=lambda inputs: torch.zeros(0)))
    return cases


def all_cases() -> list[Case]:
    return align_cases() + plain_cases("topk_softmax") + plain_cases("topk_sigmoid") + biased_cases() + grouped_cases()
