import numpy as np

from blockshock_lib.studies.linear.report import masks
from tests.report.frames import words

CHECKER = np.tile(np.kron(np.eye(2, dtype=bool), np.ones((2, 2), dtype=bool)), (4, 4))


def test_tiles_are_counted_the_commonest_first():
    keep = CHECKER.copy()
    keep[:4, :4] = ~keep[:4, :4]
    (first, many), (second, one) = masks.tile_counts(keep)
    assert (many, one) == (15, 1)
    assert np.array_equal(first, CHECKER[:4, :4]) and np.array_equal(second, ~CHECKER[:4, :4])


def test_the_title_says_what_the_pixels_are():
    way = "2:4 along the inputs and the outputs: one 4x4 tile repeated"
    assert way in words(masks.tiles_figure(CHECKER, "checkerboard"))
    stripes = np.tile([True, True, False, False], (8, 4))
    assert "2:4 along the inputs only" in words(masks.tiles_figure(stripes, "stripes"))
    broken = CHECKER.copy()
    broken[0, 0] = False
    assert "not 2:4: 2 different tiles in 16" in words(masks.tiles_figure(broken, "broken"))
