"""What test_sanitizer.py runs under compute-sanitizer: `python -m tests.gpu.sanitized SUBJECT [RANK STORE]`.

The kernels run once over few and odd shapes, as each of their accesses is looked at. A subject of PLANTED runs one of
them with a fault instead.
"""

import faulthandler
import sys
import tempfile
from itertools import product as every
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

from blockshock_lib.comm import Group, all_reduce
from blockshock_lib.comm.all_reduce import Way
from blockshock_lib.kernels import compiled
from blockshock_lib.kernels.sparse24 import cslt, masks, small
from blockshock_lib.kernels.sparse24.mask import MASKS
from blockshock_lib.kernels.sparse24.pattern import Pattern
from tests.kernels.sparse24.test_compress import both

from . import reduce_tasks

SECONDS = 100
RACY = """
extern "C" __global__ void racy(int* out) {
    __shared__ int cells[256];
    cells[threadIdx.x] = threadIdx.x;  // and no barrier before another warp reads it
    out[threadIdx.x] = cells[255 - threadIdx.x];
}
"""


def weight_of(n: int, k: int, dtype: torch.dtype = torch.bfloat16):
    """W [N, K] and a mask that is 2:4 along both."""
    return torch.randn(n, k, device="cuda").to(dtype), masks.make(MASKS["transposable_random"], (n, k), device="cuda")


def products() -> None:
    """The small-batch kernel in configurations of all kinds, with a bias and without."""
    problems = list(every((torch.bfloat16, torch.float16), ((192, 320, 7), (64, 64, 1), (256, 1088, 65))))
    for turn, (dtype, (n, k, b)) in enumerate(problems):
        weight, mask = weight_of(n, k, dtype)
        packed, x = cslt.pack(weight, mask), torch.randn(b, k + 8, device="cuda").to(dtype)[:, :k]
        bias = torch.randn(n, device="cuda").to(dtype)
        truth = x.double() @ torch.where(mask, weight, 0).double().t()
        for config in small.candidates((n, k), b)[turn :: len(problems)]:  # a share each, as the tool is slow
            for added in (None, bias):
                y = small.multiply(x, packed.data[0], (n, k), config, None, added)
                wanted = truth if added is None else truth + added.double()
                assert (y.double() - wanted).abs().max() <= 0.01 * wanted.abs().max(), config


def compression() -> None:
    """Every pass of the compressor, and those that move values between packed and dense."""
    for dtype, shape in every((torch.bfloat16, torch.float16), ((64, 64), (192, 320), (1088, 128))):
        weight, mask = weight_of(*shape, dtype)
        pattern = Pattern.of(mask)
        packed, (forward, turned) = cslt.pack(weight, mask), both(weight, pattern)
        assert torch.equal(forward.data[0].view(torch.int16), packed.data[0].view(torch.int16))
        assert torch.equal(pattern.transpose_values(packed.values), turned.values)
        assert torch.equal(pattern.scatter(packed.values), torch.where(mask, weight, 0))
        assert torch.equal(pattern.masked(weight), torch.where(mask, weight, 0))


def sums(ctx) -> None:
    """The all-reduce between two GPUs: values over random shapes, and calls in a row."""
    assert not reduce_tasks.unsupported(ctx)
    assert not reduce_tasks.values(ctx, 24) and not reduce_tasks.races(ctx, 24)


def product_past_the_end() -> None:
    weight, mask = weight_of(128, 128)
    x, packed = torch.randn(16, 128, device="cuda").bfloat16(), cslt.pack(weight, mask)
    small.multiply(x, packed.data[0], (128, 128), None, x.new_empty(8, 128))


def compression_past_the_end() -> None:
    from blockshock_lib.kernels.sparse24 import kernels  # Triton is on GPU machines only

    weight, mask = weight_of(128, 128)
    values, turned = weight.new_empty(128, 32), weight.new_empty(128, 64)
    kernels.compress(Pattern.of(mask), weight, values, turned)


def sums_past_the_end(ctx) -> None:
    group = Group.of()
    one = all_reduce.reducer(group, ctx.device)
    place = one.workspace(group, 512, 1024, torch.bfloat16)
    # So short that every block of every rank writes past it before it meets its peer again: a block whose peer's rank
    # has been ended by the fault would wait for ever.
    one.sum(place, None, place.new_empty(64, 1024), way=Way(sys.argv[1].rpartition("-by-")[2], 16))


def race() -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "racy.cu"
        source.write_text(RACY)
        out = torch.empty(256, dtype=torch.int32, device="cuda")
        compiled.kernel(source, "racy", device=out.device)((1, 1, 1), 256, 0, out)


CLEAN = {"products": products, "compression": compression, "sums": sums}
PLANTED = {
    "product-past-the-end": product_past_the_end,
    "compression-past-the-end": compression_past_the_end,
    "sums-past-the-end-by-one-shot": sums_past_the_end,
    "sums-past-the-end-by-two-shot": sums_past_the_end,
    "race": race,
}


def main(subject: str, rank: str = "0", store: str = "") -> None:
    faulthandler.dump_traceback_later(SECONDS, exit=True)  # also where a kernel waits for a peer that has ended
    ctx = SimpleNamespace(rank=int(rank), world_size=2, device=torch.device("cuda", int(rank)))
    torch.cuda.set_device(ctx.device)
    torch.manual_seed(7)
    if store:  # gloo: what is looked at is our kernels, not NCCL's
        dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=ctx.rank, world_size=2)
    (CLEAN | PLANTED)[subject](*[ctx] * bool(store))
    torch.cuda.synchronize()
    if store:
        dist.barrier()  # no rank frees what another still reads
        dist.destroy_process_group()
    print("done")


if __name__ == "__main__":
    main(*sys.argv[1:])
