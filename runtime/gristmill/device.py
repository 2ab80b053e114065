"""Which device the model runs on, found out without torch: processes that never import it need to know as well."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import re
from pathlib import Path

from gristmill.errors import OptionError

DEVICES = ("auto", "cpu", "cuda")


def resolve(name: str) -> str:
    """`name` with "auto" replaced by what there is. Raises OptionError when "cuda" is asked for and cannot be had."""
    if name == "cpu":
        return name
    reason = why_no_cuda()
    if name == "auto":
        return "cpu" if reason else "cuda"
    if reason:
        raise OptionError(f"--device cuda cannot be used: {reason}")
    return name


@functools.cache
def why_no_cuda() -> str | None:
    """None when a CUDA device can be used, else the reason it cannot, as a clause."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no NVIDIA driver is installed (libcuda.so.1 was not found)"
    count = ctypes.c_int()
    code = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if code:
        return f"the NVIDIA driver does not start (error {code} of cuInit)"
    if count.value < 1:
        return "the NVIDIA driver shows no device (see CUDA_VISIBLE_DEVICES)"
    built_for = _torch_cuda()
    if built_for is None:
        return "the installed torch is not built for CUDA"
    return None


def _torch_cuda() -> str | None:
    """The CUDA version that torch is built for, read from its source: importing it takes a second and much memory."""
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:
        return None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text()
    except OSError:
        return None
    match = re.search(r"^cuda\b[^=\n]*=\s*'([0-9.]+)'", text, re.MULTILINE)
    return match and match[1]
