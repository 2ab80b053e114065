"""The sentences with which public functions refuse a bad argument: each names the argument, its value and what would be right.
The conditions stand in the public functions, where they cost nanoseconds; only the failing path comes here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

FLOAT_DTYPES = frozenset((torch.float32, torch.float16, torch.bfloat16))
_SHORT = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
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


def refuse_device(function: str, argument: str, tensor: Tensor, device: torch.device) -> ValueError:
    """`argument` lives on another device than the call."""
    return ValueError(f"{function}: {argument} is on {tensor.device}, but should be on {device} like the other tensors")


def check_float(function: str, argument: str, tensor: Tensor) -> None:
    """A dense-in-the-last-dimension float32, float16 or bfloat16 tensor."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{function}: {argument} is a {type(tensor).__name__}, but should be a torch.Tensor")
    if tensor.dtype not in FLOAT_DTYPES:
        raise refuse_dtype(function, argument, tensor, "float32, float16 or bfloat16")
    if tensor.dim() == 0:
        raise refuse_shape(function, argument, tensor, "at least one-dimensional")
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise refuse_stride(function, argument, tensor)


def check_like(function: str, argument: str, tensor: Tensor, model: Tensor, shape: torch.Size | tuple[int, ...], right: str) -> None:
    """`tensor` has the dtype and device of `model`, the given shape, and is dense in its last dimension."""
    if tensor.dtype is not model.dtype:
        raise refuse_dtype(function, argument, tensor, name_of(model.dtype))
    if tensor.shape != shape:
        raise refuse_shape(function, argument, tensor, f"{right} = {tuple(shape)}")
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise refuse_stride(function, argument, tensor)
    if tensor.device != model.device:
        raise refuse_device(function, argument, tensor, model.device)


def check_vector(
    function: str, argument: str, tensor: Tensor, dtype: torch.dtype, length: int | None, device: torch.device, right: str
) -> None:
    """A dense one-dimensional tensor of `dtype` on `device`; `length` None means any."""
    if tensor.dtype is not dtype:
        raise refuse_dtype(function, argument, tensor, name_of(dtype))
    if tensor.dim() != 1 or (length is not None and tensor.shape[0] != length):
        raise refuse_shape(function, argument, tensor, right if length is None else f"{right} = ({length},)")
    if tensor.stride(0) != 1 and tensor.shape[0] > 1:
        raise refuse_stride(function, argument, tensor)
    if tensor.device != device:
        raise refuse_device(function, argument, tensor, device)
