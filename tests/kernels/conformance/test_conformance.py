"""Every implementation of every op against the float64 oracle, over the same cases, on fresh random inputs."""

from __future__ import annotations

import pytest

from gristmill_kernels import dispatch
from gristmill_kernels.schema import OPS
from tests.kernels.conformance import (
    cases_attention,
    cases_indices,
    cases_kvcache,
    cases_logits,
    cases_mla,
    cases_moe,
    cases_quant,
    cases_rows,
    cases_skinny,
)
from tests.kernels.conformance.harness import Case, pairs, run_case

MODULES = (cases_rows, cases_kvcache, cases_indices, cases_attention, cases_mla, cases_logits, cases_skinny, cases_moe, cases_quant)
CASES = [case for module in MODULES for case in module.all_cases()]


@pytest.mark.parametrize(("family", "case"), [pytest.param(*pair, id=f"{pair[0]}-{pair[1].id}") for pair in pairs(CASES)])
def test_implementation_agrees_with_the_definition(family: str, case: Case, seed: int) -> None:
    run_case(case, dispatch.overload(case.op, family), seed, family)


def test_every_op_has_cases_and_a_reference() -> None:
    assert {case.op for case in CASES} == set(OPS)
    assert all(dispatch.families_of(name)[-1] == "reference" for name in OPS)


def test_case_names_are_unique() -> None:
    assert len({case.id for case in CASES}) == len(CASES)
