import pytest
import torch

from blockshock_lib.studies.linear.report import masks
from tests.report.frames import words

CHECKER = torch.eye(2, dtype=torch.bool).repeat_interleave(2, 0).repeat_interleave(2, 1).repeat(4, 4)
STRIPES = torch.tensor([True, True, False, False]).repeat(8, 4)
BROKEN = CHECKER.index_put((torch.tensor(0), torch.tensor(0)), torch.tensor(False))


@pytest.mark.parametrize(
    "corners, title",
    [
        ({"checkerboard": CHECKER}, "checkerboard is 2:4 along the inputs and the outputs"),
        ({"stripes": STRIPES}, "stripes is 2:4 along the inputs only"),
        ({"broken": BROKEN}, "broken is not 2:4"),
        ({"one": CHECKER, "other": STRIPES}, "All 2 masks are 2:4 along the inputs, 1 of them along the outputs too"),
        ({"one": BROKEN, "other": STRIPES}, "1 of 2 masks are 2:4 along the inputs, 0 of them"),
        ({}, "nothing to draw"),
    ],
)
def test_the_title_says_what_the_pixels_are(corners, title):
    assert title in words(masks.masks_figure(corners))


def test_a_pixel_is_a_weight():
    image, large = masks._pixels(STRIPES.numpy()), masks._CELL + masks._WIDE / 4
    assert image.shape == tuple(4 * masks._CELL * n // 4 + masks._WIDE * (n // 4 - 1) for n in STRIPES.shape)
    assert image[0, 0] == 1 and image[0, int(2 * large)] == 2
