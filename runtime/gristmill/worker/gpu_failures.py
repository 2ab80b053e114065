"""What goes wrong on a GPU, as sentences that name the option that helps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from gristmill.errors import GristmillError

_KNOBS = {
    "loading": "use a smaller model or --dtype bfloat16",
    "running": "lower --mem-fraction, --max-running or --chunk-tokens",
}


@contextlib.contextmanager
def named(doing: str) -> Iterator[None]:
    """Turn the device's errors within the block into a GristmillError; `doing` is "loading" or "running"."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise GristmillError(f"the GPU ran out of memory while {doing} the model: {_KNOBS[doing]} ({_first_line(error)})") from error
    except RuntimeError as error:
        if not is_device_error(error):
            raise
        raise GristmillError(
            f"the GPU failed while {doing} the model: {_first_line(error)}; its state is lost, so the engine ends "
            "(CUDA_LAUNCH_BLOCKING=1 shows the kernel)"
        ) from error


def is_device_error(error: BaseException) -> bool:
    """Whether `error` is an asynchronous failure of the device, after which nothing more can run on it."""
    accelerator_error = getattr(torch, "AcceleratorError", None)
    return (accelerator_error is not None and isinstance(error, accelerator_error)) or "CUDA error" in str(error)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
