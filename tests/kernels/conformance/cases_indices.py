"""Cases of the index lists and of paged allocation, all bit-exact."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from tests.kernels.conformance.harness import Call, Case, Inputs, Output

COLUMNS = 600
LONG = 9000  # a list that no block of a GPU kernel writes at once


def _columns(lens: list[int]) -> int:
    """Columns of the table for requests of these lengths."""
    return COLUMNS if max(lens, default=0) <= COLUMNS else LONG + 300


def _size(lens: list[int]) -> str:
    return f"{len(lens)}{'long' * (max(lens, default=0) > COLUMNS)}requests"


def _table(inputs: Inputs, lens: list[int], layout: str) -> tuple[Tensor, list[int]]:
    """A request table of random slots, some of them holes, and a row for every request."""
    batch = len(lens)
    values = torch.randint(0, 10_000, (batch + 3, _columns(lens)), generator=inputs.generator).int()
    values[:, ::37] = -1
    return inputs.of(values, layout), inputs.permutation(batch + 3)[:batch].tolist()


def _paged_table(inputs: Inputs, lens: list[int], page_size: int, layout: str) -> tuple[Tensor, list[int], list[list[int]]]:
    """A request table whose slots come in pages, a row for every request, and the pages of every request."""
    rows = inputs.permutation(len(lens) + 2)[: len(lens)].tolist()
    table = inputs.blank((len(lens) + 2, _columns(lens)), torch.int32, layout)
    pages = [inputs.permutation(max(900, length))[: -(-max(0, length) // page_size)].tolist() for length in lens]
    for row, length, own in zip(rows, lens, pages):
        for position in range(max(0, length)):
            table[row, position] = own[position // page_size] * page_size + position % page_size
    return table, rows, pages


def _csr(pieces: list[list[int]]) -> tuple[Tensor, Tensor]:
    sizes = torch.tensor([0, *map(len, pieces)])
    return sizes.cumsum(0), torch.tensor([entry for piece in pieces for entry in piece], dtype=torch.int64)


def _csr_outputs(inputs: Inputs, pieces: list[list[int]], extra: int) -> tuple[Tensor, Tensor, list[Output]]:
    """Poisoned indptr and indices (longer by `extra`, which must stay), and what they must hold."""
    bounds, flat = _csr(pieces)
    indptr, indices = inputs.blank((len(bounds),), torch.int32), inputs.blank((len(flat) + extra,), torch.int32)
    return indptr, indices, [Output(indptr, bounds, None), Output(indices[: len(flat)], flat, None)]


def _kv_indices(lens: list[int], starts: list[int] | None, extra: int, layout: str) -> Case:
    def build(inputs: Inputs) -> Call:
        table, rows = _table(inputs, lens, layout)
        begin = starts or [0] * len(lens)
        pieces = [table[row, first : max(first, end)].tolist() for row, first, end in zip(rows, begin, lens)]
        indptr, indices, outputs = _csr_outputs(inputs, pieces, extra)
        args = (indptr, indices, table, inputs.int_list(rows), inputs.int_list(lens), None if starts is None else inputs.int_list(starts))
        return Call(args, outputs)

    label = f"{_size(lens)}-{layout}{'-start' * (starts is not None)}-extra{extra}"
    return Case("kv_indices", label, build, ("cpu",))


def _qo_indptr(lens: list[int]) -> Case:
    def build(inputs: Inputs) -> Call:
        out = inputs.blank((len(lens) + 1,), torch.int32)
        return Call((out, inputs.int_list(lens)), [Output(out, torch.tensor([0, *lens]).cumsum(0), None)])

    return Case("qo_indptr", f"{len(lens)}requests", build, ("cpu",))


def _write_req_to_token(runs: list[tuple[int, int]], layout: str) -> Case:
    def build(inputs: Inputs) -> Call:
        rows = inputs.permutation(len(runs) + 2)[: len(runs)].tolist()
        table = inputs.blank((len(runs) + 2, max([300, *map(sum, runs)])), torch.int32, layout)
        slots = inputs.ints(0, 10_000, sum(length for _, length in runs))
        expected, taken = table.clone(), 0
        for row, (start, length) in zip(rows, runs):
            expected[row, start : start + length] = slots[taken : taken + length]
            taken += length
        args = (table, inputs.int_list(rows), inputs.int_list([run[0] for run in runs]), inputs.int_list([run[1] for run in runs]), slots)
        return Call(args, [Output(table, expected, None)])

    return Case("write_req_to_token", f"{len(runs)}runs-{layout}", build, ("cpu",))


def _window_kv_indices(lens: list[int], q_lens: list[int] | None, window_left: int, mapped: bool, extra: int, layout: str) -> Case:
    def build(inputs: Inputs) -> Call:
        table, rows = _table(inputs, lens, layout)
        slot_map = None
        if mapped:
            slot_map = inputs.ints(-1, 500, 10_000)
        pieces = []
        for number, (row, length) in enumerate(zip(rows, lens)):
            first_row = length - (1 if q_lens is None else q_lens[number])
            seen = [p for p in range(length) if window_left < 0 or p >= first_row - window_left]
            slots = [int(table[row, p]) for p in seen]
            pieces.append(slots if slot_map is None else [int(slot_map[slot]) if slot >= 0 else slot for slot in slots])
        indptr, indices, outputs = _csr_outputs(inputs, pieces, extra)
        own_q_lens = None if q_lens is None else inputs.int_list(q_lens)
        return Call((indptr, indices, table, inputs.int_list(rows), inputs.int_list(lens), own_q_lens, slot_map, window_left), outputs)

    label = f"{_size(lens)}-window{window_left}-{layout}{'-chunks' * (q_lens is not None)}{'-mapped' * mapped}-extra{extra}"
    return Case("window_kv_indices", label, build, ("cpu",))


def _page_table(lens: list[int], page_size: int, extra: int, layout: str) -> Case:
    def build(inputs: Inputs) -> Call:
        table, rows, pages = _paged_table(inputs, lens, page_size, layout)
        out = inputs.blank((len(lens), max(map(len, pages), default=0) + extra), torch.int32, layout)
        expected = out.clone()  # what lies behind is left alone
        for number, own in enumerate(pages):
            expected[number, : len(own)] = torch.tensor(own, dtype=torch.int32)
        return Call((out, table, inputs.int_list(rows), inputs.int_list(lens), page_size), [Output(out, expected, None)])

    return Case("page_table", f"{_size(lens)}-page{page_size}-{layout}-extra{extra}", build, ("cpu",))


def _page_table_of_holes() -> Case:
    def build(inputs: Inputs) -> Call:
        table = inputs.of(torch.tensor([[-1, -1, -1, 5, 6, -7, -8]], dtype=torch.int32))
        out = inputs.blank((1, 3), torch.int32)
        expected = torch.tensor([[-1, 5 // 3, -1]])
        return Call((out, table, inputs.int_list([0]), inputs.int_list([7]), 3), [Output(out, expected, None)])

    return Case("page_table", "holes-page3", build, ("cpu",))


def _last_page_len(lens: list[int], page_size: int) -> Case:
    def build(inputs: Inputs) -> Call:
        out = inputs.blank((len(lens),), torch.int32)
        expected = [0 if length <= 0 else length % page_size or page_size for length in lens]
        return Call((out, inputs.int_list(lens), page_size), [Output(out, torch.tensor(expected, dtype=torch.int32), None)])

    return Case("last_page_len", f"{_size(lens)}-page{page_size}", build, ("cpu",))


def _mla_indices(lens: list[int], page_size: int, extra: int, layout: str) -> Case:
    def build(inputs: Inputs) -> Call:
        table, rows, pages = _paged_table(inputs, lens, page_size, layout)
        indptr, indices, outputs = _csr_outputs(inputs, pages, extra)
        last = inputs.blank((len(lens),), torch.int32)
        filled = [0 if length <= 0 else length % page_size or page_size for length in lens]
        outputs.append(Output(last, torch.tensor(filled, dtype=torch.int32), None))
        return Call((indptr, indices, last, table, inputs.int_list(rows), inputs.int_list(lens), page_size), outputs)

    return Case("mla_indices", f"{_size(lens)}-page{page_size}-{layout}-extra{extra}", build, ("cpu",))


def _draft_kv_indices(lens: list[int], steps: int, topk: int, listed: bool, extra: int, layout: str) -> Case:
    def build(inputs: Inputs) -> Call:
        table, rows = _table(inputs, lens, layout)
        draft_slots = inputs.ints(0, 10_000, len(lens), topk, steps) if listed else None
        longest = sum(max(0, length) for length in lens) * topk + len(lens) * topk * steps
        indptr = inputs.blank((steps, len(lens) * topk + 1), torch.int32, layout)
        indices = inputs.blank((steps, longest + extra), torch.int32, layout)
        outputs = []
        for step in range(steps):
            pieces = []
            for request, (row, length) in enumerate(zip(rows, lens)):
                prefix = max(0, length)
                for branch in range(topk):
                    begin = prefix + branch * steps
                    own = table[row, begin : begin + steps] if draft_slots is None else draft_slots[request, branch]
                    pieces.append(table[row, :prefix].tolist() + own[: step + 1].tolist())
            bounds, flat = _csr(pieces)
            outputs += [Output(indptr[step], bounds, None), Output(indices[step, : len(flat)], flat, None)]
        args = (indptr, indices, table, inputs.int_list(rows), inputs.int_list(lens), draft_slots, steps, topk)
        return Call(args, outputs)

    label = f"{_size(lens)}-{steps}x{topk}-{layout}{'-listed' * listed}-extra{extra}"
    return Case("draft_kv_indices", label, build, ("cpu",))


def _placed(inputs: Inputs, prefix: int, page_size: int, page: int) -> int:
    """A last slot for a prefix: in `page` when that is partial, else a number nobody may use."""
    return page * page_size + (prefix - 1) % page_size if prefix % page_size else -77


def _alloc_extend(runs: list[tuple[int, int]], page_size: int, extra: int) -> Case:
    def build(inputs: Inputs) -> Call:
        pages = inputs.permutation(3000)
        old, free = pages[: len(runs)].tolist(), pages[len(runs) :].tolist()
        last = [_placed(inputs, prefix, page_size, page) for (prefix, _), page in zip(runs, old)]
        slots, taken = [], 0
        for (prefix, length), own in zip(runs, old):
            current = own
            for position in range(prefix, length):
                if position % page_size == 0:
                    current, taken = free[taken], taken + 1
                slots.append(current * page_size + position % page_size)
        out, num_pages = inputs.blank((len(slots) + extra,), torch.int32), inputs.blank((1,), torch.int32)
        prefix_lens, new_lens = inputs.int_list([run[0] for run in runs]), inputs.int_list([run[1] for run in runs])
        args = (out, num_pages, prefix_lens, new_lens, inputs.int_list(last), inputs.int_list(free[: taken + extra]), page_size)
        written = torch.tensor(slots, dtype=torch.int64)
        return Call(args, [Output(out[: len(slots)], written, None), Output(num_pages, torch.tensor([taken]), None)])

    return Case("alloc_extend", f"{len(runs)}requests-page{page_size}-extra{extra}", build, ("cpu",))


def _alloc_decode(lens: list[int], page_size: int, extra: int) -> Case:
    def build(inputs: Inputs) -> Call:
        pages = inputs.permutation(3000)
        old, free = pages[: len(lens)].tolist(), pages[len(lens) :].tolist()
        last = [_placed(inputs, length - 1, page_size, page) if length > 0 else -77 for length, page in zip(lens, old)]
        slots, taken = [], 0
        for length, own in zip(lens, old):
            if length <= 0:
                slots.append(-1)
            elif (length - 1) % page_size:
                slots.append(own * page_size + (length - 1) % page_size)
            else:
                slots.append(free[taken] * page_size)
                taken += 1
        out, num_pages = inputs.blank((len(lens),), torch.int32), inputs.blank((1,), torch.int32)
        args = (out, num_pages, inputs.int_list(lens), inputs.int_list(last), inputs.int_list(free[: taken + extra]), page_size)
        return Call(args, [Output(out, torch.tensor(slots, dtype=torch.int64), None), Output(num_pages, torch.tensor([taken]), None)])

    return Case("alloc_decode", f"{_size(lens)}-page{page_size}-extra{extra}", build, ("cpu",))


def _table_cases() -> list[Case]:
    cases = [
        _kv_indices(lens, None, 0, layout)
        for lens, layout in [([5], "dense"), ([1, 0, 257, 600], "padded"), ([], "dense"), ([0, 0], "dense")]
    ]
    cases += [
        _kv_indices([9, 300, 4, 0], [2, 44, 4, 0], 7, "padded"),
        _kv_indices([3, 5], [6, 1], 0, "ragged"),
        _kv_indices([17] * 40, None, 3, "dense"),
        _kv_indices([n % 5 for n in range(300)], None, 1, "padded"),
        _kv_indices([LONG], [13], 2, "dense"),
    ]
    cases += [_qo_indptr(lens) for lens in ([], [0], [1, 0, 512, 3], [1] * 200, [n % 7 for n in range(800)])]
    cases += [
        _write_req_to_token(runs, layout)
        for runs, layout in [
            ([(0, 5)], "dense"),
            ([(3, 0), (290, 10), (0, 300)], "padded"),
            ([], "dense"),
            ([(n % 90, n % 4) for n in range(300)], "ragged"),
            ([(7, LONG), (2, 40)], "dense"),
        ]
    ]
    return cases


def _window_cases() -> list[Case]:
    lens, chunks = [9, 300, 4, 0, 600, 131], [3, 40, 4, 0, 1, 131]
    cases = [
        _window_kv_indices(lens, q_lens, window, mapped, 2 * mapped, layout)
        for (q_lens, window, mapped), layout in zip(
            itertools.product([None, chunks], [0, 5, 128, -1], [False, True]), itertools.cycle(("dense", "padded", "ragged"))
        )
    ]
    cases += [_window_kv_indices([], None, 4, False, 0, "dense"), _window_kv_indices([0, 0], [0, 3], 4, True, 1, "dense")]
    return cases + [
        _window_kv_indices([77], None, 2**31 - 1, False, 3, "dense"),
        _window_kv_indices([17] * 70, None, 6, False, 0, "padded"),
        _window_kv_indices([n % 5 for n in range(300)], None, 2, True, 0, "dense"),
        _window_kv_indices([LONG], [9], LONG - 20, True, 3, "dense"),
    ]


def _page_cases() -> list[Case]:
    lens = [9, 300, 0, 16, 17, 599, -3, 1]
    cases = [
        make(lens, page_size, extra, layout)
        for make in (_page_table, _mla_indices)
        for page_size, extra, layout in [(1, 0, "dense"), (16, 3, "padded"), (64, 1, "ragged"), (3, 0, "padded"), (1000, 2, "dense")]
    ]
    cases += [make(few, 16, 0, "dense") for make in (_page_table, _mla_indices) for few in ([], [0, 0])]
    cases += [make([33 + n for n in range(70)], 16, 5, "dense") for make in (_page_table, _mla_indices)]
    many = [n % 40 for n in range(300)]
    cases += [make(few, page_size, 1, "dense") for make in (_page_table, _mla_indices) for few, page_size in [(many, 16), ([LONG], 1)]]
    cases += [_page_table_of_holes()]
    return cases + [
        _last_page_len(few, page_size) for few, page_size in [(lens, 16), (lens, 1), (lens, 7), ([], 4), ([2**31 - 1], 64), (many, 9)]
    ]


def _draft_cases() -> list[Case]:
    lens = [9, 130, 0, 1, 257]
    cases = [
        _draft_kv_indices(lens, steps, topk, listed, extra, layout)
        for (steps, topk), listed, (extra, layout) in zip(
            [(1, 1), (3, 1), (1, 4), (4, 2), (5, 8), (3, 4)], itertools.cycle((True, False)), itertools.cycle([(0, "dense"), (6, "padded")])
        )
    ]
    cases += [_draft_kv_indices(lens, 3, 4, listed, 2, "ragged") for listed in (False, True)]
    cases += [_draft_kv_indices([n % 5 for n in range(260)], 1, 2, False, 1, "dense"), _draft_kv_indices([LONG], 2, 2, False, 3, "padded")]
    return cases + [_draft_kv_indices([], 2, 2, False, 0, "dense"), _draft_kv_indices([-4, 6], 2, 3, True, 0, "dense")]


def _alloc_cases() -> list[Case]:
    runs = [(0, 5), (3, 4), (7, 16), (16, 17), (16, 16), (9, 4), (30, 131), (0, 64), (31, 33), (5, 16)]
    cases = [_alloc_extend(runs, page_size, extra) for page_size, extra in [(1, 0), (16, 3), (64, 0), (3, 1), (1000, 2)]]
    cases += [_alloc_extend(few, 16, 1) for few in ([], [(4, 4), (9, 9)], [(40, 47)])]
    cases += [_alloc_extend([(n * 7 % 50, n * 7 % 50 + n * 13 % 90) for n in range(130)], 16, 4)]
    cases += [_alloc_extend([(n % 9, n % 9 + n % 7) for n in range(300)], 4, 1), _alloc_extend([(5, LONG), (6, 9)], 16, 3)]
    lens = [1, 16, 17, 0, 33, 2, 64, 65, -4, 49]
    cases += [_alloc_decode(lens, page_size, extra) for page_size, extra in [(1, 0), (16, 3), (64, 0), (3, 1)]]
    return cases + [_alloc_decode([], 16, 1), _alloc_decode([5 + n for n in range(300)], 16, 0)]


def all_cases() -> list[Case]:
    return _table_cases() + _window_cases() + _page_cases() + _draft_cases() + _alloc_cases()
