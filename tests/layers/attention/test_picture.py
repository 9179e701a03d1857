"""A pattern's map of blocks, its picture, and the presets."""

import pytest
import torch

from blockshock_lib import attention
from tests.kernels.attention.dense import listed


@pytest.mark.parametrize("name", attention.PRESETS)
def test_the_map_says_of_each_block_what_its_pairs_say(name):
    pattern = attention.preset(name)
    lists = pattern.lists(520, block=128)
    mask = torch.zeros(640, 640, dtype=torch.bool)
    mask[:520, :520] = listed(lists)
    mask[520:] = mask[519]  # a short block of queries can be full
    counts = mask.view(5, 128, 5, 128).transpose(1, 2).flatten(2).sum(2)
    assert torch.equal(lists.map().long(), (counts > 0).long() + (counts == 128**2))
    assert 0 < lists.block_density <= 1


@pytest.mark.parametrize(("length", "side"), [(1000, 32), (32 * 1024 + 1, 205)])
def test_a_picture_shows_each_visited_block_also_where_a_cell_is_several(length, side):
    pattern = attention.by_head([attention.full(), attention.causal() & attention.block_diagonal(64)])
    ax = attention.picture(pattern, length, 32, head=1)
    shown = torch.from_numpy(ax.images[0].get_array().filled())
    assert shown.shape == (side, side) and (shown.diag() > 0).all() and not shown.triu(1).any()
    assert set(shown.unique().tolist()) <= {0, 1, 2}
    assert ax.get_xlim() == (0, length) and ax.get_ylim() == (length, 0)
    share = (-(-length // 64) * 3 - (length % 64 <= 32) * 2) / (-(-length // 32)) ** 2
    assert ax.get_title().startswith(f"{share:.1%} of blocks visited")
    ax.figure.draw_without_rendering()
    assert min(ax.get_window_extent().size) > side  # no cell is lost between pixels
    assert attention.picture(pattern, 320, 32).images[0].get_array().min() == 2
    assert attention.picture(attention.full(), 320, 32, batch=5, head=7).images[0].get_array().min() == 2
    with pytest.raises(ValueError, match="head lies between 0 and 1 in this pattern, not at 7"):
        attention.picture(pattern, 320, 32, head=7)
