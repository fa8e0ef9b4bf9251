"""The picture in a report."""

import base64
from xml.etree import ElementTree as ET

import pytest

from tasks.plot import draw_pace

BAR = "#2563eb"


def drawn(pace: dict[int, int], seconds: float) -> ET.Element:
    return ET.fromstring(base64.b64decode(draw_pace(pace, seconds, "a & b").partition(",")[2]))


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
    pace = dict.fromkeys(range(int(seconds) + 1), 1000000)
    heights = bars(drawn(pace, seconds))
    assert 1 <= len(heights) <= 60
    assert max(heights) <= 160


def test_a_run_that_made_nothing_has_an_empty_picture() -> None:
    assert set(bars(drawn({}, 5.0))) == {0.0}
