"""Compressed gradients for DistributedDataParallel: the largest of each bucket travel, the rest is remembered.

    ddp.register_comm_hook(TopK(density=0.01), top_k)

Error feedback (Stich et al., arXiv:1809.07599): what is not sent is added to the next step's gradient, so that nothing
is lost, only late. Each rank's choice differs, so values and places are gathered: the bytes grow with the ranks. Of a
bucket with NaN or Inf on some rank all ranks get some, for a GradScaler to see, and what they owe stays as it was.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass
class TopK:
    """`density`: the share of a bucket that is sent, one value at least. `start`: the steps summed whole first,
    two or more, as DDP builds its buckets anew after the first. `left`: of each bucket, what was not sent yet.
    """

    density: float
    start: int = 2
    process_group: dist.ProcessGroup | None = None
    step: int = 0
    left: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self):
        if not 0 < self.density <= 1 or self.start < 2:
            raise ValueError(f"density lies in (0, 1] and start is 2 or more, not {self.density} and {self.start}")


def top_k(state: TopK, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """The hook: the mean over the ranks of what each sent."""
    whole, group = bucket.buffer(), state.process_group or dist.group.WORLD
    state.step += bucket.is_last()
    if state.step - bucket.is_last() < state.start:
        return _then(dist.all_reduce(whole, group=group, async_op=True), lambda: whole.div_(group.size()))
    before = state.left.get(bucket.index(), torch.zeros_like(whole))
    if before.shape != whole.shape:
        told = f"{len(before)} values of bucket {bucket.index()}, not of {len(whole)}"
        raise ValueError(f"this TopK state is another model's: it remembers {told}; make one for each model")
    owed = whole + before
    places = owed.abs().topk(max(1, round(len(owed) * state.density)), sorted=False).indices
    values = owed[places]
    owed[places] = 0
    each = [[torch.empty_like(x) for _ in range(group.size())] for x in (values, places)]
    dist.all_gather(each[0], values, group=group)
    # NaN and Inf are the largest, so each rank is sent one where one has any.
    fine = torch.cat(each[0]).isfinite().all()
    state.left[bucket.index()] = torch.where(fine, owed, before)
    work = dist.all_gather(each[1], places, group=group, async_op=True)

    def add() -> Tensor:
        whole.zero_()
        for theirs, where in zip(*each, strict=True):  # in rank order: all ranks get the same bits
            whole[where] += theirs
        return whole.div_(group.size())

    return _then(work, add)


def _then(work: dist.Work, make: Callable[[], Tensor]) -> torch.futures.Future[Tensor]:
    return work.get_future().then(lambda done: (done.value(), make())[1])
