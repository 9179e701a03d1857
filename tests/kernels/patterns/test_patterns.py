import sys
from types import ModuleType

import pytest
import torch

from blockshock_lib.engine.case_run import judge
from blockshock_lib.engine.study import Check
from blockshock_lib.errors import UnsupportedError
from blockshock_lib.kernels.patterns import pattern as general
from blockshock_lib.kernels.patterns import unstructured
from blockshock_lib.kernels.patterns.table import KERNELS, PATTERNS
from blockshock_lib.kernels.sparse24 import packing

CPU = torch.device("cpu")
SHAPE = (192, 320)
SPARSITY = {"dense": 0.0, "2:4": 0.5, "2:4 in blocks": 0.8}


def made(name, shape=SHAPE, dtype=torch.float32, sparsity=None, seed=0):
    """(pattern, weight, mask, block)."""
    pattern, draw = PATTERNS[name], torch.Generator().manual_seed(seed)
    block = 64 if name == "2:4 in blocks" else 16 if pattern.blocks else 0
    weight = torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype)
    sparsity = SPARSITY.get(name, 0.75) if sparsity is None else sparsity
    return pattern, weight, pattern.mask(weight.abs(), sparsity, block), block


def fault(y, x, weight, mask):
    """What the engine's gate says of y beside the masked dense product of the same dtype."""
    dense = torch.where(mask, weight, 0)
    truth = x.double() @ dense.double().t()
    looser = 3.0 if y.dtype == torch.float32 else 1.0  # it is summed in that dtype, in another order
    return judge(Check("y", y, torch.nn.functional.linear(x, dense), truth, looser=looser))[0]


def held(value, seen=None):
    """Bytes of all storages that something holds, each once."""
    seen = {} if seen is None else seen
    if isinstance(value, torch.Tensor):
        seen[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
    elif isinstance(value, dict | list | tuple):
        for one in value.values() if isinstance(value, dict) else value:
            held(one, seen)
    elif isinstance(value, general.Packed | packing.Packed):
        held(vars(value), seen)
    return sum(seen.values())


def test_a_plan_of_the_universal_tensor_is_of_one_weight_and_its_copies(monkeypatch):
    """nvmath 1.0.0 keeps plans by the shape alone, and reads what the first weight of it kept of each later one."""
    module = ModuleType("nvmath.sparse.ust.interfaces.torch_interface")

    class TorchUST(torch.Tensor):
        from_torch = classmethod(lambda cls, matrix: matrix.to_dense().as_subclass(cls))

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            x, weight = (one.as_subclass(torch.Tensor) for one in args)
            kept = int(weight.count_nonzero())
            planned = module._MATMUL_CACHE.setdefault(tuple(weight.shape), kept)
            assert kept == planned, "illegal memory access"
            return x @ weight.t()

    module.TorchUST, module._MATMUL_CACHE = TorchUST, {}
    names = module.__name__.split(".")
    for end in range(1, len(names) + 1):
        monkeypatch.setitem(sys.modules, ".".join(names[:end]), module if end == len(names) else ModuleType("nvmath"))
    monkeypatch.setattr(sys.modules[".".join(names[:-1])], "torch_interface", module, raising=False)
    pattern, weight, _, _ = made("unstructured")
    x, masks = torch.randn(8, SHAPE[1]), [pattern.mask(weight.abs(), sparsity) for sparsity in (0.9, 0.5)]
    one, other = (unstructured.Ust(weight, mask) for mask in masks)
    for packed, mask in ((one, masks[0]), (other, masks[1]), (one.copy(), masks[0]), (one, masks[0])):
        torch.testing.assert_close(packed.product(x), x @ torch.where(mask, weight, 0).t())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("batch", [1, 24])
@pytest.mark.parametrize("name", KERNELS)
def test_each_kernel_gives_the_masked_dense_product(name, batch, dtype):
    pattern, weight, mask, block = made(KERNELS[name][0].name, dtype=dtype)
    if why := KERNELS[name][1].unsupported(CPU, dtype, SHAPE, block):
        with pytest.raises(UnsupportedError, match=f"{name}: "):
            pattern.pack(weight, mask, block, name)
        assert why
        return
    x = torch.randn(batch, SHAPE[1], generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(dtype)
    packed = pattern.pack(weight, mask, block, name)
    y, copied = packed.product(x), packed.copy()
    if dtype == torch.float64:
        torch.testing.assert_close(y, x @ torch.where(mask, weight, 0).t(), rtol=1e-12, atol=1e-12)
    else:
        assert not fault(y, x, weight, mask)
    assert y.is_contiguous() and torch.equal(packed.dense(), torch.where(mask, weight, 0))
    counts = general.counts(mask, block)
    assert packed.nbytes == KERNELS[name][1].weight_bytes(counts, weight.element_size())
    assert held(packed) == packed.nbytes
    for tensor in packed.tensors.values():
        tensor.zero_()
    assert torch.equal(copied.product(x), y)


@pytest.mark.parametrize("name", ["grouped", "bsr"])
def test_the_bytes_of_blocks_count_what_is_held_for_empty_rows_of_blocks(name):
    pattern, weight, mask, block = made("blocks")
    mask[: 2 * block] = False
    packed = pattern.pack(weight, mask, block, name)
    assert packed.nbytes == KERNELS[name][1].weight_bytes(general.counts(mask, block), weight.element_size())


@pytest.mark.parametrize("name", ["csr", "coo", "bsr", "grouped", "bsr_shuffled", "smaller_rows", "smaller_columns"])
def test_a_wrong_place_of_one_weight_does_not_pass_the_gate(name):
    pattern, weight, mask, block = made(KERNELS[name][0].name)
    packed, x = pattern.pack(weight, mask, block, name), torch.randn(24, SHAPE[1])
    places = packed.tensors[{"coo": "indices", "smaller_rows": "rows"}.get(name, "columns")]
    places[..., [0, 1]] = places[..., [1, 0]]
    assert fault(packed.product(x), x, weight, mask)


@pytest.mark.parametrize("name", [name for name in PATTERNS if not name.startswith("2:4")])
def test_the_gradient_of_x_is_the_product_of_the_transposed_weight(name):
    pattern, weight, mask, block = made(name)
    dy = torch.randn(8, SHAPE[0])
    turned = PATTERNS["columns"] if name == "rows" else PATTERNS["rows"] if name == "columns" else pattern
    packed = turned.pack(weight.t(), mask.t(), block)
    assert not fault(packed.product(dy), dy, weight.t().contiguous(), mask.t())


@pytest.mark.parametrize("name", ["unstructured", "blocks", "shuffled blocks"])
@pytest.mark.parametrize("sparsity", [0.0, 0.3, 0.8, 0.99, 0.9999])
def test_a_mask_keeps_the_exact_count_also_where_all_scores_are_equal(name, sparsity):
    pattern, _, mask, block = made(name, sparsity=sparsity)
    unit = max(1, block) ** 2
    count = max(1, int((1 - sparsity) * mask.numel() / unit + 0.5)) * unit
    assert mask.sum() == count == pattern.mask(torch.ones(SHAPE), sparsity, block).sum()


def test_a_mask_keeps_what_is_largest_and_of_equals_the_first():
    scores = torch.tensor([[3.0, 1, 2, 0], [2, 2, 5, 1]])
    kept = [[True, False, True, False]] * 2
    assert PATTERNS["unstructured"].mask(scores, 0.5).tolist() == kept
    assert PATTERNS["rows"].mask(scores, 0.5, 1).tolist() == [[False] * 4, [True] * 4]
    assert PATTERNS["columns"].mask(scores, 0.5, 2).tolist() == kept
    assert PATTERNS["blocks"].mask(scores, 0.5, 2).tolist() == [[True, True, False, False]] * 2
    assert PATTERNS["2:4"].mask(scores.repeat(2, 1), 0.5).tolist() == 2 * kept


def test_shuffled_blocks_keep_more_than_blocks_where_rows_and_columns_differ_in_size():
    weight = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    weight *= torch.rand(SHAPE[0], 1).add(0.1) * torch.rand(1, SHAPE[1]).add(0.1)
    kept = [weight.abs()[PATTERNS[name].mask(weight.abs(), 0.75, 16)].sum() for name in ("blocks", "shuffled blocks")]
    assert kept[1] > 1.2 * kept[0]


def test_what_is_2to4_in_blocks_is_half_of_each_kept_block():
    _, _, mask, block = made("2:4 in blocks")
    kept = general.tiled(mask, block).sum((-1, -2))
    assert mask.sum() == 6 * block**2 // 2  # of 15 blocks 6: a fifth of the weights
    assert set(kept.unique().tolist()) == {0, block**2 // 2} and mask.unflatten(1, (-1, 4)).sum(-1).max() == 2


@pytest.mark.parametrize("name", ["unstructured", "blocks", "2:4 in blocks"])
def test_an_empty_row_gives_zeros_by_every_kernel(name):
    pattern, weight, mask, block = made(name)
    mask[:64] = False
    assert general.empty_rows(mask) >= 64
    for kernel in pattern.kernels:
        if not kernel.unsupported(CPU, weight.dtype, SHAPE, block):
            y = pattern.pack(weight, mask, block, kernel.name).product(torch.randn(8, SHAPE[1]))
            assert not y[:, :64].any() and y[:, 64:].any(), kernel.name


@pytest.mark.parametrize(
    ("name", "scores", "sparsity", "block", "match"),
    [
        ("unstructured", torch.full((8, 8), torch.nan), 0.5, 0, "finite and not negative"),
        ("unstructured", -torch.ones(8, 8), 0.5, 0, "finite and not negative"),
        ("unstructured", torch.ones(8), 0.5, 0, "a matrix of floating point"),
        ("unstructured", torch.ones(8, 8), 1.0, 0, "from 0 to below 1, not at 1"),
        ("unstructured", torch.ones(8, 8), 0.5, 4, "takes no block, not 4"),
        ("blocks", torch.ones(8, 8), 0.5, 0, "takes a block, not 0"),
        ("blocks", torch.ones(8, 12), 0.5, 8, "do not divide 8x12"),
        ("2:4", torch.ones(8, 8), 0.75, 0, "half of the weights, not 0.75"),
        ("2:4 in blocks", torch.ones(8, 8), 0.25, 4, "half of the weights or more, not 0.25"),
    ],
)
def test_what_no_mask_can_be_is_refused(name, scores, sparsity, block, match):
    with pytest.raises(ValueError, match=match):
        PATTERNS[name].mask(scores, sparsity, block)


def test_a_weight_and_a_mask_that_do_not_fit_are_refused():
    pattern, weight, mask, block = made("blocks")
    random = torch.rand(SHAPE) < 0.5
    with pytest.raises(ValueError, match="mask must be bool"):
        pattern.pack(weight, mask.t(), block)
    with pytest.raises(ValueError, match="keeps nothing"):
        pattern.pack(weight, mask & False, block)
    with pytest.raises(ValueError, match="no kernel of blocks; allowed: grouped, bsr_shipped, bsr; did you mean 'bsr'"):
        pattern.pack(weight, mask, block, "bsrr")
    with pytest.raises(ValueError, match="not of shuffled blocks of 16"):
        PATTERNS["shuffled blocks"].pack(weight, random, 16)
    with pytest.raises(ValueError, match="whole rows and columns"):
        PATTERNS["rows"].pack(weight, random, 16)
    packed = pattern.pack(weight, mask, block)
    with pytest.raises(ValueError, match=r"must be \[B, 320\]"):
        packed.product(torch.randn(4, 192))
    with pytest.raises(ValueError, match="as the weight is"):
        packed.product(torch.randn(4, 320).double())


def test_the_best_kernel_that_can_is_taken_and_else_every_reason_is_told():
    assert PATTERNS["blocks"].choose(torch.zeros(SHAPE), 16).name == "bsr"
    assert PATTERNS["blocks"].choose(torch.zeros(SHAPE, dtype=torch.bfloat16), 16).name == "grouped"
    gpu = torch.device("cuda")
    assert "power of two from 16 on, not of 8" in KERNELS["bsr"][1].unsupported(gpu, torch.bfloat16, SHAPE, 8)
    with pytest.raises(UnsupportedError, match="blocks24: dimensions must be multiples of 64, not 16x16"):
        PATTERNS["2:4 in blocks"].choose(torch.zeros(SHAPE), 16)


def test_a_cost_counts_each_operand_once():
    counts = general.Counts(n=64, k=128, kept=1000, rows=60, columns=100, block=0, blocks=1000)
    assert KERNELS["csr"][1].cost(counts, 8, 2) == (2 * 8 * 1000, 8 * 1000 + 4 * 65 + 8 * 100 * 2, 8 * 64 * 2)


def test_a_kept_zero_of_2to4_stays_kept_in_a_copy():
    pattern, weight, mask, _ = made("2:4")
    weight[:, ::3] = 0
    copied = pattern.pack(weight, mask).copy()
    assert torch.equal(copied.mask(), mask) and torch.equal(copied.dense(), torch.where(mask, weight, 0))
