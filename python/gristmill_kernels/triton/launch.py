"""Launching Triton kernels. `kernel[grid](...)` inspects and hashes every argument anew on each call, which costs more than most decode
kernels run for; `Kernel` computes a short key of its own and calls the compiled handle. Where Triton's internals are not those it knows,
or under the interpreter, it falls back to `kernel[grid](...)`.

The same `Kernel.source` feeds run-time and ahead-of-time compilation, so what the tests inspect is what runs.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gristmill_kernels.checks import FLOAT_DTYPES, name_of

# Versions whose compiled handles are called as `_handle` does, tried on a GPU. Others work, at the price of kernel[grid].
KNOWN_VERSIONS = ("3.6",)
PLAIN_VARIABLE = "GRISTMILL_KERNELS_TRITON_PLAIN"

TYPE_NAMES: Mapping[torch.dtype, str] = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.float8_e4m3fnuz: "fp8e4b8",
    torch.float8_e5m2fnuz: "fp8e5b16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
}


# Pointers to these, which may begin anywhere in a longer list, are claimed to be aligned to their elements only.
INDEX_TYPES = frozenset((torch.int32, torch.int64, torch.bool))
# What is claimed of strides whose lowest four bits, or-ed together, are the place in this table.
_DIVISORS = (16, 1, 1, 1, 1, 1, 1, 1, 8, 1, 1, 1, 1, 1, 1, 1)


class Op(NamedTuple):
    """One op of the family: a function with the arguments of its schema, and for which keys it works (None) or why it does not."""

    function: Callable[..., None]
    supports: Callable[[Any], str | None]


class Options(NamedTuple):
    """Compiler options of one configuration; `extra` holds further (name, value) pairs such as ("waves_per_eu", 2)."""

    num_warps: int = 4
    num_stages: int = 2
    extra: tuple[tuple[str, Any], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, **dict(self.extra)}


class Facts(NamedTuple):
    """What block sizes depend on. `arch` is gfx942, sm90, ... or cpu."""

    arch: str
    num_processors: int
    warp_size: int


@functools.cache
def _facts_of(index: int) -> Facts:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        arch = properties.gcnArchName.split(":")[0]
        return Facts(arch, properties.multi_processor_count, 64 if arch.startswith("gfx9") else 32)
    return Facts(f"sm{properties.major}{properties.minor}", properties.multi_processor_count, 32)


_CPU = Facts("cpu", 2, 1)


def facts(device: torch.device) -> Facts:
    """Facts of a device; of the interpreter for the CPU."""
    if device.type == "cpu":
        return _CPU
    return _facts_of(torch.cuda.current_device() if device.index is None else device.index)


class AotCase(NamedTuple):
    """One configuration to compile without a GPU.

    `types` gives the dtype of every pointer in order (None for an absent one); `dot` says that a matrix instruction must appear.
    `options` may be a function of the arch (gfx942, sm90, ...). `archs` limits the case to some targets; empty means all.
    """

    label: str
    kernel: Kernel
    types: tuple[torch.dtype | None, ...]
    constants: tuple[Any, ...]
    options: Options | Callable[[str], Options] = Options()
    dot: bool = False
    archs: tuple[str, ...] = ()


class Kernel:
    """A `@triton.jit` function with the parameter order that the package documentation prescribes."""

    def __init__(self, function: Any) -> None:
        self.function = function
        parameters = inspect.signature(function.fn).parameters.values()
        kinds = [_kind(parameter) for parameter in parameters]
        order = ["pointer", "number", "constexpr"]
        ranks = [order.index("number" if kind[0] in "if" else kind) for kind in kinds]
        self.name: str = function.fn.__name__
        if ranks != sorted(ranks):
            raise TypeError(f"{self.name}: parameters must be pointers, then numbers, then constants, but are {', '.join(kinds)}")
        self.num_pointers = kinds.count("pointer")
        self.numbers = [kind for kind in kinds if kind[0] in "if"]
        self.num_constants = kinds.count("constexpr")
        first = self.num_pointers
        strides = [place for place, kind in enumerate(kinds) if kind == "i64"]
        # One slice reads all strides when they stand together, as they should.
        if strides and strides != list(range(strides[0], strides[-1] + 1)):
            raise TypeError(f"{self.name}: the tl.int64 parameters must follow one another")
        self._strides = slice(strides[0], strides[-1] + 1) if strides else slice(first, first)
        self._handles: dict[tuple, Callable[..., None]] = {}

    def __call__(self, grid: tuple[int, int, int], args: tuple, constants: tuple = (), options: Options = Options()) -> None:
        """Launch on the current stream of the first tensor's device. `args`: pointers (tensors or None), then numbers."""
        if not (grid[0] and grid[1] and grid[2]):
            return
        count = self.num_pointers
        device = args[0].device.index
        types: list[torch.dtype | None] = []
        addresses: list[int | None] = []
        alignment = 0
        for tensor in args[:count]:
            if tensor is None:
                types.append(None)
                addresses.append(None)
                continue
            address = tensor.data_ptr()
            types.append(dtype := tensor.dtype)
            addresses.append(address)
            if dtype not in INDEX_TYPES:
                alignment |= address
        divisors = 0
        for stride in args[self._strides]:
            divisors |= stride
        aligned, divisor = not alignment & 15, _DIVISORS[divisors & 15]
        key = (device, *types, aligned, divisor, constants, options)
        handle = self._handles.get(key)
        if handle is None:
            handle = self._handles[key] = self._prepare(device, types, aligned, divisor, constants, options)
        handle(grid, addresses, args)

    def source(self, types: Sequence[torch.dtype | None], aligned: bool, divisor: int, constants: tuple) -> ASTSource:
        """What the compiler gets: `aligned` claims 16 bytes for pointers to data, `divisor` (16, 8 or 1) is claimed for all strides."""
        names = list(inspect.signature(self.function.fn).parameters)
        if len(types) != self.num_pointers or len(constants) != self.num_constants:
            raise TypeError(
                f"{self.name} takes {self.num_pointers} pointers and {self.num_constants} constants, got {len(types)} and {len(constants)}"
            )
        pointers = ["constexpr" if dtype is None else f"*{TYPE_NAMES[dtype]}" for dtype in types]
        signature = dict(zip(names, [*pointers, *self.numbers, *("constexpr" for _ in constants)]))
        fixed = {(place,): None for place, dtype in enumerate(types) if dtype is None}
        fixed |= {(len(names) - len(constants) + place,): value for place, value in enumerate(constants)}
        claims = {(place,): 16 for place, dtype in enumerate(types) if aligned and dtype is not None and dtype not in INDEX_TYPES}
        if divisor > 1:
            claims |= {(place,): divisor for place in range(self._strides.start, self._strides.stop)}
        attributes = {place: [["tt.divisibility", claim]] for place, claim in claims.items()}
        return _source_class(self.function)(fn=self.function, signature=signature, constexprs=fixed, attrs=attributes)

    def compile_for(self, target: GPUTarget, case: AotCase, arch: str) -> Any:
        """Compile a case, aligned, for a target that need not be here."""
        options = case.options if isinstance(case.options, Options) else case.options(arch)
        source = self.source(case.types, True, 16, case.constants)
        return triton.compile(source, target=target, options=options.as_dict())

    def _prepare(self, device: int | None, types: list, aligned: bool, divisor: int, constants: tuple, options: Options) -> Callable:
        if device is None or use_plain_launch():
            return functools.partial(self._plain, constants, options.as_dict())
        with torch.cuda.device(device):
            target = triton.runtime.driver.active.get_current_target()
            compiled = triton.compile(self.source(types, aligned, divisor, constants), target=target, options=options.as_dict())
            return _handle(compiled, device, constants, self.num_pointers)

    def _plain(self, constants: tuple, options: dict, grid: tuple, addresses: list, args: tuple) -> None:
        if args[0].device.index is None:
            self.function[grid](*args, *constants, **options)
            return
        with torch.cuda.device(args[0].device):
            self.function[grid](*args, *constants, **options)


@functools.cache
def use_plain_launch() -> bool:
    """Whether kernels are launched as kernel[grid]: an unknown Triton version, or GRISTMILL_KERNELS_TRITON_PLAIN=1."""
    asked = os.environ.get(PLAIN_VARIABLE, "") not in ("", "0")
    return asked or ".".join(triton.__version__.split(".")[:2]) not in KNOWN_VERSIONS


def _source_class(function: Any) -> type[ASTSource]:
    """What turns a decorated function into IR: kernels of `gluon.jit` have a source of their own."""
    if not (hasattr(function, "is_gluon") and function.is_gluon()):
        return ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    return GluonASTSource


def _handle(compiled: Any, device: int, constants: tuple, num_pointers: int) -> Callable:
    """Bind everything of a launch that does not change."""
    run = compiled.run  # loads the binary onto the current device
    function, metadata = compiled.function, compiled.packed_metadata
    current_stream = torch._C._cuda_getCurrentRawStream
    current_device = torch._C._cuda_getDevice

    def launch(grid: tuple, addresses: list, args: tuple) -> None:
        if current_device() != device:
            with torch.cuda.device(device):
                launch(grid, addresses, args)
            return
        x, y, z = grid
        run(x, y, z, current_stream(device), function, metadata, None, None, None, *addresses, *args[num_pointers:], *constants)

    return launch


def _kind(parameter: inspect.Parameter) -> str:
    if parameter.annotation is inspect.Parameter.empty:
        return "pointer"
    text = str(parameter.annotation).removeprefix("tl.")
    kinds = {"constexpr": "constexpr", "int32": "i32", "int64": "i64", "float32": "fp32"}
    if text not in kinds:
        raise TypeError(
            f"parameter {parameter.name} is annotated {parameter.annotation}; use tl.int32, tl.int64, tl.float32 or tl.constexpr"
        )
    return kinds[text]


def wide_type(dtype: torch.dtype) -> tl.dtype:
    """Type that a result of `dtype` is computed in: float64 for float32, whose results must be right within 2 ulp as well."""
    return tl.float64 if dtype == torch.float32 else tl.float32


def supports_float(key: Any) -> str | None:
    """The predicate of an op that takes float32, float16 and bfloat16."""
    return None if key.dtype in FLOAT_DTYPES else f"dtype {name_of(key.dtype)} is not float32, float16 or bfloat16"


def supports_any(key: Any) -> str | None:
    """The predicate of an op that takes whatever its schema allows."""
    return None


def next_power_of_2(value: int) -> int:
    """Smallest power of two that is not below `value`, at least 1."""
    return 1 << max(0, value - 1).bit_length()


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


class Rows(NamedTuple):
    """Leading dimensions of some tensors of equal leading shape, merged into two: row r lies at (r // inner) * outer stride +
    (r % inner) * inner stride."""

    outer: int
    inner: int
    strides: tuple[tuple[int, int], ...]

    @property
    def total(self) -> int:
        return self.outer * self.inner


def rows_of(*tensors: Tensor) -> Rows | None:
    """Merge all dimensions but the last into two, or None when their strides do not allow it."""
    shape = tensors[0].shape
    if len(shape) == 2:
        return Rows(shape[0], 1, tuple((tensor.stride(0), 0) for tensor in tensors))
    if len(shape) == 1:
        return Rows(1, 1, tuple((0, 0) for _ in tensors))
    groups: list[tuple[int, list[int]]] = []  # (size, stride per tensor), outermost first
    for dim in range(len(shape) - 1):
        size, strides = shape[dim], [tensor.stride(dim) for tensor in tensors]
        if size == 1:
            continue
        if groups and all(before == size * stride for before, stride in zip(groups[-1][1], strides)):
            groups[-1] = (groups[-1][0] * size, strides)
        else:
            groups.append((size, strides))
    if len(groups) > 2:
        return None
    while len(groups) < 2:
        groups.append((1, [0] * len(tensors)))
    (outer, outer_strides), (inner, inner_strides) = groups
    return Rows(outer, inner, tuple(zip(outer_strides, inner_strides)))


def over_rows(function: Callable[..., None], *tensors: Tensor) -> None:
    """Call `function(rows, *tensors)`, once per index of the outermost dimension as often as the strides require."""
    if not tensors[0].numel():
        return
    rows = rows_of(*tensors)
    if rows is not None:
        function(rows, *tensors)
        return
    for index in range(tensors[0].shape[0]):
        over_rows(function, *(tensor[index] for tensor in tensors))
