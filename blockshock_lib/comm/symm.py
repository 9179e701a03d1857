"""Memory that the GPUs of one host share, PyTorch's symmetric memory; sums by kernels of our own (all_reduce.cu).

A product writes into a workspace; the sum, with the bias, goes to an ordinary tensor. NVLink's multicast is never used.
A kernel waits for its peers, as NCCL's do: where a rank fails, the others wait until their processes are ended.
"""

import contextlib
import os
import socket
from pathlib import Path

import torch
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor
from torch._C._distributed_c10d import _SymmetricMemory

from blockshock_lib.comm.ranks import Ranks
from blockshock_lib.files import environment
from blockshock_lib.kernels import compiled

WORLDS = (2, 4, 8)
ELEMENTS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
PACKET = 16  # bytes that a thread loads at once
THREADS = 512
MAX_BLOCKS = 256
DATA = 3 * MAX_BLOCKS * max(WORLDS) * 4  # bytes before the data: the kernels' flags
SOURCE = Path(__file__).with_name("all_reduce.cu")
BOOT = Path("/proc/sys/kernel/random/boot_id")
NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


class Workspace:
    """Memory for a partial result of `nbytes` on every rank of a group, and the kernels that add it up.

    Making one is a collective, which a CUDA graph cannot hold; where one rank cannot, all raise (`raise_together`).
    """

    def __init__(self, group: Ranks, nbytes: int, device: torch.device):
        self.rank, self.world, self.nbytes = group.rank, group.world_size, nbytes
        with environment(**{NO_MULTICAST: "1"}):
            with group.raise_together(device):
                # symm_mem.empty takes it from a pool that is never given back.
                self.memory = _SymmetricMemory.empty_strided_p2p((DATA + nbytes,), (1,), torch.uint8, device)
                self.memory[:DATA].zero_()
                # No peer may set a flag before it is cleared, nor after we leave old memory.
                torch.cuda.synchronize(device)
            with group.raise_together(device):
                joined = self.joined = symm_mem.rendezvous(self.memory, group.handle)  # keeps the peers' mapped
        self.shift = self.memory.data_ptr() - joined.buffer_ptrs[joined.rank]
        self.peers = [compiled.Long(pointer + self.shift) for pointer in joined.buffer_ptrs]
        self.begin = self.memory.data_ptr() + DATA
        self._kernels: dict[tuple[str, torch.dtype], compiled.Kernel] = {}

    def view(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """[rows, columns], contiguous: the workspace from its beginning."""
        return self.memory[DATA : DATA + rows * columns * dtype.itemsize].view(dtype).view(rows, columns)

    def peer(self, rank: int, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """`view` of that rank's workspace, as memory of this device: to be read between two calls of `meet`."""
        return self.joined.get_buffer(rank, (rows, columns), dtype, (self.shift + DATA) // dtype.itemsize)

    def meet(self) -> None:
        """The ranks' current streams meet: what was written before is read after, what was read may be written."""
        self.joined.barrier()

    def holds(self, x: Tensor) -> bool:
        return 0 <= x.data_ptr() - self.begin < self.nbytes

    def prepare(self, dtype: torch.dtype) -> None:
        for name in ("one_shot", "two_shot"):
            self._kernel(name, dtype)

    def sum(self, name: str, x: Tensor, bias: Tensor | None, out: Tensor, blocks: int) -> Tensor:
        """The sum over the ranks of x [B, N], plus bias [N], written into `out`, which lies in no workspace; by kernel
        "one_shot", where each rank reads all of every rank's x, or "two_shot", where each sums a share, reads the
        others' shares, and overwrites x.

        Rows of x are whole packets. Summed in fp32 in rank order and rounded once: all ranks get the same bits.
        """
        packets = x.nbytes // PACKET
        if not packets:
            return out
        share = packets if name == "one_shot" else -(-packets // self.world)
        blocks = min(blocks, MAX_BLOCKS, -(-share // THREADS))
        place, row = compiled.Long(x.data_ptr() - self.begin), x.shape[-1] * x.dtype.itemsize // PACKET
        launch = (blocks, 1, 1), THREADS, 0
        self._kernel(name, x.dtype)(*launch, *self.peers, out, bias, place, packets, row, self.rank)
        return out

    def _kernel(self, name: str, dtype: torch.dtype) -> compiled.Kernel:
        if (name, dtype) not in self._kernels:
            defines = {"WORLD": self.world, "ELEMENT": ELEMENTS[dtype], "MAX_BLOCKS": MAX_BLOCKS, "DATA": DATA}
            kernel = compiled.kernel(SOURCE, f"all_reduce_{name}", device=self.memory.device, **defines)
            self._kernels[name, dtype] = kernel
        return self._kernels[name, dtype]


def impossible(world_size: int, device: torch.device) -> str:
    """Why this rank cannot take part, whatever the others say; "" when it can."""
    if world_size not in WORLDS:
        return f"symmetric memory adds up {', '.join(map(str, WORLDS))} ranks, not {world_size}"
    if reason := compiled.unsupported(device):
        return reason
    if os.environ.get("NCCL_P2P_DISABLE") == "1":
        return "NCCL_P2P_DISABLE=1 keeps GPUs from each other's memory"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "the kernels need compute capability 8.0"
    if (backend := symm_mem.get_backend(device)) != "CUDA":
        return f"PyTorch's symmetric memory is set to {backend}, not CUDA"
    return ""


def facts(world_size: int, device: torch.device) -> dict:
    """What the ranks must know of each other before they share memory; see `reason`."""
    why = impossible(world_size, device)
    others = set() if why else {*range(torch.cuda.device_count())} - {device.index}
    reached = [index for index in others if torch.cuda.can_device_access_peer(device.index, index)]
    # Containers on several hosts may share a name, and would wait for each other for ever.
    host = socket.gethostname()
    with contextlib.suppress(OSError):
        host += f" {BOOT.read_text().strip()}"
    return {"why": why, "host": host, "device": device.index, "reaches": reached}


def reason(ranks: list[dict]) -> str:
    """Why these ranks, each with its `facts`, cannot share memory; "" when they can. The same on every rank."""
    for rank, one in enumerate(ranks):
        if one["why"]:
            return one["why"]
        if one["host"] != ranks[0]["host"]:
            return "the ranks are on several hosts"
        for peer, other in enumerate(ranks[:rank]):
            if one["device"] == other["device"]:
                return f"ranks {peer} and {rank} both call their GPU {one['device']}: each must see all GPUs"
            if one["device"] not in other["reaches"] or other["device"] not in one["reaches"]:
                return f"the GPUs of ranks {peer} and {rank} cannot read each other's memory"
    return ""
