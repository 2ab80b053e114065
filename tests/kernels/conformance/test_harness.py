"""The conformance suite on trial: wrong implementations of every op must be caught, and a new one must join by registering."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
from torch.library import Library

from gristmill_kernels import dispatch
from gristmill_kernels.reference import activation, attention, gemm, indices, kvcache, norm, rope, sampling
from gristmill_kernels.schema import OPS
from tests.kernels.conformance import oracle
from tests.kernels.conformance.harness import Moved, pairs, run_case
from tests.kernels.conformance.test_conformance import CASES


def altered(kernel: Callable[..., None], **changes: object) -> Callable[..., None]:
    """`kernel` with some arguments replaced; a callable change receives all arguments by name."""
    names = list(inspect.signature(kernel).parameters)

    def wrong(*args: object) -> None:
        given = dict(zip(names, args))
        given |= {name: change(given) if callable(change) else change for name, change in changes.items()}
        kernel(**given)

    return wrong


def followed_by(kernel: Callable[..., None], change: Callable[..., None]) -> Callable[..., None]:
    """`kernel`, and then something that it should not have done."""

    def wrong(*args: object) -> None:
        kernel(*args)
        change(*args)

    return wrong


def _bfloat16_products(out, x, packed, bias, n, k) -> None:
    gemm.packed_linear(out, x.bfloat16(), packed.bfloat16(), bias, n, k)


def _heads_interleaved(args: dict) -> torch.Tensor:
    """Query heads mapped to KV head h % Hkv instead of h // ratio."""
    num_kv_heads = args["k_cache"].shape[1]
    return args["q"].unflatten(1, (-1, num_kv_heads)).transpose(1, 2).flatten(1, 2)


def _without_the_last_key(args: dict) -> torch.Tensor:
    is_last = torch.arange(len(args["kv_indices"])) == args["kv_indptr"][-1] - 1
    return args["kv_indices"].masked_fill(is_last, -1)


def _lse_base_2(out, lse, *rest) -> None:
    if lse is not None:
        lse.mul_(1.4426950408889634)


def _merge_by_formula(out, out_lse, o_a, lse_a, o_b, lse_b) -> None:
    lse = torch.logaddexp(lse_a, lse_b)
    out.copy_(torch.exp(lse_a - lse)[..., None] * o_a + torch.exp(lse_b - lse)[..., None] * o_b)
    out_lse.copy_(lse)


def _without_repeats(logits, indptr, ids, values) -> None:
    bounds = indptr.tolist()
    original = logits.clone()
    for row in range(logits.shape[0]):
        for j in range(bounds[row], bounds[row + 1]):
            if 0 <= ids[j] < logits.shape[1]:
                logits[row, ids[j]] = original[row, ids[j]].double() + values[j]


def _silent_last_row(out, *rest) -> None:
    if out.shape[0]:
        out[-1] = out[0]


ATTENTION_MUTANTS: dict[str, dict] = {
    "window is one too wide": {"window_left": lambda a: a["window_left"] + (a["window_left"] >= 0)},
    "window is one too narrow": {"window_left": lambda a: a["window_left"] - 1 if a["window_left"] > 0 else a["window_left"]},
    "sinks are ignored": {"sinks": None},
    "the logit cap is ignored": {"logit_cap": 0.0},
    "k_scale is ignored": {"k_scale": 1.0},
    "v_scale is ignored": {"v_scale": 1.0},
    "k_scale is applied twice": {"k_scale": lambda a: a["k_scale"] ** 2},
    "heads are mapped in the wrong order": {"q": _heads_interleaved},
    "holes are read as slot 0": {"kv_indices": lambda a: a["kv_indices"].clamp(min=0)},
    "the last key is dropped": {"kv_indices": _without_the_last_key},
    "queries are rounded to eight bits": {"q": lambda a: a["q"].to(torch.float8_e4m3fn).to(a["q"].dtype)},
}
EXTEND_MUTANTS: dict[str, dict] = ATTENTION_MUTANTS | {
    "the causal mask is ignored": {"causal": False},
    "the causal mask is always on": {"causal": True, "custom_mask": None},
    "the custom mask starts one late": {"custom_mask": lambda a: None if a["custom_mask"] is None else a["custom_mask"].roll(1)},
}

MUTANTS: dict[str, dict[str, Callable[..., None]]] = {
    "rms_norm": {
        "eps is ignored": altered(norm.rms_norm, eps=0.0),
        "the weight is ignored": altered(norm.rms_norm, weight=lambda a: torch.ones_like(a["weight"])),
        "one element is left out": altered(norm.rms_norm, x=lambda a: a["x"] * (torch.arange(a["x"].shape[-1]) > 0)),
        "the result is 1% off": followed_by(norm.rms_norm, lambda out, *rest: out.mul_(1.01)),
    },
    "fused_add_rms_norm": {
        "the residual is not updated": altered(norm.fused_add_rms_norm, residual=lambda a: a["residual"].clone()),
        "eps is ignored in a small row": altered(norm.fused_add_rms_norm, eps=0.1),
        "x is not overwritten": altered(norm.fused_add_rms_norm, x=lambda a: a["x"].clone()),
    },
    "apply_rope": {
        "pairs are taken the other way": altered(rope.apply_rope, is_neox=lambda a: not a["is_neox"]),
        "positions are off by one": altered(rope.apply_rope, positions=lambda a: a["positions"] - 1),
        "padding is rotated": altered(rope.apply_rope, positions=lambda a: a["positions"].clamp(0, a["cos_sin_cache"].shape[0] - 1)),
        "keys are forgotten": altered(rope.apply_rope, k=lambda a: a["k"].clone()),
        "sines have the wrong sign": altered(
            rope.apply_rope, cos_sin_cache=lambda a: torch.cat([a["cos_sin_cache"].chunk(2, 1)[0], -a["cos_sin_cache"].chunk(2, 1)[1]], 1)
        ),
    },
    "silu_and_mul": {
        "halves are swapped": altered(activation.silu_and_mul, x=lambda a: torch.cat(a["x"].chunk(2, -1)[::-1], -1)),
        "the last element is missed": followed_by(activation.silu_and_mul, lambda out, x: out[..., -1:].fill_(0.5)),
    },
    "store_kv": {
        "slot -1 is the last slot": altered(kvcache.store_kv, slots=lambda a: a["slots"] % a["k_cache"].shape[0]),
        "values are not stored": altered(kvcache.store_kv, v_cache=lambda a: a["v_cache"].clone()),
        "values go one slot further": altered(kvcache.store_kv, v_cache=lambda a: a["v_cache"].roll(1, 0)),
    },
    "kv_indices": {
        "kv_start is ignored": altered(indices.kv_indices, kv_start=None),
        "rows are taken in order": altered(indices.kv_indices, req_slots=lambda a: torch.arange(len(a["req_slots"]))),
        "the rest of the buffer is cleared": followed_by(indices.kv_indices, lambda indptr, out, *rest: out[int(indptr[-1]) :].zero_()),
    },
    "qo_indptr": {"it does not begin with 0": followed_by(indices.qo_indptr, lambda out, q_lens: out[0].fill_(1))},
    "write_req_to_token": {
        "starts are ignored": altered(indices.write_req_to_token, starts=lambda a: a["starts"] * 0),
        "each run begins with the first slot": altered(indices.write_req_to_token, slots=lambda a: a["slots"].flip(0)),
    },
    "decode_attention": {name: altered(attention.decode_attention, **changes) for name, changes in ATTENTION_MUTANTS.items()}
    | {"LSE is base 2": followed_by(attention.decode_attention, _lse_base_2)},
    "extend_attention": {name: altered(attention.extend_attention, **changes) for name, changes in EXTEND_MUTANTS.items()}
    | {"LSE is base 2": followed_by(attention.extend_attention, _lse_base_2)},
    "merge_state": {
        "it is the bare formula": _merge_by_formula,
        "states are swapped": altered(attention.merge_state, lse_a=lambda a: a["lse_b"], lse_b=lambda a: a["lse_a"]),
    },
    "greedy": {
        "the last of equals wins": lambda out, logits: out.copy_(logits.shape[1] - 1 - logits.flip(1).argmax(1)),
        "broken rows get an id": lambda out, logits: out.copy_(logits.nan_to_num().argmax(1)),
    },
    "sample": {
        "the seed's upper half is ignored": altered(sampling.sample, seeds=lambda a: a["seeds"] & 0xFFFFFFFF),
        "the position is ignored": altered(sampling.sample, positions=lambda a: a["positions"] * 0),
        "top_k keeps one more": altered(sampling.sample, top_k=lambda a: a["top_k"] + (a["top_k"] > 0)),
        "top_p is ignored": altered(sampling.sample, top_p=lambda a: torch.ones_like(a["top_p"])),
        "min_p is ignored": altered(sampling.sample, min_p=lambda a: a["min_p"] * 0),
        "the temperature is ignored": altered(sampling.sample, temperature=lambda a: a["temperature"].clamp(min=1)),
        "a broken row spoils its neighbour": followed_by(sampling.sample, _silent_last_row),
    },
    "apply_logit_bias": {
        "ids are clamped": altered(sampling.apply_logit_bias, ids=lambda a: a["ids"].clamp(0, a["logits"].shape[1] - 1)),
        "a repeated id counts once": _without_repeats,
    },
    "apply_penalties": {
        "the prompt counts as output": altered(
            sampling.apply_penalties, output_counts=lambda a: a["output_counts"] + a["prompt_mask"].int()
        ),
        "the prompt is not repeated": altered(sampling.apply_penalties, prompt_mask=lambda a: torch.zeros_like(a["prompt_mask"])),
        "counts are capped": altered(sampling.apply_penalties, output_counts=lambda a: a["output_counts"].clamp(max=1)),
    },
    "pack_weight": {"the last column is lost": followed_by(gemm.pack_weight, lambda out, weight: out.view(weight.shape)[:, -1].zero_())},
    "packed_linear": {
        "the bias is ignored": altered(gemm.packed_linear, bias=None),
        "float32 products are bfloat16": _bfloat16_products,
        "the last k is dropped": altered(gemm.packed_linear, x=lambda a: a["x"] * (torch.arange(a["k"]) < a["k"] - 1)),
    },
}  # fmt: skip


def _caught(op: str, kernel: Callable[..., None], seed: int) -> bool:
    for case in reversed(CASES):  # the special cases of attention come after its large grid
        if case.op != op:
            continue
        try:
            run_case(case, kernel, seed, "reference")
        except (AssertionError, RuntimeError):
            return True
    return False


@pytest.mark.parametrize(
    ("op", "mutant"), [pytest.param(op, name, id=f"{op}: {name}") for op, mutants in MUTANTS.items() for name in mutants]
)
def test_a_wrong_implementation_is_caught(op: str, mutant: str, seed: int) -> None:
    assert _caught(op, MUTANTS[op][mutant], seed), f"no case of {op} notices that {mutant}"


@pytest.mark.parametrize("op", OPS)
def test_an_op_that_writes_nothing_is_caught(op: str, seed: int) -> None:
    assert op in MUTANTS
    assert _caught(op, lambda *args: None, seed)


@pytest.mark.parametrize("where", [-1, +1])
def test_a_write_beside_the_output_is_caught(where: int, seed: int) -> None:
    def beside(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        norm.rms_norm(out, x, weight, eps)
        if out.numel():
            start = out.storage_offset()
            end = start + sum((size - 1) * stride for size, stride in zip(out.shape, out.stride()))
            out.as_strided((1,), (1,), start - 1 if where < 0 else end + 1).fill_(1.0)

    assert _caught("rms_norm", beside, seed)


def test_an_implementation_joins_the_suite_by_registering(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    library = Library("gristmill_metal", "IMPL")
    try:
        library.impl("silu_and_mul", MUTANTS["silu_and_mul"]["halves are swapped"], "CompositeExplicitAutograd")
        joined = dispatch.Implementation("metal", lambda key: None, ("cpu",))
        monkeypatch.setitem(dispatch._implementations["silu_and_mul"], "metal", joined)
        monkeypatch.setitem(dispatch.PREFERENCE, "cpu", ("metal", *dispatch.PREFERENCE["cpu"]))
        found = [case for family, case in pairs(CASES) if family == "metal"]
        assert len(found) == sum(case.op == "silu_and_mul" for case in CASES)
        with pytest.raises(AssertionError, match="elements are wrong"):
            run_case(found[0], dispatch.overload("silu_and_mul", "metal"), seed, "metal")
    finally:
        library._destroy()


@pytest.mark.parametrize("op", ["rms_norm", "apply_rope", "store_kv", "decode_attention"])
def test_a_call_moved_to_another_device_is_judged_the_same(op: str, seed: int) -> None:
    """`cpu:0` is another name of the CPU, to which everything is copied and back."""
    case = next(case for case in CASES if case.op == op)
    run_case(case, dispatch.overload(op, "reference"), seed, "reference", "cpu:0")
    with pytest.raises(AssertionError):
        run_case(case, lambda *args: None, seed, "reference", "cpu:0")


def test_moved_arguments_share_memory_as_before() -> None:
    whole = torch.arange(24.0).view(4, 6)
    moved = Moved((whole[:, :4], 3, None, whole[:, 4:]), torch.device("cpu:0"))
    left, number, nothing, right = moved.args
    assert (number, nothing, left.stride(), right.storage_offset()) == (3, None, (6, 1), 4)
    assert left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr()
    left.fill_(-1)
    assert whole[0, 0] == 0
    moved.back()
    assert (whole[:, :4] == -1).all() and whole[3, 5] == 23


def test_the_oracle_knows_the_published_philox_vectors() -> None:
    """Known answers of Random123's kat_vectors for philox4x32-10."""
    assert oracle.philox4x32((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    ones = 0xFFFFFFFF
    assert oracle.philox4x32((ones,) * 4, (ones,) * 2) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert oracle.philox4x32(pi, (0xA4093822, 0x299F31D0)) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)
