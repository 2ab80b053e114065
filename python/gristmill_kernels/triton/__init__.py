"""The Triton family: one source for NVIDIA and AMD GPUs, and the interpreter on the CPU as a proof of what the kernels compute.

How to add an op (say `merge_state`, in a module `merge.py` of this package):

1. Write the kernel with `@triton.jit`. Parameters in this order: pointers (not annotated), then `tl.int64` strides, `tl.int32` numbers and
   `tl.float32` numbers as they come, then every `tl.constexpr`. Strides are int64 so that `index * stride` never wraps. The launcher claims
   16-byte alignment for pointers to data and divisibility by 16 or 8 for the `tl.int64` arguments when all of them have it; nothing is
   claimed for int32 numbers and for pointers to int32, int64 and bool. An optional pointer may be None: test it with `if lse is not None:`.
2. Wrap it: `_merge = launch.Kernel(_merge_kernel)`, and call it from a function with exactly the arguments of the op's schema:
   `_merge(grid, (out, o_a, ..., out.stride(0), ...), (D, BLOCK), launch.Options(num_warps=4))`: grid of three ints, run-time arguments in
   the kernel's order, constants in the kernel's order. Constants and options must be hashable; each distinct combination is one compile.
   A grid with a zero launches nothing. `launch.facts(tensor.device)` gives arch, number of processors and warp size; block sizes that were
   measured come from `tables.options("merge", arch, size)`.
3. Declare it at the end of the module: `OPS = {"merge_state": launch.Op(merge_state, supports)}`, where `supports(key)` gives None or the
   reason it cannot, and name the module in `_HOME` below. Only modules that are asked for are imported, and with them triton.
4. Add one `launch.AotCase` per kernel and configuration that matters to the module's `AOT` list: tests/kernels/triton/test_aot.py compiles
   each for gfx90a, gfx942, gfx950 and sm90 without a GPU and refuses spills, too much shared memory and a missing matrix instruction.
5. The conformance suite takes it from here: `python -m pytest tests/kernels/triton/test_interpreter.py` (float32 and float16 under
   TRITON_INTERPRET=1, in processes of its own, because the variable is read when a kernel is decorated), and on a GPU
   `python -m tests.gpu.conformance --family triton --op merge_state` with every dtype.

The interpreter (3.6.0) computes bfloat16 wrongly, so bfloat16 keys are declined there. Float32 dots need `input_precision="ieee"`.
Nothing here may use a vendor's intrinsics; what differs between vendors belongs into launch.py or tables.py. The one exception is
mla_hopper.py, a kernel in Gluon for sm90 alone beside the portable one of mla.py, which runs wherever the other cannot.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from gristmill_kernels import dispatch

# Op -> module of this package that has its kernels.
_HOME = {
    "rms_norm": "norm",
    "fused_add_rms_norm": "norm",
    "gemma_rms_norm": "norm",
    "gemma_fused_add_rms_norm": "norm",
    "layer_norm": "norm",
    "silu_and_mul": "activation",
    "gelu_and_mul": "activation",
    "gelu_tanh_and_mul": "activation",
    "swiglu_oai": "activation",
    "apply_rope": "rope",
    "apply_rope_store_kv": "rope",
    "store_kv": "kvcache",
    "copy_slots": "kvcache",
    "transfer_kv": "kvcache",
    "kv_indices": "indices",
    "window_kv_indices": "indices",
    "mla_indices": "indices",
    "qo_indptr": "indices",
    "write_req_to_token": "indices",
    "page_table": "indices",
    "last_page_len": "indices",
    "draft_kv_indices": "indices",
    "alloc_extend": "indices",
    "alloc_decode": "indices",
    "decode_attention": "attention_decode",
    "extend_attention": "attention_extend",
    "ragged_attention": "attention_extend",
    "merge_state": "merge",
    "merge_states": "merge",
    "mla_decode": "mla",
    "mla_store": "mla",
    "topk_softmax": "moe",
    "topk_sigmoid": "moe",
    "grouped_topk": "moe",
    "align_block_size": "moe",
    "quant_fp8": "quant",
    "per_token_quant_fp8": "quant",
    "per_token_quant_int8": "quant",
    "per_group_quant_fp8": "quant",
}


@functools.cache
def missing() -> str | None:
    """Why Triton itself cannot be used in this process, or None."""
    try:
        import triton  # noqa: F401
    except ImportError as error:
        return f"triton cannot be imported: {error}"
    return None


@functools.cache
def interpreted() -> bool:
    """Whether TRITON_INTERPRET=1 makes every kernel of this process run on the CPU."""
    if missing() is not None:
        return False
    import triton

    return bool(triton.knobs.runtime.interpret)


def _unusable_on(device: str) -> str | None:
    reason = missing()
    if reason is not None:
        return reason
    if device == "cpu":
        return None if interpreted() else "Triton kernels run on the CPU only under TRITON_INTERPRET=1"
    if interpreted():
        return "TRITON_INTERPRET is set: Triton kernels of this process run on the CPU"
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    if torch.version.hip is None and torch.cuda.get_device_capability() < (8, 0):
        return "Triton kernels need compute capability 8.0 or newer"
    return None


@functools.cache
def _load(module_name: str) -> dict[str, Any]:
    """Import one module of kernels and hand its ops to torch."""
    ops = import_module(f"{__name__}.{module_name}").OPS
    for name, op in ops.items():
        dispatch.attach(name, "triton", op.function)
    return ops


def _supports(name: str) -> Callable[[Any], str | None]:
    def supports(key: Any) -> str | None:
        reason = _unusable_on(key.device)
        if reason is not None:
            return reason
        if key.device == "cpu" and torch.bfloat16 in key:
            return "the interpreter of Triton computes bfloat16 wrongly"
        return _load(_HOME[name])[name].supports(key)

    return supports


def modules() -> tuple[str, ...]:
    """Names of the modules that hold kernels."""
    return tuple(dict.fromkeys(_HOME.values()))


def ops_of(module_name: str) -> tuple[str, ...]:
    """Ops whose kernels are in one module."""
    return tuple(name for name, home in _HOME.items() if home == module_name)


def register() -> None:
    """Offer every op that has a Triton kernel; triton is imported when the first of them is asked for."""
    devices = ("cpu", "cuda") if _wants_interpreter() else ("cuda",)
    if "cpu" in devices:
        native, *rest = dispatch.PREFERENCE["cpu"]
        dispatch.PREFERENCE["cpu"] = (native, "triton", *(family for family in rest if family != "triton"))
    for name in _HOME:
        dispatch.implement(name, "triton", _supports(name), devices=devices)


def _wants_interpreter() -> bool:
    """Like `interpreted`, but does not import triton for it when the variable is not set."""
    import os

    return bool(os.environ.get("TRITON_INTERPRET")) and interpreted()
