"""Small pictures for reports: SVG that stands in a Markdown artifact."""

import base64
import math
from collections.abc import Mapping, Sequence
from statistics import median
from xml.sax.saxutils import escape

from millrace.words import clean_text

_WIDTH, _HEIGHT = 720, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 36, 44
_INNER, _TALL = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
_FLOOR = _TOP + _TALL
_BARS = 60
_PARTS = (0.0, 0.5, 1.0)  # of the height, where a line is
_LONGEST = 100  # characters of a text
_INK, _GREY, _LINE, _BAR = "#1f2937", "#4b5563", "#d1d5db", "#2563eb"
_ACCENT = "#b45309"


def pace_plot(pace: Mapping[int, int], seconds: float, title: str) -> str:
    """Bars of MB/s over the seconds of a run, as a data URI.

    Args:
        pace: Bytes in each second.
        seconds: How long the run was.
        title: Above the picture.
    """
    span = max(1, math.ceil(max(seconds, max(pace, default=0) + 1)))
    width = math.ceil(span / _BARS)
    bars = [0.0] * math.ceil(span / width)
    for second, size in pace.items():
        bars[second // width] += size / width / 1e6
    top = _round_up(max(bars))
    drawn = [*_frame(title, "seconds since the start"), *_scale(top, _GREY)]
    drawn += [
        _text(_LEFT + part * _INNER, _FLOOR + 18, f"{part * len(bars) * width:g}")
        for part in _PARTS
    ]
    drawn += _bars([value / top for value in bars], opacity=1.0)
    middle = _TOP + _TALL / 2
    drawn.append(f'<g transform="rotate(-90 16 {middle})">{_text(16, middle, "MB/s", _INK)}</g>')
    return _data_uri("".join(drawn))


def windows_plot(taken: Mapping[int, int], norms: Mapping[int, Sequence[float]], title: str) -> str:
    """Bars of how many were taken in each window, and their norms above, as a data URI.

    Args:
        taken: How many, by the window's number.
        norms: Of each that was taken.
        title: Above the picture.
    """
    numbers = sorted(taken)
    step = _INNER / len(numbers)
    most = _round_up(max(taken.values()))
    top = _round_up(max((norm for each in norms.values() for norm in each), default=0.0))
    drawn = [*_frame(title, "window"), *_scale(most, _BAR)]
    for part in _PARTS:
        y = _FLOOR - part * _TALL - 4
        drawn.append(_text(_LEFT + 4, y, f"{top * part:g}", _ACCENT, "start"))
    drawn += _bars([taken[number] / most for number in numbers], opacity=0.35)
    middles: list[str] = []
    for at, number in enumerate(numbers):
        if not norms[number]:
            continue
        x, each = _LEFT + (at + 0.5) * step, norms[number]
        low, middle, high = (
            _FLOOR - norm / top * _TALL for norm in (min(each), median(each), max(each))
        )
        drawn.append(f'<path d="M{x:.2f} {low:.2f}V{high:.2f}" stroke="{_ACCENT}"/>')
        middles.append(f"{x:.2f},{middle:.2f}")
    drawn.append(
        f'<polyline points="{" ".join(middles)}" fill="none" stroke="{_ACCENT}" stroke-width="2"/>'
    )
    drawn += [
        _text(_LEFT + (at + 0.5) * step, _FLOOR + 18, f"{numbers[at]}")
        for at in sorted({0, len(numbers) // 2, len(numbers) - 1})
    ]
    return _data_uri("".join(drawn))


def line_plot(values: Mapping[int, float], title: str, below: str) -> str:
    """Draw a line, as a data URI.

    Args:
        values: By what is counted below.
        title: Above the picture.
        below: What is counted.
    """
    numbers = sorted(values)
    top, span = _round_up(max(values.values())), max(1, numbers[-1] - numbers[0])
    drawn = [*_frame(title, below), *_scale(top, _GREY)]
    points: list[str] = []
    for number in numbers:
        x = _LEFT + (number - numbers[0]) / span * _INNER
        points.append(f"{x:.2f},{_FLOOR - max(0.0, values[number]) / top * _TALL:.2f}")
    line = " ".join(points)
    drawn.append(f'<polyline points="{line}" fill="none" stroke="{_BAR}" stroke-width="2"/>')
    drawn += [
        _text(_LEFT + (number - numbers[0]) / span * _INNER, _FLOOR + 18, f"{number}")
        for number in sorted({numbers[0], numbers[len(numbers) // 2], numbers[-1]})
    ]
    return _data_uri("".join(drawn))


def _frame(title: str, below: str) -> list[str]:
    """Draw the title, the lines, and the unit of the axis."""
    lines = [_FLOOR - part * _TALL for part in _PARTS]
    return [
        _text(_LEFT, 20, title, _INK, "start"),
        *(f'<path d="M{_LEFT} {y}H{_WIDTH - _RIGHT}" stroke="{_LINE}"/>' for y in lines),
        _text(_LEFT + _INNER / 2, _HEIGHT - 8, below, _INK),
    ]


def _scale(top: float, colour: str) -> list[str]:
    """Draw the numbers to the left of the lines."""
    return [
        _text(_LEFT - 8, _FLOOR - part * _TALL + 4, f"{top * part:g}", colour, "end")
        for part in _PARTS
    ]


def _bars(parts: Sequence[float], *, opacity: float) -> list[str]:
    """Bars side by side, each of a part of the height."""
    step, drawn = _INNER / len(parts), list[str]()
    for number, part in enumerate(parts):
        tall = part * _TALL
        place = f'x="{_LEFT + number * step:.2f}" y="{_FLOOR - tall:.2f}"'
        size = f'width="{max(1.0, step - 1):.2f}" height="{tall:.2f}"'
        drawn.append(f'<rect {place} {size} fill="{_BAR}" fill-opacity="{opacity:g}"/>')
    return drawn


def _text(x: float, y: float, words: str, colour: str = _GREY, anchor: str = "middle") -> str:
    place = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{colour}"'
    return f"<text {place}>{escape(clean_text(words, _LONGEST))}</text>"


def _data_uri(inside: str) -> str:
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
