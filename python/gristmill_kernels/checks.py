"""The sentences with which public functions refuse a bad argument: each names the argument, its value and what would be right.
The conditions stand in the public functions, where they cost nanoseconds; only the failing path comes here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

FLOAT_DTYPES = frozenset((torch.float32, torch.float16, torch.bfloat16))
FLOAT8_DTYPES = frozenset((torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz))
_SHORT = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.int8: "int8",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.bool: "bool",
}


def name_of(dtype: torch.dtype) -> str:
    """`float32` rather than `torch.float32`."""
    return _SHORT.get(dtype, str(dtype).removeprefix("torch."))


def refuse_dtype(function: str, argument: str, tensor: Tensor, right: str) -> TypeError:
    """The dtype of `argument` is wrong."""
    return TypeError(f"{function}: {argument} has dtype {name_of(tensor.dtype)}, but should be {right}")


def refuse_shape(function: str, argument: str, tensor: Tensor, right: str) -> ValueError:
    """The shape of `argument` is wrong."""
    return ValueError(f"{function}: {argument} has shape {tuple(tensor.shape)}, but should be {right}")


def refuse_stride(function: str, argument: str, tensor: Tensor) -> ValueError:
    """The innermost dimension of `argument` is not dense."""
    return ValueError(f"{function}: {argument} has strides {tuple(tensor.stride())}, but its innermost stride should be 1")


def refuse_value(function: str, argument: str, value: Any, right: str) -> ValueError:
    """The value of `argument` is wrong."""
    return ValueError(f"{function}: {argument} is {value!r}, but should be {right}")


def refuse_device(function: str, argument: str, tensor: Tensor, like: Tensor) -> ValueError:
    """`argument` lives on another device than the call."""
    return ValueError(f"{function}: {argument} is on {tensor.device}, but should be on {like.device} like the other tensors")


# The checks below run on every call, so they ask a tensor for what is cheap first: `is_contiguous()` costs a third of a stride, `is_cpu` a
# tenth of comparing devices.


def is_dense(tensor: Tensor) -> bool:
    """Whether the innermost stride is 1, or does not matter."""
    return tensor.is_contiguous() or tensor.shape[-1] <= 1 or tensor.stride()[-1] == 1


def same_device(tensor: Tensor, like: Tensor) -> bool:
    """Whether two tensors live on the same device."""
    return tensor.is_cpu if like.is_cpu else tensor.device == like.device


def _is_dense_row(function: str, argument: str, tensor: Tensor) -> bool:
    if tensor.ndim == 0:
        raise refuse_shape(function, argument, tensor, "at least one-dimensional")
    return is_dense(tensor)


def check_float(function: str, argument: str, tensor: Tensor) -> None:
    """A dense-in-the-last-dimension float32, float16 or bfloat16 tensor of at least one dimension."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{function}: {argument} is a {type(tensor).__name__}, but should be a torch.Tensor")
    if tensor.dtype not in FLOAT_DTYPES:
        raise refuse_dtype(function, argument, tensor, "float32, float16 or bfloat16")
    if not (tensor.is_contiguous() and tensor.ndim) and not _is_dense_row(function, argument, tensor):
        raise refuse_stride(function, argument, tensor)


def check_cache(function: str, argument: str, tensor: Tensor, dtype: torch.dtype, right: str) -> None:
    """A dense-in-the-last-dimension pool of `dtype` or of an 8-bit float type; `right` says whose dtype that is."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{function}: {argument} is a {type(tensor).__name__}, but should be a torch.Tensor")
    if tensor.dtype is not dtype and tensor.dtype not in FLOAT8_DTYPES:
        raise refuse_dtype(function, argument, tensor, f"{right} or float8_e4m3fn, float8_e5m2 or float8_e4m3fnuz")
    if not (tensor.is_contiguous() and tensor.ndim) and not _is_dense_row(function, argument, tensor):
        raise refuse_stride(function, argument, tensor)


def check_like(function: str, argument: str, tensor: Tensor, model: Tensor, shape: torch.Size | tuple[int, ...], right: str) -> None:
    """`tensor` has the dtype and device of `model`, the given shape, and is dense in its last dimension."""
    if tensor.dtype is not model.dtype:
        raise refuse_dtype(function, argument, tensor, name_of(model.dtype))
    if tensor.shape != shape:
        raise refuse_shape(function, argument, tensor, f"{right} = {tuple(shape)}")
    if not tensor.is_contiguous() and not is_dense(tensor):
        raise refuse_stride(function, argument, tensor)
    if not (tensor.is_cpu and model.is_cpu) and tensor.device != model.device:
        raise refuse_device(function, argument, tensor, model)


def check_vector(function: str, argument: str, tensor: Tensor, dtype: torch.dtype, length: int | None, like: Tensor, right: str) -> None:
    """A dense one-dimensional tensor of `dtype` on the device of `like`; `length` None means any."""
    if tensor.dtype is not dtype:
        raise refuse_dtype(function, argument, tensor, name_of(dtype))
    if tensor.ndim != 1 or (length is not None and tensor.shape[0] != length):
        raise refuse_shape(function, argument, tensor, right if length is None else f"{right} = ({length},)")
    if not tensor.is_contiguous():
        raise refuse_stride(function, argument, tensor)
    if not (tensor.is_cpu and like.is_cpu) and tensor.device != like.device:
        raise refuse_device(function, argument, tensor, like)
