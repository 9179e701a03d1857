"""What of the small-batch product needs no GPU: sizes, instruction, refusals. Values: tests/gpu/test_small.py."""

import pytest
import torch

from blockshock_lib.errors import UnsupportedError
from blockshock_lib.sparse24 import product, small
from blockshock_lib.sparse24.small import Config

CUDA = torch.device("cuda", 0)
SHAPES = [(64, 64), (4096, 4096), (192, 8192), (40960, 40960), (8192, 128)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", [1, 8, 9, 16, 31, 64, 65, 128])
def test_every_candidate_fits_the_chip_and_leaves_no_block_without_columns(shape, rows):
    found = small.candidates(shape, rows)
    assert found and len(set(found)) == len(found) and found[0] == small.default(shape, rows)
    for config in found:
        assert config.fits(small.eights(rows))
        assert config.split == 1 or config.split * 128 * config.unroll <= shape[1]


@pytest.mark.parametrize("rows", [8, 64, 128])
def test_a_candidate_is_as_deep_as_fits_and_every_split_of_it_is_tried(rows):
    found, count = small.candidates((8192, 8192), rows)[1:], small.eights(rows)  # the first is the default
    for config in found:
        deeper = config._replace(depth=config.depth + 1)
        assert deeper.depth not in small.DEPTHS or not deeper.fits(count)
        assert {config._replace(split=split) for split in small.SPLITS} <= {small.default((8192, 8192), rows), *found}


@pytest.mark.parametrize("rows", range(8, 136, 8))
@pytest.mark.parametrize("n", [1024, 8192, 40960])
def test_the_default_is_one_that_fits(n, rows):
    assert small.default((n, n), rows).fits(small.eights(rows))


@pytest.mark.parametrize("rows", [0, 129])
def test_a_batch_that_the_kernel_cannot_take_has_no_candidate(rows):
    assert small.candidates((4096, 4096), rows) == []


def test_shared_memory_is_the_stages_or_the_sums():
    # 128 rows: values 128 x 128 bytes, metadata an eighth of them, 16 rows of x with 128 columns of 2 bytes; 4 stages.
    assert Config(1, 2, 1, 4, 1).shared(2) == 4 * (128 * 128 + 128 * 16 + 16 * 256)
    assert Config(2, 2, 1, 1, 1).shared(16) == 128 * (256 + 4) * 4  # one stage has less than the sums


def test_more_shared_memory_than_a_block_can_have_or_more_sums_than_registers_does_not_fit():
    assert not Config(1, 4, 2, 4, 1).fits(8)
    assert Config(2, 1, 1, 3, 1).fits(16) and not Config(4, 1, 1, 3, 1).fits(16)


@pytest.mark.parametrize(("count", "half"), [(1, False), (16, True)])
def test_the_instruction_has_a_register_for_every_sum(count, half):
    text = small._instruction(count, half)
    assert f"m64n{8 * count}k32.f32.{'f16.f16' if half else 'bf16.bf16'} " in text
    sums = 4 * count
    assert all(f'"+f"(sums[{i}])' in text for i in range(sums)) and f"sums[{sums}]" not in text
    assert f'}}, %{sums}, %{sums + 1}, %{sums + 2}, %{sums + 3}, 1, 1, 1, 0, 0;" :' in text


def test_too_many_rows_are_refused_by_name():
    with pytest.raises(UnsupportedError, match="up to 128 rows, not 129"):
        small.multiply(torch.zeros(129, 64), torch.zeros(1), (64, 64))


@pytest.mark.parametrize(("capability", "reason"), [((8, 0), "no wgmma.sp"), ((10, 0), "no wgmma.sp"), ((9, 0), "")])
def test_only_hopper_has_the_instruction(capability, reason, monkeypatch):
    monkeypatch.setattr(small.cslt, "unsupported", lambda device, dtype: "")
    monkeypatch.setattr(small.compiled, "unsupported", lambda device: "")
    monkeypatch.setattr(small.metadata, "known", lambda device: "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    found = small.unsupported(CUDA, torch.bfloat16)
    assert (reason in found) if reason else found == ""


def test_what_is_missing_is_named_and_the_tuned_product_goes_by_cusparselt_then(monkeypatch):
    monkeypatch.setattr(small.cslt, "unsupported", lambda device, dtype: "")
    monkeypatch.setattr(small.compiled, "unsupported", lambda device: "cuda.bindings is not installed")
    assert small.unsupported(CUDA, torch.bfloat16) == "cuda.bindings is not installed"
    tuned = product.tuned
    tuned._untuned.cache_clear()
    assert tuned._untuned((4096, 4096), 16, torch.bfloat16, CUDA) == tuned.Setting()
    monkeypatch.setattr(small, "unsupported", lambda device, dtype: "")
    tuned._untuned.cache_clear()
    assert isinstance(tuned._untuned((4096, 4096), 16, torch.bfloat16, CUDA), Config)
    assert tuned._untuned((4096, 4096), small.MOST_ROWS + 8, torch.bfloat16, CUDA) == tuned.Setting()
    tuned._untuned.cache_clear()


@pytest.fixture
def launched(monkeypatch):
    """What the kernel would be given: (grid, threads, shared, arguments) of each launch."""
    calls = []

    def kernel(config, count, half, index):
        return lambda grid, threads, shared, *args: calls.append((grid, threads, shared, args))

    monkeypatch.setattr(small, "_kernel", kernel)
    return calls


def test_the_kernel_is_told_where_the_values_and_the_metadata_begin(launched):
    n, k, rows = 192, 256, 5
    buffer, x, bias = torch.zeros(n, k * 9 // 16).bfloat16(), torch.zeros(rows, k).bfloat16(), torch.zeros(n).bfloat16()
    config = small.Config(1, 2, 1, 3, 2)
    y = small.multiply(x, buffer, (n, k), config, None, bias)
    ((grid, threads, shared, (values, metadata, given, out, added, *numbers)),) = launched
    assert (grid, threads, shared) == ((2, 2, 1), 256, config.shared(1))  # the last block has rows beyond the weight
    assert values == buffer.data_ptr() and metadata == buffer.view(-1)[n * k // 2 :].data_ptr()
    assert given is x and out is y and added is bias and numbers == [n, k, rows, k]


@pytest.mark.parametrize(
    ("x", "copied"),
    [
        (torch.ones(8, 384).bfloat16()[:, 192:], False),
        (torch.ones(8, 388).bfloat16()[:, :192], True),  # rows at 8 bytes
        (torch.ones(8, 384).bfloat16()[:, 4:196], True),  # begins at 8 bytes
        (torch.ones(192, 8).bfloat16().t(), True),
    ],
)
def test_an_input_whose_rows_do_not_begin_at_16_bytes_is_copied(launched, x, copied):
    small.multiply(x, torch.zeros(128, 108).bfloat16(), (128, 192))
    given, stride = launched[0][-1][2], launched[0][-1][-1]
    assert (given is not x) is copied and torch.equal(given, x)
    assert given.stride() == (stride, 1) and not stride % 8 and not given.data_ptr() % 16
