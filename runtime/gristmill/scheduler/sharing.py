"""In-batch prefix sharing: a prompt whose beginning another request is computing right now waits for it instead of computing it twice."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

MIN_SHARED_TOKENS = 32  # what must be gained for a request to wait; below that, computing costs less than the wait


class Prefix(NamedTuple):
    """Known tokens that are being computed and will be in the prefix cache soon."""

    ids: np.ndarray
    extra_key: str


def waits_for(ids: np.ndarray, extra_key: str, n_cached: int, computing: Iterable[Prefix], page_size: int = 1) -> bool:
    """Whether a request with the known tokens `ids`, of which the cache holds `n_cached`, gains MIN_SHARED_TOKENS by waiting.

    Only whole pages are shared, and the last token is always computed by the request itself.
    """
    end = n_cached + -(-MIN_SHARED_TOKENS // page_size) * page_size
    if end >= len(ids):
        return False
    head = ids[:end]
    return any(
        prefix.extra_key == extra_key and len(prefix.ids) >= end and bool(np.array_equal(head, prefix.ids[:end])) for prefix in computing
    )
