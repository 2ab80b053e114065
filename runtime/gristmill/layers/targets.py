"""Where each tensor of a checkpoint goes: its expected shape and the function that takes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Target(NamedTuple):
    """`take` copies what it needs: the tensor it gets is a view of a file that is closed afterwards."""

    shape: tuple[int, ...]
    take: Callable[[torch.Tensor], Any]


Targets = dict[str, Target]
