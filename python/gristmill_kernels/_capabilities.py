"""What this build of the package can do on this machine, and which implementation each op uses and why."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch

from gristmill_kernels import __version__, dispatch, loader, loader_gpu
from gristmill_kernels.checks import name_of
from gristmill_kernels.schema import OPS, AttentionKey, IndexKey, MlaKey, QuantKey, RopeKey, RopeStoreKey, StoreKey, TransferKey

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _typical_key(key_type: Any, device: str, dtype: torch.dtype) -> tuple:
    """Facts of a Llama-like layer (of a DeepSeek-like one for latent attention), to ask dispatch with."""
    if key_type is AttentionKey:
        return (device, dtype, dtype, 128, 128, 32, 8)
    if key_type is MlaKey:
        return (device, dtype, dtype, 512, 64, 128)
    if key_type is RopeKey:
        return (device, dtype, 128, 128)
    if key_type is RopeStoreKey:
        return (device, dtype, dtype, 128, 128)
    if key_type is StoreKey:
        return (device, dtype, dtype)
    if key_type is QuantKey:
        return (device, dtype, torch.float8_e4m3fn)
    if key_type is TransferKey:  # to the host and back
        return (device, dtype, "cpu", device)
    return (device, dtype)


def _op_report(name: str, device: str) -> list[dict[str, Any]]:
    key_type = OPS[name].key_type
    if key_type is IndexKey:
        questions: list[tuple[str, tuple]] = [("int32", (device,))]
    else:
        questions = [(name_of(dtype), _typical_key(key_type, device, dtype)) for dtype in _DTYPES]
    report = []
    for dtype_name, key in questions:
        try:
            choice = dispatch.explain(name, key)
            family, why = choice.family, "; ".join(choice.declined) or ("asked for" if choice.forced else "preferred")
        except dispatch.NoImplementationError as error:
            family, why = None, str(error)
        report.append({"dtype": dtype_name, "implementation": family, "why": why})
    return report


def _host_info() -> tuple[dict[str, Any], dict[str, bool], str | None]:
    try:
        from gristmill_kernels import _host
    except ImportError as error:
        return {}, {}, str(error)
    return _host.build_info(), _host.cpu_features(), None


def _devices() -> list[str]:
    found = ["cpu"]
    if torch.cuda.is_available():
        found.append("cuda")
    if torch.backends.mps.is_available():
        found.append("mps")
    return found


def capabilities() -> dict[str, Any]:
    """Report this build and machine as plain data (JSON-serialisable).

    Returns:
        A dict with `version`, `torch`, `python`, `platform` (the variant built), `build`, `cpu_features`, `native` (ISA level and library,
        or the reason there is none), `native_gpu` (the same of the GPU library, with the `archs` it was compiled for), `devices`,
        `environment` (the variables that are set), `ops`: op name -> device -> one entry per dtype with `implementation` and `why`, and
        `families`: op name -> device type -> implementations that exist for it, best first, whether or not this machine has the device.

    Raises:
        ValueError: an environment variable of the package has a value that it cannot have.
    """
    build, features, host_error = _host_info()
    native, native_gpu = loader.native_library(), loader_gpu.gpu_library()
    devices = _devices()
    variables = (dispatch.IMPL_VARIABLE, dispatch.STRICT_VARIABLE, loader.ISA_VARIABLE)
    return {
        "version": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": build.get("platform", "source tree"),
        "build": build,
        "host_error": host_error,
        "cpu_features": features,
        "native": {
            "isa": native.isa,
            "library": str(native.path) if native.path is not None else None,
            "reason": native.reason,
            "usable_levels": list(native.usable),
        },
        "native_gpu": {
            "library": str(native_gpu.path) if native_gpu.path is not None else None,
            "archs": list(native_gpu.archs),
            "reason": native_gpu.reason,
        },
        "devices": devices,
        "environment": {name: os.environ[name] for name in variables if os.environ.get(name)},
        "ops": {name: {device: _op_report(name, device) for device in devices} for name in OPS},
        "families": {name: {device: list(dispatch.families_of(name, device)) for device in dispatch.PREFERENCE} for name in OPS},
    }
