"""Index ops on tensors that hold nonsense. A device kernel cannot refuse it: it writes nothing outside its outputs, reads nothing outside
its inputs, and does what the plain model below says, to the bit. For implementations that run on a device, are interpreted or emulated."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

GUARD = 16
POISON = -5
MAX = 2**31 - 1
PAGE_SIZES = (1, 3, 16)
Op = Callable[..., object]


def _wrapped(number: int) -> int:
    """As an int32 holds it."""
    return (number + 2**31) % 2**32 - 2**31


class Buffer:
    """An int32 output among guards, and what it should hold in the end."""

    def __init__(self, device: str, *shape: int) -> None:
        self.shape = shape
        self._pitch = shape[-1] + (3 if len(shape) > 1 else 0)
        size = GUARD + self._pitch * (shape[0] if len(shape) > 1 else 1) + GUARD
        self._expected = torch.full((size,), POISON, dtype=torch.int32)
        self._whole = self._expected.to(device, copy=True)
        self.view = self._whole.as_strided(shape, (self._pitch, 1)[-len(shape) :], GUARD)

    def fill(self, values: Tensor) -> None:
        for tensor in (self._whole, self._expected):
            tensor.as_strided(self.view.shape, self.view.stride(), GUARD).copy_(values)

    def put(self, value: int, *at: int) -> None:
        """Places outside do not count."""
        if all(0 <= index < size for index, size in zip(at, self.shape, strict=True)):
            self._expected[GUARD + sum(index * stride for index, stride in zip(at, self.view.stride(), strict=True))] = _wrapped(value)

    def check(self, what: str) -> None:
        wrong = (self._whole.cpu() != self._expected).nonzero()
        if len(wrong):
            place = int(wrong[0])
            got, expected = int(self._whole[place]), int(self._expected[place])
            raise AssertionError(f"{what}: element {place - GUARD} of an output of {self.shape} is {got}, but should be {expected}")


class Trial(NamedTuple):
    op: str
    args: tuple
    outputs: list[Buffer]


class Draw:
    def __init__(self, seed: int, device: str) -> None:
        self.random = random.Random(seed)
        self.device = device
        self.requests, self.rows = self.random.choice([0, 1, 3, 7, 11]), self.random.randint(1, 5)
        self.columns = self.random.choice([1, 5, 40, 1030, 2100])
        # Mostly sense, since nonsense alone would leave little to write.
        self.table = [self.list(self.columns, 0, 60) for _ in range(self.rows)]
        self.req_slots = self.list(self.requests, 0, self.rows - 1, odds=0.2)

    def buffer(self, *shape: int) -> Buffer:
        return Buffer(self.device, *shape)

    def tensor(self, values: list) -> Tensor:
        return torch.tensor(values, dtype=torch.int32).to(self.device)

    def integer(self, low: int, high: int, odds: float) -> int:
        if self.random.random() >= odds:
            return self.random.randint(low, high)
        near = (-1, 0, 1, high - 1, high, high + 1, high + 9)
        return self.random.choice((*near, -(2**31), -7, 2**30, MAX - 1, MAX))

    def list(self, count: int, low: int, high: int, odds: float = 0.15) -> list[int]:
        return [self.integer(low, high, odds) for _ in range(count)]

    def lengths(self) -> list[int]:
        return self.list(self.requests, 0, self.columns)

    def room(self, total: int) -> int:
        """Places in an output that should have `total`: enough, or not."""
        return self.random.choice((0, 1, 7, max(0, min(total, 9000) - 3), min(total, 9000), min(total, 9000) + 5))

    @property
    def table_tensor(self) -> Tensor:
        return self.tensor(self.table).view(self.rows, self.columns)

    def row(self, request: int) -> list[int] | None:
        row = self.req_slots[request]
        return self.table[row] if 0 <= row < self.rows else None


def _lists(draw: Draw, spans: list[tuple[int, int]], step: int, entry: Callable[[int], int]) -> tuple[Buffer, Buffer]:
    """indptr and indices of lists of `count` entries from position `first` on, `step` apart."""
    indptr, indices = draw.buffer(draw.requests + 1), draw.buffer(draw.room(sum(count for _, count in spans)))
    offset = 0
    indptr.put(0, 0)
    for request, (first, count) in enumerate(spans):
        slots = (draw.row(request) or [])[first::step]
        for place, slot in enumerate(slots[:count]):
            indices.put(entry(slot), offset + place)
        offset += count
        indptr.put(offset, request + 1)
    return indptr, indices


def _kv_indices(draw: Draw) -> Trial:
    lens = draw.lengths()
    starts = draw.list(draw.requests, 0, draw.columns // 2) if draw.random.random() < 0.6 else None
    spans = [(first, max(0, end - first)) if first >= 0 else (0, 0) for first, end in zip(starts or [0] * draw.requests, lens, strict=True)]
    outputs = _lists(draw, spans, 1, lambda slot: slot)
    own = None if starts is None else draw.tensor(starts)
    args = (draw.table_tensor, draw.tensor(draw.req_slots), draw.tensor(lens), own)
    return Trial("kv_indices", (*(output.view for output in outputs), *args), [*outputs])


def _window_kv_indices(draw: Draw) -> Trial:
    lens, window = draw.lengths(), draw.random.choice([-1, 0, 3, 30, 2**31 - 1, 2**31, 2**40])
    q_lens = draw.list(draw.requests, 0, 9) if draw.random.random() < 0.6 else None
    slot_map = draw.list(50, -1, 99) if draw.random.random() < 0.6 else None
    spans = []
    for length, rows in zip(lens, q_lens or [1] * draw.requests, strict=True):
        end = max(0, length)
        # A window longer than any list is taken to be as long as the longest, which a negative number of rows can tell apart.
        first = 0 if window < 0 else min(end, max(0, length - rows - min(window, MAX)))
        spans.append((first, end - first))

    def entry(slot: int) -> int:
        if slot_map is None or slot < 0:
            return slot
        return slot_map[slot] if slot < len(slot_map) else -1

    outputs = _lists(draw, spans, 1, entry)
    optional = (None if values is None else draw.tensor(values) for values in (q_lens, slot_map))
    args = (draw.table_tensor, draw.tensor(draw.req_slots), draw.tensor(lens), *optional, window)
    return Trial("window_kv_indices", (*(output.view for output in outputs), *args), [*outputs])


def _pages(length: int, page_size: int) -> int:
    return -(-max(0, length) // page_size)


def _filled(length: int, page_size: int) -> int:
    return (length - 1) % page_size + 1 if length > 0 else 0


def _page_of(page_size: int) -> Callable[[int], int]:
    return lambda slot: slot // page_size if slot >= 0 else -1


def _mla_indices(draw: Draw) -> Trial:
    lens, page_size = draw.lengths(), draw.random.choice(PAGE_SIZES)
    outputs = _lists(draw, [(0, _pages(length, page_size)) for length in lens], page_size, _page_of(page_size))
    last = draw.buffer(draw.requests)
    for request, length in enumerate(lens):
        last.put(_filled(length, page_size), request)
    args = (draw.table_tensor, draw.tensor(draw.req_slots), draw.tensor(lens), page_size)
    return Trial("mla_indices", (*(output.view for output in (*outputs, last)), *args), [*outputs, last])


def _page_table(draw: Draw) -> Trial:
    lens, page_size = draw.lengths(), draw.random.choice(PAGE_SIZES)
    out = draw.buffer(draw.requests, draw.room(_pages(draw.columns, page_size)))
    for request, length in enumerate(lens):
        for page, slot in enumerate((draw.row(request) or [])[: max(0, length) : page_size]):
            out.put(_page_of(page_size)(slot), request, page)
    return Trial("page_table", (out.view, draw.table_tensor, draw.tensor(draw.req_slots), draw.tensor(lens), page_size), [out])


def _last_page_len(draw: Draw) -> Trial:
    lens, page_size = draw.lengths(), draw.random.choice(PAGE_SIZES)
    out = draw.buffer(draw.requests)
    for request, length in enumerate(lens):
        out.put(_filled(length, page_size), request)
    return Trial("last_page_len", (out.view, draw.tensor(lens), page_size), [out])


def _qo_indptr(draw: Draw) -> Trial:
    lens = draw.lengths()
    out = draw.buffer(draw.requests + 1)
    for request, total in enumerate(itertools.accumulate(lens, initial=0)):
        out.put(total, request)
    return Trial("qo_indptr", (out.view, draw.tensor(lens)), [out])


def _write_req_to_token(draw: Draw) -> Trial:
    """Every row is written at most once: of two writes to one place, either may come last."""
    starts, lens = draw.list(draw.requests, 0, draw.columns // 2), draw.list(draw.requests, 0, draw.columns)
    draw.req_slots = [row if row not in draw.req_slots[:index] else -3 for index, row in enumerate(draw.req_slots)]
    slots = draw.list(draw.room(sum(max(0, length) for length in lens)), 0, 99)
    table = draw.buffer(draw.rows, draw.columns)
    table.fill(draw.table_tensor)
    offset = 0
    for row, start, length in zip(draw.req_slots, starts, lens, strict=True):
        if start >= 0:
            for place, slot in enumerate(slots[offset : offset + max(0, min(length, draw.columns))]):
                table.put(slot, row, start + place)
        offset += max(0, length)
    args = (draw.tensor(draw.req_slots), draw.tensor(starts), draw.tensor(lens), draw.tensor(slots))
    return Trial("write_req_to_token", (table.view, *args), [table])


def _draft_kv_indices(draw: Draw) -> Trial:
    lens, steps, topk = draw.lengths(), draw.random.choice([1, 2, 3]), draw.random.choice([1, 2])
    listed = None
    if draw.random.random() < 0.5:
        listed = [[draw.list(steps, 0, 99) for _ in range(topk)] for _ in range(draw.requests)]
    prefixes = [max(0, length) for length in lens]
    indptr = draw.buffer(steps, draw.requests * topk + 1)
    indices = draw.buffer(steps, draw.room(topk * sum(prefixes) + draw.requests * topk * steps))
    for step in range(steps):
        offset = 0
        indptr.put(0, step, 0)
        for request, branch in itertools.product(range(draw.requests), range(topk)):
            row, prefix = draw.row(request), prefixes[request]
            for place, slot in enumerate((row or [])[:prefix]):
                indices.put(slot, step, offset + place)
            for token in range(step + 1):
                position = prefix + branch * steps + token
                if row is not None and listed is not None:
                    indices.put(listed[request][branch][token], step, offset + prefix + token)
                elif row is not None and position < draw.columns:
                    indices.put(row[position], step, offset + prefix + token)
            offset += prefix + step + 1
            indptr.put(offset, step, request * topk + branch + 1)
    draft_slots = None if listed is None else draw.tensor(listed).view(draw.requests, topk, steps)
    args = (draw.table_tensor, draw.tensor(draw.req_slots), draw.tensor(lens), draft_slots, steps, topk)
    return Trial("draft_kv_indices", (indptr.view, indices.view, *args), [indptr, indices])


def _slot(free: list[int], index: int, page_size: int, within: int) -> int:
    """-1 where there is no page, or none that int32 can name."""
    page = free[index] if index < len(free) else -1
    return page * page_size + within if page >= 0 and (page + 1) * page_size <= 2**31 else -1


def _alloc_extend(draw: Draw) -> Trial:
    page_size = draw.random.choice(PAGE_SIZES)
    prefixes = draw.list(draw.requests, 0, 50)
    lens = [prefix + draw.integer(0, 70, 0.05) if prefix <= 60 else MAX for prefix in prefixes]
    lens = [max(-(2**31), min(MAX, length)) for length in lens]
    last, free = draw.list(draw.requests, 0, 999), draw.list(draw.random.choice([0, 3, 90]), 0, 500)
    grows = [length > prefix >= 0 for prefix, length in zip(prefixes, lens, strict=True)]
    growing = list(itertools.compress(zip(prefixes, lens, last, strict=True), grows))
    out, num_pages = draw.buffer(draw.room(sum(length - prefix for prefix, length, _ in growing))), draw.buffer(1)
    offset = taken = 0
    for prefix, length, slot in growing:
        old_end = _pages(prefix, page_size) * page_size
        for place in range(min(length - prefix, max(0, out.shape[0] - offset))):
            position = prefix + place
            if position < old_end:
                out.put(slot + 1 + place, offset + place)
            else:
                fresh = position - old_end
                out.put(_slot(free, taken + fresh // page_size, page_size, fresh % page_size), offset + place)
        offset += length - prefix
        taken += _pages(length, page_size) - _pages(prefix, page_size)
    num_pages.put(taken, 0)
    args = (draw.tensor(prefixes), draw.tensor(lens), draw.tensor(last), draw.tensor(free), page_size)
    return Trial("alloc_extend", (out.view, num_pages.view, *args), [out, num_pages])


def _alloc_decode(draw: Draw) -> Trial:
    page_size = draw.random.choice(PAGE_SIZES)
    lens, last, free = draw.list(draw.requests, 0, 33, 0.3), draw.list(draw.requests, 0, 999), draw.list(draw.random.choice([0, 3]), 0, 99)
    out, num_pages, taken = draw.buffer(draw.requests), draw.buffer(1), 0
    for request, (length, slot) in enumerate(zip(lens, last, strict=True)):
        if length <= 0:
            out.put(-1, request)
        elif (length - 1) % page_size:
            out.put(slot + 1, request)
        else:
            out.put(_slot(free, taken, page_size, 0), request)
            taken += 1
    num_pages.put(taken, 0)
    args = (draw.tensor(lens), draw.tensor(last), draw.tensor(free), page_size)
    return Trial("alloc_decode", (out.view, num_pages.view, *args), [out, num_pages])


TRIALS: tuple[Callable[[Draw], Trial], ...] = (
    _kv_indices, _window_kv_indices, _mla_indices, _page_table, _last_page_len, _qo_indptr, _write_req_to_token, _draft_kv_indices,
    _alloc_extend, _alloc_decode,
)  # fmt: skip


def trials(seed: int, rounds: int, device: str) -> Iterator[Trial]:
    for number in range(rounds):
        for make in TRIALS:
            yield make(Draw(seed * 1000 + number, device))


def check(op_of: Callable[[str, tuple], Op], seed: int, rounds: int, device: str = "cpu") -> int:
    """Runs `op_of(name, args)(*args)` on `rounds` draws of every op. How many there were."""
    count = 0
    for trial in trials(seed, rounds, device):
        op_of(trial.op, trial.args)(*trial.args)
        for output in trial.outputs:
            output.check(f"{trial.op}, trial {count} of seed {seed}")
        count += 1
    return count
