"""Plot of losses over windows, as SVG."""

from pathlib import Path
from xml.sax.saxutils import escape

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 720, 320, 56, 40
_COLOURS = ("#6b7280", "#dc2626", "#2563eb", "#059669", "#b45309", "#7c3aed")


def plot_losses(curves: dict[str, list[list[float]]], file: Path, caption: str) -> None:
    """Plot losses. Values above twice the first loss are clipped.

    Args:
        curves: Losses after each window, as the lines of each name. A name has one colour.
        file: Path of the SVG file.
        caption: Text below the plot.
    """
    losses = [loss for lines in curves.values() for line in lines for loss in line]
    first = max(line[0] for lines in curves.values() for line in lines)
    top = min(2 * first, max(loss for loss in losses if loss < float("inf")))
    bottom = min(losses)
    longest = max(len(line) for lines in curves.values() for line in lines) - 1
    elements: list[str] = []

    def compute_y(loss: float) -> float:
        fraction = (top - min(loss, top)) / (top - bottom)
        return 16 + fraction * (_HEIGHT - 16 - _BOTTOM)

    for number, (name, lines) in enumerate(curves.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        for line in lines:
            points = " ".join(
                f"{_LEFT + at / longest * (_WIDTH - _LEFT - 16):.1f},{compute_y(loss):.1f}"
                for at, loss in enumerate(line)
            )
            elements.append(f'<polyline points="{points}" fill="none" stroke="{colour}"/>')
        elements.append(
            f'<text x="{_WIDTH - 16}" y="{32 + 18 * number}" text-anchor="end" '
            f'fill="{colour}">{escape(name)}</text>'
        )
    elements += [
        f'<text x="{_LEFT - 8}" y="{compute_y(loss) + 4:.1f}" text-anchor="end">{loss:.2f}</text>'
        for loss in (top, (top + bottom) / 2, bottom)
    ]
    elements.append(
        f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 10}" text-anchor="middle">{escape(caption)}, 0 to '
        f"{longest}; loss on held-out text</text>"
    )
    file.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'font-family="sans-serif" font-size="12"><rect width="{_WIDTH}" height="{_HEIGHT}" '
        f'fill="#ffffff"/>{"".join(elements)}</svg>\n'
    )
