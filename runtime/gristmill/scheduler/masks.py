"""Where the allowed-token bitmasks of grammar requests come from; the scheduler only decides when they are asked for."""

from __future__ import annotations

from typing import Protocol

import numpy as np


class MaskProvider(Protocol):
    """Compiled grammars by request id. A request is submitted only once its grammar is compiled."""

    def wants(self, rid: str) -> bool:
        """Whether each token of this request must be masked."""
        ...

    def bits(self, rid: str, ids: np.ndarray) -> np.ndarray:
        """ceil(vocab/32) int32 words, bit set = allowed as the next token after `ids` (prompt and generated tokens)."""
        ...
