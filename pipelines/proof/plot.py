"""Line plots as plain SVG, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 460, 280, 44, 34, 14, 38
COLOURS = ("#c2410c", "#0f766e", "#6d28d9")


@dataclass(frozen=True)
class Panel:
    """One pair of axes: lines of (step, value) by their names, and a level that is marked."""

    title: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    mark: tuple[str, float] | None


def draw(panels: Sequence[Panel]) -> str:
    """An SVG document."""
    body = "".join(f'<g transform="translate({i * WIDTH},0)">{_panel(panel)}</g>' for i, panel in enumerate(panels))
    size = f'width="{WIDTH * len(panels)}" height="{HEIGHT}" viewBox="0 0 {WIDTH * len(panels)} {HEIGHT}"'
    style = 'font-family="sans-serif" font-size="11" fill="#333"'
    ground = '<rect width="100%" height="100%" fill="#fff"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{ground}{body}</svg>\n'


def _panel(panel: Panel) -> str:
    points = [point for line in panel.lines.values() for point in line]
    most_x = max(x for x, _ in points)
    most_y = 1.1 * max([y for _, y in points] + ([panel.mark[1]] if panel.mark else []))

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            round(LEFT + (WIDTH - LEFT - RIGHT) * x / most_x, 1),
            round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * y / most_y, 1),
        )

    parts = [f'<text x="{LEFT}" y="18" font-size="12" font-weight="bold">{escape(panel.title)}</text>']
    for tick in range(int(most_y) + 1):
        (x0, y), (x1, _) = at(0, tick), at(most_x, tick)
        parts.append(
            f'<path d="M{x0} {y}H{x1}" stroke="#ddd"/><text x="{x0 - 6}" y="{y + 4}" text-anchor="end">{tick}</text>'
        )
    for step in (0, most_x / 2, most_x):
        x, y = at(step, 0)
        parts.append(f'<text x="{x}" y="{y + 15}" text-anchor="middle">{step:.0f}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 6}" text-anchor="middle">training step</text>')
    if panel.mark is not None:
        (x0, y), (x1, _) = at(0, panel.mark[1]), at(most_x, panel.mark[1])
        parts.append(f'<path d="M{x0} {y}H{x1}" stroke="#999" stroke-dasharray="4 3"/>')
        parts.append(f'<text x="{x1}" y="{y - 5}" text-anchor="end" fill="#777">{escape(panel.mark[0])}</text>')
    for number, (name, line) in enumerate(panel.lines.items()):
        path = "L".join(f"{x} {y}" for x, y in (at(*point) for point in line))
        colour = COLOURS[number]
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        y = HEIGHT - BOTTOM - 12 - 16 * (len(panel.lines) - 1 - number)
        parts.append(f'<path d="M{LEFT + 10} {y - 4}h18" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{LEFT + 34}" y="{y}">{escape(name)}</text>')
    return "".join(parts)
