import numpy as np
from matplotlib.text import Text

from blockshock_lib.report import figures, tile_plots

CHECKER = np.tile(np.kron(np.eye(2, dtype=bool), np.ones((2, 2), dtype=bool)), (4, 4))


def words(fig):
    return " ".join(text.get_text().replace("\n", " ") for text in fig.findobj(Text))


def test_tiles_are_counted_the_commonest_first():
    keep = CHECKER.copy()
    keep[:4, :4] = ~keep[:4, :4]
    (first, many), (second, one) = tile_plots.tile_counts(keep)
    assert (many, one) == (15, 1)
    assert np.array_equal(first, CHECKER[:4, :4]) and np.array_equal(second, ~CHECKER[:4, :4])


def test_the_title_says_what_the_pixels_are():
    assert "2:4 along the inputs and the outputs: one 4x4 tile repeated" in words(
        tile_plots.tiles_figure(CHECKER, "checkerboard")
    )
    stripes = np.tile([True, True, False, False], (8, 4))
    assert "2:4 along the inputs only" in words(tile_plots.tiles_figure(stripes, "stripes"))
    broken = CHECKER.copy()
    broken[0, 0] = False
    assert "not 2:4: 2 different tiles in 16" in words(tile_plots.tiles_figure(broken, "broken"))
    assert "nothing to draw" in words(tile_plots.tiles_figure(CHECKER[:, :6], "odd"))


def test_the_image_holds_every_weight_once_with_a_line_beside_it():
    image = tile_plots._pixels(CHECKER)
    assert (image == 1).sum() == (image == 2).sum() == CHECKER.sum() * (tile_plots._CELL - 1) ** 2
    assert len(figures.png(tile_plots.tiles_figure(CHECKER, "checkerboard"))) < 40_000
