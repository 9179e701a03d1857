import base64
import html
import io
import re

import matplotlib as mpl
import matplotlib.pyplot as plt
from PIL import Image

from blockshock_lib.report import figures


def test_show_gives_an_image_with_its_alternative_text_escaped():
    fig = figures.empty('A "quoted" title', "t < 1 & nothing else")
    page = figures.show(fig).data
    assert html.unescape(re.search(r'alt="([^"]*)"', page).group(1)) == fig.alt
    assert "t < 1 & nothing else" in fig.alt
    data = base64.b64decode(re.search(r"data:image/png;base64,([^\"]+)", page).group(1))
    assert Image.open(io.BytesIO(data)).format == "PNG"


def test_drawing_leaves_no_open_figure_no_changed_setting_and_the_same_bytes():
    before, settings = plt.get_fignums(), dict(mpl.rcParams)
    assert figures.png(figures.empty("t", "w")) == figures.png(figures.empty("t", "w"))
    assert plt.get_fignums() == before and dict(mpl.rcParams) == settings
