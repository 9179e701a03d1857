"""The small-batch kernel and the planned products on a real GPU, against float64 and against each other."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from blockshock_lib.kernels.sparse24 import cslt, masks, plans, small
from blockshock_lib.kernels.sparse24.mask import Mask
from blockshock_lib.kernels.sparse24.plans import Setting

from .test_products import CSLT, assert_right, backend_for, problem

MASKS = [("random", ""), ("transposable", "random"), ("uniform", "0110"), ("magnitude", "")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mask", MASKS, ids=" ".join)
@pytest.mark.parametrize("seed", range(30))
def test_values_are_right_for_random_shapes_batches_and_configurations(seed, mask, dtype):
    backend_for("small", dtype)
    draw = torch.Generator().manual_seed(1000 * seed + len(mask[0]) + (dtype == torch.float16))
    n, k = (64 * torch.randint(1, 30, (2,), generator=draw)).tolist()
    b = int(torch.randint(1, small.MOST_ROWS + 1, (1,), generator=draw))
    x, weight, kept = problem(n, k, b, dtype, mask, seed)
    if torch.rand(1, generator=draw) < 0.5:  # a slice of a wider input
        wide = torch.randn(b, k + 72, device="cuda").to(dtype)
        wide[:, 64 : 64 + k] = x
        x = wide[:, 64 : 64 + k]
    bias = torch.randn(n, device="cuda").to(dtype) if torch.rand(1, generator=draw) < 0.5 else None
    packed = cslt.pack(weight, kept)
    found = small.candidates((n, k), b)
    config = found[int(torch.randint(len(found), (1,), generator=draw))]
    out = torch.full((b, n), torch.nan, dtype=dtype, device="cuda")
    y = small.multiply(x, packed.data[0], (n, k), config, out, bias)
    assert y is out
    assert_right(y, x, weight, kept, bias)
    assert torch.equal(y, small.multiply(x, packed.data[0], (n, k), config, None, bias)), "not the same each time"


@pytest.mark.parametrize(("n", "k", "b"), [(256, 512, 16), (192, 64, 128), (1024, 1024, 33), (320, 256, 131)])
def test_every_candidate_and_every_default_is_right(n, k, b):
    backend_for("small")
    x, weight, mask = problem(n, k, b)
    packed = cslt.pack(weight, mask)
    defaults = [small.Config(*sizes) for row in small.DEFAULTS.values() for sizes in row]  # most are for larger weights
    defaults = [c for c in defaults if c.fits(small.eights(b)) and c.split <= small.most_split(c, (n, k))]
    found = list(dict.fromkeys([*small.candidates((n, k), b), *defaults]))
    small.prepare(found, b, x.dtype, x.device)
    for config in found:
        out = torch.full((b, n), torch.nan, dtype=x.dtype, device="cuda")
        assert_right(small.multiply(x, packed.data[0], (n, k), config, out), x, weight, mask)


def test_a_weight_of_two_to_the_32_entries_is_multiplied_right():
    backend_for("small")
    n, last = 65536, slice(65536 - 128, 65536)
    x, weight, mask = problem(n, n, 61)
    packed = cslt.pack(weight, mask)
    y = small.multiply(x, packed.data[0], (n, n))
    assert_right(y[:, last].contiguous(), x, weight[last], mask[last])


def test_columns_that_do_not_fill_a_stage_are_not_filled_with_what_lay_there_before():
    # NaN in what the weight and the input lie beside, and in what earlier blocks left in shared memory.
    backend_for("small")
    x, weight, mask = problem(128, 192, 8)
    poison = torch.full((128, 512), torch.nan, dtype=x.dtype, device="cuda")
    full = cslt.pack(poison, masks.make(Mask("", "random", ""), (128, 512), device="cuda"))
    wide = torch.full((8, 320), torch.nan, dtype=x.dtype, device="cuda")
    wide[:, 64:256] = x
    packed = cslt.pack(weight, mask)
    for config in small.candidates((128, 192), 8):
        small.multiply(poison[:8], full.data[0], (128, 512), config)
        assert_right(small.multiply(wide[:, 64:256], packed.data[0], (128, 192), config), x, weight, mask)


@pytest.mark.parametrize("name", ["small", "tuned", "cslt", "torch"])
@pytest.mark.parametrize("offset", [1, 4])
def test_an_input_off_the_16_byte_boundary_is_copied(name, offset):
    backend = backend_for(name)
    x, weight, mask = problem(128, 256, 16)
    off = torch.empty(16 * 256 + 8, dtype=x.dtype, device="cuda")[offset : offset + 16 * 256].view(16, 256)
    off.copy_(x)
    assert off.data_ptr() % 16
    odd = torch.randn(16, 256 + offset, device="cuda").to(x.dtype)[:, :256]
    turned, one = x.t().contiguous().t(), x[:1].expand(16, 256)
    for given in (off, odd, turned, one):
        assert_right(backend.linear(given, backend.pack(weight, mask)), given.contiguous(), weight, mask)


@pytest.mark.parametrize("name", ["small", "tuned", "cslt"])
@pytest.mark.parametrize("b", [1, 16, 100])
def test_a_bias_is_added_once_and_an_output_is_written_where_it_was_given(name, b):
    backend = backend_for(name)
    x, weight, mask = problem(256, 384, b)
    bias = torch.randn(256, device="cuda").to(x.dtype)
    out = torch.full((b, 256), torch.nan, dtype=x.dtype, device="cuda")
    packed = backend.pack(weight, mask)
    assert backend.linear(x, packed, out, bias) is out
    assert_right(out, x, weight, mask, bias)
    other = torch.randn(256, device="cuda").to(x.dtype)
    assert_right(backend.linear(x, packed, bias=other), x, weight, mask, other)


# Planned products


def planned():
    backend_for("cslt")
    if reason := plans.missing(torch.device("cuda")):
        pytest.skip(reason)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(128, 192), (1024, 512), (64, 2048)])
@pytest.mark.parametrize("b", [8, 64, 1000])
def test_a_kept_plan_gives_the_raw_ops_bits(shape, b, dtype):
    planned()
    x, weight, mask = problem(*shape, b, dtype)
    buffer = cslt.pack(weight, mask).data[0]
    raw = torch._cslt_sparse_mm(buffer, x.t(), transpose_result=True)
    for _ in range(2):
        out = torch.full((b, shape[0]), torch.nan, dtype=dtype, device="cuda")
        assert torch.equal(cslt.multiply(x, buffer, shape, Setting(), out), raw)


def test_an_algorithm_that_the_library_refuses_is_a_runtime_error_and_leaves_the_next_call_right():
    planned()
    x, weight, mask = problem(128, 256, 16)
    packed = cslt.pack(weight, mask)
    with pytest.raises(RuntimeError, match="refuses"):
        cslt.multiply(x, packed.data[0], packed.shape, Setting(alg_id=10_000))
    assert_right(CSLT.linear(x, packed), x, weight, mask)


def test_streams_and_threads_share_a_plan_and_not_its_workspace():
    planned()
    x, weight, mask = problem(1024, 1024, 256)
    packed = cslt.pack(weight, mask)
    inputs = [torch.randn_like(x) for _ in range(6)]
    wanted = [CSLT.linear(one, packed) for one in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    found: list = [None] * 6
    torch.cuda.synchronize()

    def work(i):
        with torch.cuda.stream(streams[i]):
            for _ in range(50):
                found[i] = CSLT.linear(inputs[i], packed)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
