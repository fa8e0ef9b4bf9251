"""Plots for reports: SVG in a Markdown artifact."""

import base64
import math
from collections.abc import Mapping, Sequence
from statistics import median
from xml.sax.saxutils import escape

from millrace.formatting import clean_text

_WIDTH, _HEIGHT = 720, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 36, 44
_PLOT_WIDTH, _PLOT_HEIGHT = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
_PLOT_BOTTOM = _TOP + _PLOT_HEIGHT
_MAX_BARS = 60
_GRID_SHARES = (0.0, 0.5, 1.0)  # of the height, for the lines of the grid
_MAX_TEXT_LENGTH = 100  # characters
_INK, _GREY, _LINE, _BAR = "#1f2937", "#4b5563", "#d1d5db", "#2563eb"
_ACCENT = "#b45309"


def draw_pace(pace: Mapping[int, int], seconds: float, title: str) -> str:
    """Draw bars of MB/s over the seconds of a run, as a data URI.

    Args:
        pace: Bytes in each second.
        seconds: Duration of the run.
        title: Title above the plot.
    """
    span = max(1, math.ceil(max(seconds, max(pace, default=0) + 1)))
    width = math.ceil(span / _MAX_BARS)
    bars = [0.0] * math.ceil(span / width)
    for second, size in pace.items():
        bars[second // width] += size / width / 1e6
    top = _round_up(max(bars))
    drawn = [*_draw_frame(title, "seconds since the start"), *_draw_scale(top, _GREY)]
    drawn += [
        _draw_text(_LEFT + part * _PLOT_WIDTH, _PLOT_BOTTOM + 18, f"{part * len(bars) * width:g}")
        for part in _GRID_SHARES
    ]
    drawn += _draw_bars([value / top for value in bars], opacity=1.0)
    middle = _TOP + _PLOT_HEIGHT / 2
    drawn.append(
        f'<g transform="rotate(-90 16 {middle})">{_draw_text(16, middle, "MB/s", _INK)}</g>'
    )
    return _make_data_uri("".join(drawn))


def draw_windows(taken: Mapping[int, int], norms: Mapping[int, Sequence[float]], title: str) -> str:
    """Draw bars of the gradients of each window, and a line of their norms, as a data URI.

    Args:
        taken: Number of gradients by the window's number.
        norms: Norms of the gradients by the window's number.
        title: Title above the plot.
    """
    numbers = sorted(taken)
    step = _PLOT_WIDTH / len(numbers)
    most = _round_up(max(taken.values()))
    top = _round_up(max((norm for each in norms.values() for norm in each), default=0.0))
    drawn = [*_draw_frame(title, "window"), *_draw_scale(most, _BAR)]
    for part in _GRID_SHARES:
        y = _PLOT_BOTTOM - part * _PLOT_HEIGHT - 4
        drawn.append(_draw_text(_LEFT + 4, y, f"{top * part:g}", _ACCENT, "start"))
    drawn += _draw_bars([taken[number] / most for number in numbers], opacity=0.35)
    middles: list[str] = []
    for at, number in enumerate(numbers):
        if not norms[number]:
            continue
        x, each = _LEFT + (at + 0.5) * step, norms[number]
        low, middle, high = (
            _PLOT_BOTTOM - norm / top * _PLOT_HEIGHT
            for norm in (min(each), median(each), max(each))
        )
        drawn.append(f'<path d="M{x:.2f} {low:.2f}V{high:.2f}" stroke="{_ACCENT}"/>')
        middles.append(f"{x:.2f},{middle:.2f}")
    drawn.append(
        f'<polyline points="{" ".join(middles)}" fill="none" stroke="{_ACCENT}" stroke-width="2"/>'
    )
    drawn += [
        _draw_text(_LEFT + (at + 0.5) * step, _PLOT_BOTTOM + 18, f"{numbers[at]}")
        for at in sorted({0, len(numbers) // 2, len(numbers) - 1})
    ]
    return _make_data_uri("".join(drawn))


def draw_line(values: Mapping[int, float], title: str, x_label: str) -> str:
    """Draw a line, as a data URI.

    Args:
        values: Values by their positions on the x axis.
        title: Title above the plot.
        x_label: Label of the x axis.
    """
    numbers = sorted(values)
    top, span = _round_up(max(values.values())), max(1, numbers[-1] - numbers[0])
    drawn = [*_draw_frame(title, x_label), *_draw_scale(top, _GREY)]
    points: list[str] = []
    for number in numbers:
        x = _LEFT + (number - numbers[0]) / span * _PLOT_WIDTH
        points.append(f"{x:.2f},{_PLOT_BOTTOM - max(0.0, values[number]) / top * _PLOT_HEIGHT:.2f}")
    line = " ".join(points)
    drawn.append(f'<polyline points="{line}" fill="none" stroke="{_BAR}" stroke-width="2"/>')
    drawn += [
        _draw_text(
            _LEFT + (number - numbers[0]) / span * _PLOT_WIDTH, _PLOT_BOTTOM + 18, f"{number}"
        )
        for number in sorted({numbers[0], numbers[len(numbers) // 2], numbers[-1]})
    ]
    return _make_data_uri("".join(drawn))


def _draw_frame(title: str, x_label: str) -> list[str]:
    """Draw the title, the lines of the grid, and the label of the x axis."""
    lines = [_PLOT_BOTTOM - part * _PLOT_HEIGHT for part in _GRID_SHARES]
    return [
        _draw_text(_LEFT, 20, title, _INK, "start"),
        *(f'<path d="M{_LEFT} {y}H{_WIDTH - _RIGHT}" stroke="{_LINE}"/>' for y in lines),
        _draw_text(_LEFT + _PLOT_WIDTH / 2, _HEIGHT - 8, x_label, _INK),
    ]


def _draw_scale(top: float, colour: str) -> list[str]:
    """Draw the numbers to the left of the lines."""
    return [
        _draw_text(
            _LEFT - 8, _PLOT_BOTTOM - part * _PLOT_HEIGHT + 4, f"{top * part:g}", colour, "end"
        )
        for part in _GRID_SHARES
    ]


def _draw_bars(shares: Sequence[float], *, opacity: float) -> list[str]:
    """Draw bars side by side, each a share of the height."""
    step, drawn = _PLOT_WIDTH / len(shares), list[str]()
    for number, part in enumerate(shares):
        height = part * _PLOT_HEIGHT
        position = f'x="{_LEFT + number * step:.2f}" y="{_PLOT_BOTTOM - height:.2f}"'
        size = f'width="{max(1.0, step - 1):.2f}" height="{height:.2f}"'
        drawn.append(f'<rect {position} {size} fill="{_BAR}" fill-opacity="{opacity:g}"/>')
    return drawn


def _draw_text(x: float, y: float, text: str, colour: str = _GREY, anchor: str = "middle") -> str:
    position = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{colour}"'
    return f"<text {position}>{escape(clean_text(text, _MAX_TEXT_LENGTH))}</text>"


def _make_data_uri(inside: str) -> str:
    size = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}"'
    font = 'font-family="sans-serif" font-size="12"'
    ground = f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>'
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>{ground}{inside}</svg>'
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()


def _round_up(value: float) -> float:
    """Return the next 1, 2 or 5 times a power of ten."""
    if value <= 0:
        return 1.0
    unit = 10.0 ** math.floor(math.log10(value))
    return next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= value)
