"""Which implementation runs a call: preference, overrides, strict mode, and the reasons given."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import gristmill_kernels
from gristmill_kernels import dispatch, loader, native
from gristmill_kernels.schema import FAMILIES, OPS

KEY = ("cpu", torch.float32)


@pytest.fixture(autouse=True)
def fresh_choices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for variable in (dispatch.IMPL_VARIABLE, dispatch.STRICT_VARIABLE):
        monkeypatch.delenv(variable, raising=False)
    dispatch.reset()
    yield
    monkeypatch.undo()
    dispatch.reset()


@pytest.fixture
def unsupporting_native(monkeypatch: pytest.MonkeyPatch) -> None:
    """A native family that declines rms_norm, whatever this build has."""
    declining = dispatch.Implementation("native", lambda key: "the moon is full", ("cpu",))
    monkeypatch.setitem(dispatch._implementations["rms_norm"], "native", declining)


def set_overrides(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(dispatch.IMPL_VARIABLE, text)
    dispatch.reset()


def test_an_override_picks_the_implementation_of_one_op(monkeypatch: pytest.MonkeyPatch) -> None:
    set_overrides(monkeypatch, " rms_norm:reference , silu_and_mul:reference")
    assert dispatch.select("rms_norm", KEY) is torch.ops.gristmill_reference.rms_norm.default
    assert dispatch.explain("rms_norm", KEY).forced
    assert not dispatch.explain("greedy", KEY).forced


def test_a_star_overrides_every_op_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    set_overrides(monkeypatch, "*:reference")
    assert dispatch.explain("greedy", KEY) == dispatch.Choice("reference", (), True)


def test_an_empty_override_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    set_overrides(monkeypatch, "")
    assert not dispatch.explain("rms_norm", KEY).forced


@pytest.mark.parametrize(
    ("text", "named"),
    [("rms_nrom:reference", "rms_nrom"), ("rms_norm:cuda", "cuda"), ("rms_norm", "rms_norm"), ("rms_norm:", "''")],
)
def test_a_misspelt_override_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, text: str, named: str) -> None:
    set_overrides(monkeypatch, text)
    with pytest.raises(ValueError, match=named):
        dispatch.select("greedy", KEY)


def test_an_override_to_what_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    set_overrides(monkeypatch, "rms_norm:triton")
    with pytest.raises(dispatch.NoImplementationError, match=r"GRISTMILL_KERNELS_IMPL asks for triton.*not implemented for cpu"):
        dispatch.select("rms_norm", KEY)


def test_what_native_declines_falls_to_the_reference_with_the_reason(unsupporting_native: None) -> None:
    assert dispatch.explain("rms_norm", KEY) == dispatch.Choice("reference", ("native: the moon is full",), False)
    assert dispatch.select("rms_norm", KEY) is torch.ops.gristmill_reference.rms_norm.default


def test_strict_mode_refuses_a_fallback(monkeypatch: pytest.MonkeyPatch, unsupporting_native: None) -> None:
    monkeypatch.setenv(dispatch.STRICT_VARIABLE, "1")
    with pytest.raises(dispatch.NoImplementationError, match=r"STRICT=1 refuses the fallback to reference.*the moon is full"):
        gristmill_kernels.rms_norm(torch.ones(1, 4), torch.ones(4))


def test_strict_mode_allows_what_was_asked_for(monkeypatch: pytest.MonkeyPatch, unsupporting_native: None) -> None:
    monkeypatch.setenv(dispatch.STRICT_VARIABLE, "1")
    set_overrides(monkeypatch, "rms_norm:reference")
    assert dispatch.chosen_family("rms_norm", KEY) == "reference"


def test_a_choice_is_made_once_per_key(monkeypatch: pytest.MonkeyPatch) -> None:
    first = dispatch.select("rms_norm", KEY)
    monkeypatch.setattr(dispatch, "explain", lambda name, key: pytest.fail("asked again"))
    assert dispatch.select("rms_norm", KEY) is first


def test_a_using_block_ends_with_the_block() -> None:
    before = dispatch.chosen_family("rms_norm", KEY)
    with dispatch.using("reference"):
        assert dispatch.chosen_family("rms_norm", KEY) == "reference"
    assert dispatch.chosen_family("rms_norm", KEY) == before


def test_an_unknown_device_is_named() -> None:
    with pytest.raises(dispatch.NoImplementationError, match="device type 'meta' is not one of"):
        dispatch.select("rms_norm", ("meta", torch.float32))


def test_only_declared_ops_and_families_can_be_implemented() -> None:
    with pytest.raises(ValueError, match="'nope' is not declared"):
        dispatch.implement("nope", "native", lambda key: None)
    with pytest.raises(ValueError, match="'fast' is not one of"):
        dispatch.implement("rms_norm", "fast", lambda key: None)


def test_every_family_has_every_schema() -> None:
    for name, spec in OPS.items():
        for family in FAMILIES:
            text = str(dispatch.overload(name, family)._schema)
            assert text.split("::", 1)[1].startswith(name + "(")
            assert text.endswith("-> ()"), f"{name} must return nothing"
            assert spec.schema.count("!") == text.count("!") >= 1


def test_native_predicates_cover_every_op_and_give_reasons() -> None:
    assert set(native.PREDICATES) == set(OPS)
    attention_key = OPS["decode_attention"].key_type("cpu", torch.float32, torch.float32, 20, 64, 4, 2)
    assert "head_dim 20 is not a multiple of 8" in str(native.PREDICATES["decode_attention"](attention_key))
    assert "float64" in str(native.PREDICATES["rms_norm"](OPS["rms_norm"].key_type("cpu", torch.float64)))


def test_the_routing_namespace_reaches_the_chosen_implementation() -> None:
    x, out = torch.randn(3, 8), torch.empty(3, 8)
    torch.ops.gristmill.rms_norm(out, x, torch.ones(8), 1e-6)
    torch.testing.assert_close(out, torch.nn.functional.rms_norm(x, (8,), eps=1e-6))


def test_a_packed_weight_stays_with_the_family_that_packed_it() -> None:
    weight, x = torch.randn(5, 40), torch.randn(2, 40)
    with dispatch.using("reference"):
        packed = gristmill_kernels.pack_linear(weight)
    assert packed.family == "reference"
    torch.testing.assert_close(gristmill_kernels.linear(x, packed), x @ weight.T)


def test_capabilities_name_the_implementation_and_the_reason_of_every_op(unsupporting_native: None) -> None:
    report = gristmill_kernels.capabilities()
    assert set(report["ops"]) == set(OPS)
    assert {entry["why"] for entry in report["ops"]["rms_norm"]["cpu"]} == {"native: the moon is full"}
    assert all(entry["implementation"] for by_device in report["ops"].values() for entry in by_device["cpu"])
    assert (report["native"]["isa"] is None) == (report["native"]["reason"] is not None)
    assert report["native"]["isa"] == loader.native_library().isa
