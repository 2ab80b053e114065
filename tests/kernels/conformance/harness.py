"""The conformance suite's machinery: a case builds one call of an op (arguments, expected values, tolerances) and `run_case` holds an
implementation to it. An implementation joins by registering with dispatch; nothing here names one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gristmill_kernels import _registry, dispatch
from gristmill_kernels.schema import OPS

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Error allowed per |a||b| of an inner product whose operands have this dtype.
PRODUCT_EPS = {torch.float32: 2.0**-22, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
MANTISSA_BITS = {torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}
MIN_EXPONENT = {torch.float32: -126, torch.float16: -14, torch.bfloat16: -126}
INT_POISON = -77_777
INT8_POISON = -77
GUARD = 16


def short(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]


def ulp(value: Tensor, dtype: torch.dtype) -> Tensor:
    """float64 distance between neighbours of `dtype` at |value|."""
    exponent = torch.frexp(value.double()).exponent - 1
    return torch.ldexp(torch.ones_like(value, dtype=torch.float64), exponent.clamp(min=MIN_EXPONENT[dtype]) - MANTISSA_BITS[dtype])


@dataclass
class Output:
    """What one output must hold: `expected` exactly when tolerance is None, else within `tolerance` (float64, elementwise)."""

    view: Tensor
    expected: Tensor
    tolerance: Tensor | None


@dataclass
class Call:
    """One call of an op, and what must be true after it."""

    args: tuple
    outputs: list[Output] = field(default_factory=list)
    # A further check of the outputs, for what is right within a set (a sampled id) or readable only by the family (a packed weight).
    verify: Callable[[], None] | None = None


@dataclass(frozen=True)
class Case:
    op: str
    label: str
    build: Callable[[Inputs], Call]
    # Static facts that dispatch would see; families that decline them are skipped, which the suite reports as such.
    key: tuple

    @property
    def id(self) -> str:
        return f"{self.op}-{self.label}"


def anything(view: Tensor) -> Output:
    """An output whose values `verify` judges."""
    return Output(view, torch.zeros(view.shape), torch.full(view.shape, float("inf")))


class Inputs:
    """Makes tensors as views into larger buffers whose other elements are poison, and remembers them all."""

    def __init__(self, seed: int, family: str) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.family = family
        self.bases: list[Tensor] = []

    def blank(self, shape: tuple[int, ...], dtype: torch.dtype, layout: str = "dense") -> Tensor:
        """A poisoned view. Layouts: dense; padded (outermost stride grown by 8); ragged (every outer stride and the offset odd)."""
        strides = [1] * len(shape)
        for dim in range(len(shape) - 2, -1, -1):
            strides[dim] = max(1, shape[dim + 1]) * strides[dim + 1]
            if layout == "ragged":
                strides[dim] += 3 if (strides[dim] % 2 == 0) else 2
            elif layout == "padded" and dim == 0:
                strides[dim] += 8
        offset = GUARD + (3 if layout == "ragged" else 0)
        extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides)) if all(shape) else 0
        return self.adopt(torch.empty(offset + extent + GUARD, dtype=dtype)).as_strided(shape, strides, offset)

    def adopt(self, base: Tensor) -> Tensor:
        """Poison a one-dimensional buffer and watch it."""
        special = {torch.bool: True, torch.int8: INT8_POISON}
        base.fill_(float("nan") if base.dtype.is_floating_point else special.get(base.dtype, INT_POISON))
        self.bases.append(base)
        return base

    def of(self, values: Tensor, layout: str = "dense", dtype: torch.dtype | None = None) -> Tensor:
        view = self.blank(tuple(values.shape), dtype or values.dtype, layout)
        view.copy_(values)
        return view

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, layout: str = "dense", scale: float = 1.0) -> Tensor:
        return self.of(torch.randn(shape, generator=self.generator, dtype=torch.float64) * scale, layout, dtype)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        return torch.rand(shape, generator=self.generator) * (high - low) + low

    def ints(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return self.of(torch.randint(low, high, shape, generator=self.generator).to(dtype))

    def int_list(self, values: list[int]) -> Tensor:
        return self.of(torch.tensor(values, dtype=torch.int32))

    def permutation(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self.generator)


def _bits(base: Tensor) -> Tensor:
    size = base.element_size()
    return base.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size])


def _with_outputs_zeroed(base: Tensor, outputs: list[Output]) -> Tensor:
    copy = base.clone()
    for output in outputs:
        if output.view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr():
            copy.as_strided(output.view.shape, output.view.stride(), output.view.storage_offset()).zero_()
    return _bits(copy)


def assert_matches(got: Tensor, expected: Tensor, tolerance: Tensor | None, what: str) -> None:
    """Exactly equal (NaN equals NaN) without a tolerance; with one, finite values within it and the rest exactly equal."""
    wide, target = got.double(), expected.double()
    if tolerance is None:
        wrong = ~((wide == target) | (wide.isnan() & target.isnan()))
    else:
        same = (wide == target) | (wide.isnan() & target.isnan())
        wrong = ~(same | ((wide - target).abs() <= tolerance) | tolerance.isposinf())
    if wrong.any():
        index = tuple(wrong.nonzero()[0].tolist())
        allowed = 0.0 if tolerance is None else tolerance.expand_as(wide)[index].item()
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {wrong.numel()} elements are wrong, first at {list(index)}: "
            f"got {wide[index].item()!r}, expected {target[index].item()!r} +- {allowed:.3g}"
        )


def elementwise(expected: Tensor, dtype: torch.dtype) -> Tensor:
    """Tolerance of an elementwise op: 2 ulp of the rounded result."""
    return 2 * ulp(expected.to(dtype), dtype)


def inner(expected: Tensor, magnitude: Tensor, dtype: torch.dtype, eps: float | None = None) -> Tensor:
    """Tolerance of an inner product: 2 ulp of the result plus eps * sum |a||b|."""
    return 2 * ulp(expected.to(dtype), dtype) + (PRODUCT_EPS[dtype] if eps is None else eps) * magnitude


class Moved:
    """The arguments of a call on another device: what shared memory still does, and `back` copies everything to where it came from."""

    def __init__(self, args: tuple, device: torch.device) -> None:
        self._device = device
        self._storages: dict[int, tuple[Tensor, Tensor]] = {}  # by address: bytes here, bytes there
        self.args = tuple(self._move(arg) if isinstance(arg, Tensor) else arg for arg in args)

    def _move(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if not storage.nbytes():
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self._device)
        if storage.data_ptr() not in self._storages:
            here = torch.empty(0, dtype=torch.uint8).set_(storage)
            self._storages[storage.data_ptr()] = (here, here.to(self._device, copy=True))
        there = self._storages[storage.data_ptr()][1].untyped_storage()
        blank = torch.empty(0, dtype=tensor.dtype, device=self._device)
        return blank.set_(there, tensor.storage_offset(), tensor.shape, tensor.stride())

    def back(self) -> None:
        for here, there in self._storages.values():
            here.copy_(there)


def run_case(case: Case, op: Callable[..., None], seed: int, family: str, device: str = "cpu") -> None:
    """Call `op` on freshly drawn inputs, on `device`. Raises AssertionError when an output is wrong or anything else was written.

    Cases are built and judged on the CPU; for another device the arguments are moved there and everything is moved back.
    """
    inputs = Inputs(seed, family)
    call = case.build(inputs)
    before = [_with_outputs_zeroed(base, call.outputs) for base in inputs.bases]
    if device == "cpu":
        result = op(*call.args)
    else:
        moved = Moved(call.args, torch.device(device))
        result = op(*moved.args)
        moved.back()
    assert result is None, f"{case.id}: the op returned {type(result).__name__} instead of nothing"
    for output in call.outputs:
        assert_matches(output.view, output.expected, output.tolerance, case.id)
    for number, (base, old) in enumerate(zip(inputs.bases, before)):
        changed = (_with_outputs_zeroed(base, call.outputs) != old).nonzero()
        assert not len(changed), (
            f"{case.id}: buffer {number} ({base.dtype}) was written outside the outputs, at element {changed[0].item()}"
        )
    if call.verify is not None:
        call.verify()


def pairs(cases: list[Case], device: str = "cpu") -> Iterator[tuple[str, Case]]:
    """(family, case) for every family that takes the case's key."""
    for case in cases:
        for family in dispatch.families_of(case.op, device):
            if dispatch.why_not(case.op, family, key_on(case, device)) is None:
                yield family, case


def key_on(case: Case, device: str) -> tuple:
    """The case's key, on another device type."""
    return tuple(device if fact == "cpu" else fact for fact in case.key)


def packed(weight: Tensor, family: str) -> Tensor:
    """Pack a weight in the layout of `family`."""
    data = torch.empty(_registry.packed_weight_numel(family, *weight.shape, weight.dtype), dtype=weight.dtype)
    dispatch.overload("pack_weight", family)(data, weight)
    return data


def key_of(op: str, call: Call) -> tuple:
    return OPS[op].key_of(*call.args)
