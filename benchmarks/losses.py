"""A picture of losses over windows, as SVG."""

from pathlib import Path
from xml.sax.saxutils import escape

_WIDE, _HIGH, _LEFT, _LOW = 720, 320, 56, 40
_COLOURS = ("#6b7280", "#dc2626", "#2563eb", "#059669", "#b45309", "#7c3aed")


def draw(curves: dict[str, list[list[float]]], file: Path, what: str) -> None:
    """Draw lines of losses; what is above twice the first is cut off.

    Args:
        curves: The loss after each window: lines of one colour by their name.
        file: Where to.
        what: Below the picture.
    """
    every = [loss for lines in curves.values() for line in lines for loss in line]
    first = max(line[0] for lines in curves.values() for line in lines)
    top = min(2 * first, max(loss for loss in every if loss < float("inf")))
    bottom = min(every)
    longest = max(len(line) for lines in curves.values() for line in lines) - 1
    drawn: list[str] = []

    def y_of(loss: float) -> float:
        share = (top - min(loss, top)) / (top - bottom)
        return 16 + share * (_HIGH - 16 - _LOW)

    for number, (name, lines) in enumerate(curves.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        for line in lines:
            points = " ".join(
                f"{_LEFT + at / longest * (_WIDE - _LEFT - 16):.1f},{y_of(loss):.1f}"
                for at, loss in enumerate(line)
            )
            drawn.append(f'<polyline points="{points}" fill="none" stroke="{colour}"/>')
        drawn.append(
            f'<text x="{_WIDE - 16}" y="{32 + 18 * number}" text-anchor="end" '
            f'fill="{colour}">{escape(name)}</text>'
        )
    drawn += [
        f'<text x="{_LEFT - 8}" y="{y_of(loss) + 4:.1f}" text-anchor="end">{loss:.2f}</text>'
        for loss in (top, (top + bottom) / 2, bottom)
    ]
    drawn.append(
        f'<text x="{_WIDE / 2}" y="{_HIGH - 10}" text-anchor="middle">{escape(what)}, 0 to '
        f"{longest}; loss on text that nobody has seen</text>"
    )
    file.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDE} {_HIGH}" '
        f'font-family="sans-serif" font-size="12"><rect width="{_WIDE}" height="{_HIGH}" '
        f'fill="#ffffff"/>{"".join(drawn)}</svg>\n'
    )
