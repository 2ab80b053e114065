"""A picture of what the GPU did, from a profiler trace: a lane per kind of work, decode steps with and without overlap in turn."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

Event = tuple[float, float, str]  # start and end in microseconds, name

# the first that a name contains
KINDS = (
    ("attention", ("decode_", "extend_", "attention"), "#d95f02"),
    ("linear layers", ("skinny", "nvjet", "gemm", "splitK", "cublas"), "#1b6ca8"),
    ("copies", ("Memcpy", "Memset", "direct_copy"), "#666666"),
    ("norms, rope, gates, sampling", ("",), "#4d9a3f"),
)
WIDTH, LEFT, LANE, GAP = 1000, 190, 16, 5


def svg(panels: Sequence[tuple[str, Sequence[Event]]]) -> str:
    """One panel per (title, events); all have the time scale of the longest."""
    longest = max(events[-1][1] - events[0][0] for _, events in panels)
    height = sum(_panel_height() for _ in panels) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH + LEFT + 20} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH + LEFT + 20}" height="{height}" fill="white"/>',
    ]
    top = 10
    for title, events in panels:
        parts += _panel(title, events, top, WIDTH / longest)
        top += _panel_height()
    parts.append(_scale(longest, top))
    return "\n".join([*parts, "</svg>", ""])


def _panel_height() -> int:
    return 24 + len(KINDS) * (LANE + GAP) + 10


def _panel(title: str, events: Sequence[Event], top: int, scale: float) -> list[str]:
    start = events[0][0]
    parts = [f'<text x="6" y="{top + 12}" font-weight="bold">{escape(title)}</text>']
    for lane, (kind, _, colour) in enumerate(KINDS):
        y = top + 24 + lane * (LANE + GAP)
        parts.append(f'<text x="6" y="{y + 12}">{escape(kind)}</text>')
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{WIDTH}" height="{LANE}" fill="#f2f2f2"/>')
        # neighbours closer than a pixel are drawn as one: thousands of rectangles would show nothing more
        for left, right in _joined([(e[0], e[1]) for e in events if kind_of(e[2]) == kind], 1 / scale):
            parts.append(
                f'<rect x="{LEFT + (left - start) * scale:.1f}" y="{y}" width="{max(0.4, (right - left) * scale):.1f}" height="{LANE}" '
                f'fill="{colour}"/>'
            )
    return parts


def _joined(spans: Sequence[tuple[float, float]], closer_than: float) -> list[list[float]]:
    joined: list[list[float]] = []
    for left, right in spans:
        if joined and left - joined[-1][1] < closer_than / 4:
            joined[-1][1] = max(joined[-1][1], right)
        else:
            joined.append([left, right])
    return joined


def kind_of(name: str) -> str:
    return next(kind for kind, words, _ in KINDS if any(word in name for word in words))


def _scale(longest: float, top: int) -> str:
    return f'<text x="{LEFT}" y="{top + 8}">0</text><text x="{LEFT + WIDTH - 60}" y="{top + 8}">{longest / 1000:.1f} ms</text>'
