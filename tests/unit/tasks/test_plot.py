"""The picture in a report."""

import base64
import math
import random
from xml.etree import ElementTree as ET

import pytest

from tasks.plot import draw_line, draw_rate, draw_windows

BAR = "#2563eb"


def drawn(bytes_by_second: dict[int, int], seconds: float) -> ET.Element:
    return ET.fromstring(
        base64.b64decode(draw_rate(bytes_by_second, seconds, "a & b").partition(",")[2])
    )


def bars(svg: ET.Element) -> list[float]:
    return [float(e.attrib["height"]) for e in svg.iter() if e.attrib.get("fill") == BAR]


def words(svg: ET.Element) -> list[str]:
    return [element.text for element in svg.iter() if element.text]


def test_the_bars_are_the_bytes_of_each_second() -> None:
    svg = drawn({0: 2_000_000, 2: 1_000_000}, 3.0)
    first, second, third = bars(svg)
    assert (first, second) == (2 * third, 0)
    assert {"a & b", "MB/s", "seconds since the start", "2", "1", "0", "3"} <= set(words(svg))


@pytest.mark.parametrize("seconds", [0.2, 59.0, 61.0, 3600.0, 123_456.0])
def test_however_long_a_run_is_the_picture_stays_legible(seconds: float) -> None:
    bytes_by_second = dict.fromkeys(range(int(seconds) + 1), 1000000)
    heights = bars(drawn(bytes_by_second, seconds))
    assert 1 <= len(heights) <= 60
    assert max(heights) <= 160


def test_a_run_that_made_nothing_has_an_empty_picture() -> None:
    assert set(bars(drawn({}, 5.0))) == {0.0}


def line(values: dict[int, float]) -> ET.Element:
    uri = draw_line(values, "Loss", "windows merged", "Loss")
    return ET.fromstring(base64.b64decode(uri.partition(",")[2]))


def heights(svg: ET.Element) -> list[float]:
    (found,) = (one for one in svg.iter() if one.tag.endswith("polyline"))
    return [float(point.partition(",")[2]) for point in found.attrib["points"].split()]


def test_the_axes_of_a_line_fit_its_values() -> None:
    svg = line({0: 5.5, 8: 3.5, 16: 2.4})
    drop = max(heights(svg)) - min(heights(svg))
    assert drop > 0.75 * 160  # of the height of the plot
    assert {"Loss", "windows merged", "2", "6"} <= set(words(svg))


@pytest.mark.parametrize("most", [1, 2, 3, 7, 10, 4321])
def test_counts_have_whole_ticks(most: int) -> None:
    uri = draw_windows({1: most, 2: 0}, {1: [0.5], 2: []}, "Gradients")
    svg = ET.fromstring(base64.b64decode(uri.partition(",")[2]))
    ticks = [one.text or "" for one in svg.iter() if one.attrib.get("text-anchor") == "end"]
    numbers = [float(tick.replace(",", "")) for tick in ticks]
    assert all(number == int(number) for number in numbers)
    assert numbers[0] == 0
    assert numbers[-1] >= most
    assert {"gradients", "L2 norm", "window"} <= set(words(svg))


@pytest.mark.parametrize(
    "values",
    [
        {3: 1.0}, {0: 2.0, 1: 2.0}, {0: -1.5, 2: -3.0}, {0: 0.0}, {0: 5e-324}, {0: 0.0, 1: 5e-324},
        {0: 1.8862531396169553, 1: 1.8862531396169555},
    ],
)  # fmt: skip
def test_any_line_can_be_drawn(values: dict[int, float]) -> None:
    assert all(30 <= y <= 200 for y in heights(line(values)))


def test_lines_of_almost_equal_values_can_be_drawn() -> None:
    chance = random.Random(7)
    for _ in range(2000):
        values = [chance.choice((-1, 1)) * 10 ** chance.uniform(-320, 12)]
        for _ in range(chance.randrange(4)):
            values.append(values[-1] + math.ulp(values[-1]) * 10 ** chance.randrange(12))
        assert all(30 <= y <= 200 for y in heights(line(dict(enumerate(values)))))


def test_a_picture_has_no_ground_and_only_colours_for_light_and_dark_pages() -> None:
    svg = drawn({0: 2_000_000}, 3.0)
    colours = {one.attrib[name] for one in svg.iter() for name in ("fill", "stroke")
               if name in one.attrib} - {"none"}  # fmt: skip
    for colour in colours:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        red, green, blue = (
            part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
        )
        light = 0.2126 * red + 0.7152 * green + 0.0722 * blue
        on_white, on_dark = 1.05 / (light + 0.05), (light + 0.05) / (0.0123 + 0.05)
        assert min(on_white, on_dark) >= 3, colour
