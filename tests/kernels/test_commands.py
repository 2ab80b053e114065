"""`python -m gristmill_kernels bench` and `selftest`, on the CPU with small problems; and that the self-test notices wrong kernels."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gristmill_kernels import _registry, bench, dispatch, selftest
from gristmill_kernels.__main__ import main
from gristmill_kernels.schema import OPS


def test_every_op_has_a_self_test() -> None:
    """A new op needs an entry in selftest.CASES: a few lines that draw its arguments."""
    assert set(selftest.CASES) | {"pack_weight"} == set(OPS)


def test_the_self_test_passes_on_this_cpu(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    names = ["rms_norm", "kv_indices", "merge_state", "packed_linear", "sample", "store_kv"]
    arguments = ["selftest", "--device", "cpu", "--json", str(tmp_path / "report.json")]
    for name in names:
        arguments += ["--op", name]
    native = dispatch.why_not("rms_norm", "native", ("cpu", torch.float32)) is None
    status = main(arguments)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["device"] == "cpu"
    assert report["capabilities"]["ops"]["rms_norm"]["cpu"]
    assert not [outcome for outcome in report["outcomes"] if outcome["status"] == "failed"]
    if not native:
        pytest.skip("the native library is not built")
    assert status == 0
    assert {outcome["op"] for outcome in report["outcomes"] if outcome["status"] == "passed"} == set(names)
    assert "0 failed" in capsys.readouterr().out


@pytest.mark.parametrize("name", selftest.CASES)
def test_every_case_is_a_call_that_the_reference_answers(name: str) -> None:
    """On the CPU the reference is right by definition; what it must not touch stays untouched."""
    dtype = torch.float32
    for case in selftest.CASES[name](selftest.Draw(1, dtype)):
        assert selftest.run_case(name, "reference", case, "cpu", dtype) is None, case.label


def changed(name: str, change: Callable[..., None]) -> Callable[..., Any]:
    """The reference followed by `change(arguments)`."""
    reference = dispatch.overload(name, "reference")

    def op(*args: Any) -> None:
        reference(*args)
        change(*args)

    return op


def beyond(out: torch.Tensor, *rest: Any) -> None:
    out.as_strided((1,), (1,), out.storage_offset() + out.numel()).fill_(0)


def off_by_little(out: torch.Tensor, *rest: Any) -> None:
    if out.numel():
        out.view(-1)[-1] += 1e-5


@pytest.mark.parametrize(
    ("name", "change", "fault"),
    [
        ("rms_norm", off_by_little, "1 of 8 elements are wrong"),
        ("rms_norm", beyond, "argument 0: written outside of it"),
        ("rms_norm", lambda out, x, weight, eps: weight.zero_(), "argument 2, an input"),
        ("rms_norm", lambda out, *rest: out.fill_(float("nan")), "8 of 8 elements are wrong"),
        ("store_kv", lambda pool, *rest: pool[0, 0, 0].neg_(), "argument 0: 1 of"),
        ("store_kv", lambda pool, *rest: pool[3].fill_(0), "argument 0"),  # a slot that nobody named
        ("kv_indices", lambda indptr, indices, *rest: indices[-1].fill_(0), "argument 1: 1 of"),
        ("sample", lambda out, *rest: out[:1].fill_(0), "argument 0: 1 of"),
        ("decode_attention", lambda out, lse, *rest: out[1].fill_(1e-3), "argument 0"),  # the row without keys
        ("decode_attention", lambda out, lse, *rest: lse[0].add_(0.01), "argument 1"),
        ("packed_linear", lambda out, *rest: out[0].add_(0.05), "argument 0"),
    ],
)
def test_the_self_test_notices_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch, name: str, change: Callable, fault: str) -> None:
    right = dispatch.overload
    replaced = {name: changed(name, change), "pack_weight": right("pack_weight", "reference")}
    monkeypatch.setattr(dispatch, "overload", lambda op, family: replaced[op] if family == "native" else right(op, family))
    monkeypatch.setattr(_registry, "packed_weight_numel", lambda family, n, k, dtype: n * k)
    case = next(iter(selftest.CASES[name](selftest.Draw(0, torch.float32))))
    found = selftest.run_case(name, "native", case, "cpu", torch.float32)
    assert found is not None
    assert fault in found


def test_a_kernel_that_raises_is_a_failure_with_its_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(*args: Any) -> None:
        raise RuntimeError("it rained")

    monkeypatch.setattr(selftest, "_call", broken)
    monkeypatch.setattr(dispatch, "why_not", lambda *args: None)
    assert main(["selftest", "--device", "cpu", "--family", "native", "--op", "greedy", "--json", str(tmp_path / "x.json")]) == 1
    outcomes = json.loads((tmp_path / "x.json").read_text())["outcomes"]
    assert {outcome["detail"] for outcome in outcomes} == {"RuntimeError: it rained"}


def test_the_benchmark_runs_every_row(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert (
        main(["bench", "--device", "cpu", "--quick", "--repeats", "1", "--dtype", "float32", "--json", str(tmp_path / "bench.json")]) == 0
    )
    report = json.loads((tmp_path / "bench.json").read_text())
    assert [row for row in report["rows"] if "left_out" in row] == []
    assert all(row["us"] > 0 and row["implementation"] in ("native", "reference") for row in report["rows"])
    assert {"decode_attention", "rms_norm", "packed_linear", "sample"} <= {row["op"] for row in report["rows"]}
    out = capsys.readouterr().out
    assert "ceiling: copy" in out and len(out.splitlines()) == len(report["rows"]) + 4


def test_rows_and_families_can_be_chosen(capsys: pytest.CaptureFixture) -> None:
    arguments = ["bench", "--device", "cpu", "--quick", "--repeats", "1", "--rows", "rms_norm 2", "--family", "reference"]
    assert main(arguments) == 0
    *_, last, other = capsys.readouterr().out.splitlines()
    assert last.startswith("rms_norm 2 rows") and "reference" in last
    assert other.startswith("fused_add_rms_norm 2 rows")


def test_the_bytes_of_a_gpu_row_are_those_of_its_problem() -> None:
    rows = {row.name: row.bytes for row in bench.all_rows(bench.Inputs("meta", torch.bfloat16), bench.GPU)}
    assert rows["decode attention B64 S4096"] == 2 * 64 * 4096 * 8 * 128 * 2
    assert rows["skinny_linear M1 N28672 K4096"] == 28672 * 4096 * 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
@pytest.mark.parametrize("command", ["bench", "selftest"])
def test_asking_for_an_absent_gpu_ends_with_a_sentence(command: str, capsys: pytest.CaptureFixture) -> None:
    assert main([command, "--device", "cuda"]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"gristmill_kernels {command}: torch has no GPU here: ") and len(error.splitlines()) == 1
    assert main([command, "--device", "tpu"]) == 1
    assert "device 'tpu' is not one of cpu, cuda" in capsys.readouterr().err


@pytest.mark.parametrize("command", [[], ["bench"], ["selftest"]])
def test_help_is_short_and_free(command: list[str], capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*command, "--help"])
    assert stopped.value.code == 0
    assert 5 < len(capsys.readouterr().out.splitlines()) < 40
