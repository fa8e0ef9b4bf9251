"""Plots for reports: SVG in a Markdown artifact, for light and dark pages."""

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from statistics import median
from xml.sax.saxutils import escape

from millrace.formatting import clean_text

_WIDTH, _HEIGHT = 720, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 76, 36, 44
_PLOT_WIDTH, _PLOT_HEIGHT = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
_PLOT_BOTTOM = _TOP + _PLOT_HEIGHT
_MAX_BARS = 60
_MAX_TICKS, _MAX_WINDOW_TICKS = 5, 8
_MAX_TEXT_LENGTH = 100  # characters
# Colours that are readable on white and on black, since an image does not know the page's colour.
_INK, _BAR, _ACCENT = "#7f8791", "#2563eb", "#d97706"
_LINE_COLOURS = (_BAR, _ACCENT, "#0d9488", "#c026d3", "#65a30d", "#dc2626")
_EQUAL, _TINY = 1e-9, 1e-300  # relative and absolute differences without ticks of their own
_MAX_NAME = 11  # characters of a line's name beside the plot


@dataclass(frozen=True, slots=True)
class _Axis:
    """Range of an axis, and the values that are written beside the axis."""

    ticks: tuple[float, ...]
    low: float
    high: float

    def place(self, value: float) -> float:
        """Return the share of the axis below a value."""
        return (value - self.low) / (self.high - self.low)


def draw_rate(bytes_by_second: Mapping[int, int], seconds: float, title: str) -> str:
    """Draw bars of MB/s over the seconds of a run, as a data URI.

    Args:
        bytes_by_second: Bytes in each second.
        seconds: Duration of the run.
        title: Title above the plot.
    """
    span = max(1, math.ceil(max(seconds, max(bytes_by_second, default=0) + 1)))
    width = math.ceil(span / _MAX_BARS)
    bars = [0.0] * math.ceil(span / width)
    for second, size in bytes_by_second.items():
        bars[second // width] += size / width / 1e6
    rates = _fit_axis(0.0, max(bars))
    times = _fit_axis(0, len(bars) * width, is_whole=True, is_tight=True)
    drawn = [*_draw_frame(title, "seconds since the start"), *_draw_y_axis(rates, "MB/s")]
    drawn += [_draw_x_tick(times.place(tick), tick) for tick in times.ticks]
    drawn += _draw_bars([rates.place(value) for value in bars], opacity=1.0)
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
    counts = _fit_axis(0, max(taken.values()), is_whole=True)
    sizes = [norm for each in norms.values() for norm in each]
    scale = _fit_axis(0.0, max(sizes, default=0.0))
    drawn = [*_draw_frame(title, "window"), *_draw_y_axis(counts, "gradients", _BAR)]
    drawn += _draw_y_axis(scale, "L2 norm", _ACCENT, is_right=True)
    drawn += _draw_bars([counts.place(taken[number]) for number in numbers], opacity=0.5)
    middles: list[str] = []
    for at, number in enumerate(numbers):
        if not norms[number]:
            continue
        x, each = _LEFT + (at + 0.5) * step, norms[number]
        low, middle, high = (
            _place_y(scale.place(norm)) for norm in (min(each), median(each), max(each))
        )
        drawn.append(f'<path d="M{x:.2f} {low:.2f}V{high:.2f}" stroke="{_ACCENT}"/>')
        middles.append(f"{x:.2f},{middle:.2f}")
    drawn.append(
        f'<polyline points="{" ".join(middles)}" fill="none" stroke="{_ACCENT}" stroke-width="2"/>'
    )
    every = math.ceil(len(numbers) / _MAX_WINDOW_TICKS)
    drawn += [
        _draw_x_tick((at + 0.5) / len(numbers), numbers[at]) for at in range(0, len(numbers), every)
    ]
    return _make_data_uri("".join(drawn))


def draw_line(values: Mapping[int, float], title: str, x_label: str, y_label: str = "") -> str:
    """Draw a line over whole numbers, as a data URI. The axes fit the values.

    Args:
        values: Values by their positions on the x axis.
        title: Title above the plot.
        x_label: Label of the x axis.
        y_label: Label of the y axis.
    """
    return draw_lines({"": values}, title, x_label, y_label)


def draw_lines(
    lines: Mapping[str, Mapping[int, float]], title: str, x_label: str, y_label: str = ""
) -> str:
    """Draw lines over whole numbers, as a data URI. The axes fit the values.

    Args:
        lines: Values by their positions on the x axis, by the names of the lines. Names are written
            on the right, in the colours of their lines. Empty lines are left out.
        title: Title above the plot.
        x_label: Label of the x axis.
        y_label: Label of the y axis.
    """
    drawn_lines = {name: values for name, values in lines.items() if values}
    numbers = sorted({number for values in drawn_lines.values() for number in values}) or [0]
    heights = [height for values in drawn_lines.values() for height in values.values()] or [0.0]
    up = _fit_axis(min(heights), max(heights))
    across = _fit_axis(numbers[0], numbers[-1], is_whole=True, is_tight=True)
    drawn = [*_draw_frame(title, x_label), *_draw_y_axis(up, y_label)]
    for (name, values), colour in zip(drawn_lines.items(), cycle(_LINE_COLOURS)):
        points = " ".join(
            f"{_LEFT + across.place(number) * _PLOT_WIDTH:.2f},"
            f"{_place_y(up.place(values[number])):.2f}"
            for number in sorted(values)
        )
        drawn.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
        y = _place_y(up.place(values[max(values)])) + 4
        drawn.append(_draw_text(_WIDTH - _RIGHT + 4, y, name[:_MAX_NAME], colour, "start"))
    drawn += [_draw_x_tick(across.place(tick), tick) for tick in across.ticks]
    return _make_data_uri("".join(drawn))


def _fit_axis(
    least: float, most: float, *, is_whole: bool = False, is_tight: bool = False
) -> _Axis:
    """Return an axis for values, with ticks at multiples of 1, 2 or 5 times a power of ten.

    Args:
        least: Smallest value.
        most: Largest value.
        is_whole: Whether the values are counts, so that no tick is a fraction.
        is_tight: Whether the axis ends at the values; otherwise the axis ends at ticks.
    """
    size = max(abs(least), abs(most))
    if is_whole:
        most = max(most, least + 1)
    elif most - least <= max(_EQUAL * size, _TINY):
        most = least + (size if size > _TINY else 1.0)
    step = _round_up((most - least) / _MAX_TICKS)
    if is_whole:
        step = max(1.0, step)
    first, last = math.floor(least / step), math.ceil(most / step)
    if is_tight:
        ticks = [n * step for n in range(first, last + 1) if least <= n * step <= most]
        return _Axis(tuple(ticks), least, most)
    ticks = [n * step for n in range(first, last + 1)]
    return _Axis(tuple(ticks), ticks[0], ticks[-1])


def _round_up(value: float) -> float:
    """Return the next 1, 2 or 5 times a power of ten."""
    unit = 10.0 ** math.floor(math.log10(value))
    return next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= value * 0.999)


def _place_y(share: float) -> float:
    return _PLOT_BOTTOM - share * _PLOT_HEIGHT


def _draw_frame(title: str, x_label: str) -> list[str]:
    """Draw the title, the line at the bottom, and the label of the x axis."""
    return [
        _draw_text(_LEFT, 20, title, anchor="start"),
        f'<path d="M{_LEFT} {_PLOT_BOTTOM}H{_WIDTH - _RIGHT}" stroke="{_INK}"/>',
        _draw_text(_LEFT + _PLOT_WIDTH / 2, _HEIGHT - 8, x_label),
    ]


def _draw_y_axis(
    axis: _Axis, label: str, colour: str = _INK, *, is_right: bool = False
) -> list[str]:
    """Draw the label and the numbers of a y axis. The left axis also has the lines of the grid."""
    x, anchor = (_WIDTH - _RIGHT + 8, "start") if is_right else (_LEFT - 8, "end")
    at, middle = (_WIDTH - 12 if is_right else 20), _TOP + _PLOT_HEIGHT / 2
    drawn = [
        f'<g transform="rotate(-90 {at} {middle:g})">{_draw_text(at, middle, label, colour)}</g>'
    ]
    for tick in axis.ticks:
        y = _place_y(axis.place(tick))
        drawn.append(_draw_text(x, y + 4, _format_number(tick), colour, anchor))
        if not is_right:
            line = f'd="M{_LEFT} {y:.2f}H{_WIDTH - _RIGHT}"'
            drawn.append(f'<path {line} stroke="{_INK}" stroke-opacity="0.3"/>')
    return drawn


def _draw_x_tick(share: float, value: float) -> str:
    return _draw_text(_LEFT + share * _PLOT_WIDTH, _PLOT_BOTTOM + 18, _format_number(value))


def _format_number(value: float) -> str:
    return f"{value:,.6g}" if abs(value) < 1e6 else f"{value:.3g}"


def _draw_bars(shares: Sequence[float], *, opacity: float) -> list[str]:
    """Draw bars side by side, each a share of the height."""
    step, drawn = _PLOT_WIDTH / len(shares), list[str]()
    for number, part in enumerate(shares):
        height = part * _PLOT_HEIGHT
        position = f'x="{_LEFT + number * step:.2f}" y="{_PLOT_BOTTOM - height:.2f}"'
        size = f'width="{max(1.0, step - 1):.2f}" height="{height:.2f}"'
        drawn.append(f'<rect {position} {size} fill="{_BAR}" fill-opacity="{opacity:g}"/>')
    return drawn


def _draw_text(x: float, y: float, text: str, colour: str = _INK, anchor: str = "middle") -> str:
    position = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{colour}"'
    return f"<text {position}>{escape(clean_text(text, _MAX_TEXT_LENGTH))}</text>"


def _make_data_uri(inside: str) -> str:
    size = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}"'
    font = 'font-family="sans-serif" font-size="12"'
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>{inside}</svg>'
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()
