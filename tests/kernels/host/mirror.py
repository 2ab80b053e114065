"""What a reader of the tree's events knows: the pages that are stored, by their hashes. Fails on an event that does not fit."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.kernels.host.twin import mix


class Mirror:
    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.parents: dict[int, int | None] = {}  # page -> the page before it
        self.children: Counter[int | None] = Counter()

    @property
    def hashes(self) -> set[int]:
        return set(self.parents)

    def replay(self, events: list[tuple[Any, ...]]) -> None:
        for kind, *rest in events:
            {"stored": self.store, "removed": self.remove}[kind](*rest)

    def store(self, parent: int | None, pages: list[int], tokens: Any, extra_key: str) -> None:
        assert parent is None or parent in self.parents, "a page was stored before its predecessor"
        assert pages and len(tokens) == len(pages) * self.page_size
        for number, page in enumerate(pages):
            assert page not in self.parents, "a page was stored twice"
            if parent is not None:
                expected = parent
                for token in tokens[number * self.page_size : (number + 1) * self.page_size].tolist():
                    expected = mix(expected, token)
                assert page == expected, "a page's hash continues its predecessor's"
            self.parents[page] = parent
            self.children[parent] += 1
            parent = page

    def remove(self, pages: list[int]) -> None:
        assert pages
        for page in pages:
            assert not self.children[page], "a page was removed before its successors"
            self.children[self.parents.pop(page)] -= 1
