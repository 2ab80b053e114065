"""The choice of experts and their blocks from the definitions, in float64 and plain Python loops; shares nothing with the package."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

INF = math.inf


@dataclass
class Row:
    """One token's logits and how experts are chosen by them."""

    logits: list[float]
    bias: list[float] | None = None
    sigmoid: bool = False
    num_groups: int = 1
    topk_groups: int = 1
    scores: list[float] = field(init=False)
    choice: list[float] = field(init=False)  # what is compared; -inf: cannot be chosen
    slack: list[float] = field(init=False)  # what float32 may be off by

    def __post_init__(self) -> None:
        usable = [x > -INF for x in self.logits]
        self.scores = [0.0] * len(usable)
        if self.sigmoid:
            self.scores = [_sigmoid(x) if ok else 0.0 for x, ok in zip(self.logits, usable)]
        elif any(usable):
            top = max(x for x, ok in zip(self.logits, usable) if ok)
            shares = [math.exp(_less(x, top)) if ok else 0.0 for x, ok in zip(self.logits, usable)]
            self.scores = [share / math.fsum(shares) for share in shares]
        self.choice, self.slack = [x if ok else -INF for x, ok in zip(self.logits, usable)], [0.0] * len(usable)
        if self.bias is None:
            return
        for e, bias in enumerate(self.bias):
            biased = self.scores[e] + bias
            self.choice[e] = biased if usable[e] and biased > -INF else -INF
            if math.isfinite(self.choice[e]):
                # below 2e-38 an exponential may be 0
                self.slack[e] = 2.0**-20 * self.scores[e] + 2.0**-22 * abs(biased) + 2e-38

    def _same(self, e: int, f: int) -> bool:
        """Whether two experts must compare equal."""
        if self.bias is None or not math.isfinite(self.choice[e]):
            return self.choice[e] == self.choice[f]
        return self.logits[e] == self.logits[f] and self.bias[e] == self.bias[f]

    def _groups(self) -> Iterator[list[int]]:
        """Every set of groups that may be kept, as their experts that can be chosen."""
        size = len(self.logits) // self.num_groups
        members = [range(g * size, (g + 1) * size) for g in range(self.num_groups)]
        value, slack = [-INF] * self.num_groups, [0.0] * self.num_groups
        for g, group in enumerate(members):
            best = sorted((e for e in group if self.choice[e] > -INF), key=lambda e: -self.choice[e])[: 1 if self.bias is None else 2]
            if best:
                value[g], slack[g] = math.fsum(self.choice[e] for e in best), sum(self.slack[e] for e in best) * 2
        twins = [[(self.logits[e], 0.0 if self.bias is None else self.bias[e]) for e in group] for group in members]

        def before(h: int, g: int) -> bool:
            """Whether h surely ranks before g."""
            if value[g] == value[h] and (slack[g] == slack[h] == 0.0 or twins[g] == twins[h]):
                return h < g
            return _less(value[h], value[g]) > slack[h] + slack[g]

        everyone = range(self.num_groups)
        out = {g for g in everyone if sum(before(h, g) for h in everyone) >= self.topk_groups}
        kept = {g for g in everyone if sum(not before(g, h) for h in everyone if h != g) < self.topk_groups}
        for more in itertools.combinations(sorted(set(everyone) - out - kept), self.topk_groups - len(kept)):
            yield [e for g in sorted(kept | set(more)) for e in members[g] if self.choice[e] > -INF]

    def _follows(self, ids: list[int], usable: list[int]) -> bool:
        remaining = list(usable)
        for expert in ids:
            if not remaining:
                if expert != -1:
                    return False
                continue
            if expert not in remaining:
                return False
            remaining.remove(expert)
            for other in remaining:
                if _less(self.choice[other], self.choice[expert]) > self.slack[other] + self.slack[expert]:
                    return False
                if other < expert and self._same(other, expert):
                    return False
        return True

    def allows(self, ids: list[int]) -> bool:
        """Whether these experts, in this order, are a right choice."""
        return any(self._follows(ids, usable) for usable in self._groups())

    def weights(self, ids: list[int], renormalize: bool, scaling: float) -> list[tuple[float, float]]:
        """The weight of each chosen expert, and by how much float32 arithmetic may miss it."""
        chosen = [e for e in ids if e >= 0]
        if renormalize and chosen:
            # Sigmoids by their logarithms: log sigmoid(x) = min(x, 0) - log(1 + e^-|x|).
            logs = {e: min(x, 0.0) - math.log1p(math.exp(-abs(x))) if self.sigmoid else x for e in chosen for x in [self.logits[e]]}
            top = max(logs.values())
            shares = {e: math.exp(_less(value, top)) for e, value in logs.items()}
            share = {e: value / math.fsum(shares.values()) for e, value in shares.items()}
        else:
            logs = {e: min(self.logits[e], 0.0) if self.sigmoid else self.logits[e] for e in chosen}
            top = 0.0 if self.sigmoid else max((x for x in self.logits if x > -INF), default=0.0)
            share = {e: self.scores[e] for e in chosen}
        result = []
        for e in ids:
            weight = 0.0 if e < 0 else share[e] * scaling
            depth = 0.0 if e < 0 else min(abs(_less(logs[e], top)), 200.0)
            # Below 2^-126 an exponential may be flushed to 0.
            result.append((weight, 0.0 if weight == 0 else abs(weight) * 2.0**-21 * (4 + depth) + 2.0**-126 * max(1.0, scaling)))
        return result


def _less(a: float, b: float) -> float:
    """a - b, and 0 for equal infinities."""
    return 0.0 if a == b else a - b


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else (1 - 1 / (1 + math.exp(x)) if x > -30 else math.exp(x))


def blocks_of(ids: list[int], expert_map: list[int] | None, num_experts: int, block_size: int) -> tuple[list[int], list[int]]:
    """Entries by expert, padded to whole blocks by the number of entries, and the expert of every block."""
    places: list[list[int]] = [[] for _ in range(num_experts)]
    for entry, number in enumerate(ids):
        if expert_map is not None:
            number = expert_map[number] if 0 <= number < len(expert_map) else -1
        if 0 <= number < num_experts:
            places[number].append(entry)
    entries, owners = [], []
    for expert, own in enumerate(places):
        while own:
            block, own = own[:block_size], own[block_size:]
            entries += block + [len(ids)] * (block_size - len(block))
            owners.append(expert)
    return entries, owners
