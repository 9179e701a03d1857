import base64
import html
import io
import re
import xml.etree.ElementTree as ElementTree
from itertools import combinations

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.text import Text
from PIL import Image

from blockshock_lib.report import figures
from blockshock_lib.studies.linear import STUDY
from tests.report import frames


def embedded(fig):
    """What `show` makes of a figure: its alternative text, its kind and its bytes."""
    parts = r'alt="([^"]*)".*src="data:image/([^;]+);base64,([^"]+)"'
    alt, kind, data = re.search(parts, figures.show(fig).data).groups()
    return html.unescape(alt), kind, base64.b64decode(data)


def test_a_figure_is_an_svg_of_all_its_words_its_text_escaped_and_one_of_very_many_shapes_a_fine_png():
    fig = figures.empty('A "quoted" title', "t < 1 & nothing else")
    alt, kind, data = embedded(fig)
    assert alt == fig.alt and "t < 1 & nothing else" in alt
    root = ElementTree.fromstring(data)
    assert kind == "svg+xml" and "".join(root.itertext()).count("quoted") == 1
    filled = {style for one in root.iter() if "fill: #ffffff" in (style := one.get("style", ""))}
    assert not filled, "its ground is not transparent"
    fig = STUDY.figures["speed over B1"](frames.make((4096, 8192), (16, 256), groups=3, repeats=4))
    wanted = {text.get_text() for text in fig.findobj(Text) if text.get_visible() and text.get_text().strip()}
    assert sum("×" in text and "." in text for text in wanted) >= 3
    drawn = "".join(ElementTree.fromstring(embedded(fig)[2]).itertext())
    assert not [text for text in wanted if not all(line in drawn for line in text.split("\n"))]
    with figures.drawing(4, 2, "many", alt="many") as (fig, grid):
        grid[0, 0].scatter(range(4000), range(4000), s=range(4000))
    _, kind, data = embedded(fig)
    assert kind == "png" and Image.open(io.BytesIO(data)).width == 800 and len(figures.svg(fig)) > len(data)


def test_drawing_leaves_no_open_figure_no_changed_setting_and_the_same_bytes():
    before, settings = plt.get_fignums(), dict(mpl.rcParams)
    for made in (figures.png, figures.svg):
        assert made(figures.empty("t", "w")) == made(figures.empty("t", "w"))
    assert plt.get_fignums() == before and dict(mpl.rcParams) == settings


def test_names_of_a_crowd_of_points_cover_neither_each_other_nor_the_points_and_stay_inside():
    points = [(0.1 * (n % 4), 0.02 * n) for n in range(12)]
    with figures.drawing(5, 4, "crowd", alt="points") as (fig, grid):
        ax = grid[0, 0]
        ax.plot(*zip(*points, strict=True), "o")
        figures.name_points(ax, points, [f"4096, {2**n}" for n in range(12)])
    fig.draw_without_rendering()
    boxes = [text.get_window_extent().padded(-1) for text in ax.texts]
    assert len(boxes) == 12 and all(ax.bbox.contains(*corner) for box in boxes for corner in box.corners())
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))
    assert not any(box.contains(*dot) for box in boxes for dot in ax.transData.transform(points))
