"""A collective that has been started and not yet waited for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Pending:
    """The result of a collective that may still be running.

    Attributes:
        result: the tensor that the collective writes; read it through `wait` only.
        work: the running collective; None where there was nothing to communicate.
        finish: what turns the result into what the caller wants, for example a transposed view.
    """

    result: torch.Tensor
    work: dist.Work | None = None
    finish: Callable[[torch.Tensor], torch.Tensor] | None = None

    def wait(self) -> torch.Tensor:
        """The result. On CUDA the current stream waits, not the host."""
        if self.work is not None:
            self.work.wait()
        return self.result if self.finish is None else self.finish(self.result)
