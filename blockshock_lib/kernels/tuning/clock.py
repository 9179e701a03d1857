"""What a probe of any kernel needs on a GPU: refusals told from a broken context, and a clock without host time."""

import contextlib
from collections.abc import Callable, Iterator

import torch

from blockshock_lib.errors import first_line
from blockshock_lib.kernels.compiled import CompileError
from blockshock_lib.kernels.graph import Graph, Pool
from blockshock_lib.kernels.tuning.search import BrokenContextError

_SAMPLE_MS = 2.0  # a sample repeats its graph for about this long


@contextlib.contextmanager
def guarded(device: torch.device) -> Iterator[None]:
    # Lets a refusal, the compiler's too, pass as RuntimeError where the context still works. That is tried, as the
    # library's words do not tell: "internal error" has been both.
    try:
        yield
    except CompileError as error:
        raise RuntimeError(str(error)) from error
    except RuntimeError as error:
        if isinstance(error, torch.AcceleratorError):
            raise BrokenContextError(first_line(error)) from error
        try:
            torch.cuda.synchronize(device)
            torch.ones(1, device=device).add_(1).item()
        except RuntimeError as second:
            raise BrokenContextError(first_line(error)) from second
        raise


class Clock:
    """Times calls as CUDA graphs that share their memory."""

    def __init__(self, device: torch.device):
        self.device, self.pool, self.keeper = device, None, None

    @contextlib.contextmanager
    def timed(self, calls: list[Callable[[], object]]) -> Iterator[Callable[[], float]]:
        """Milliseconds of one of these calls, which have run before. RuntimeError and BrokenContextError."""
        pool = self.pool or Pool(self.device)
        with guarded(self.device):
            graph = Graph(calls, self.device, pool, keeps=False, warm=True)
            # A pool can be shared only while one of its graphs lives.
            self.pool, self.keeper = pool, self.keeper or graph
            first = max(graph.ms(), 1e-3)
        replays = max(1, min(50, round(_SAMPLE_MS / first)))
        ready = [first] if replays == 1 else []  # at large sizes the first replay is sample enough

        def sample() -> float:
            with guarded(self.device):
                return (ready.pop() if ready else graph.ms(replays)) / replays / len(calls)

        try:
            yield sample
        finally:
            if graph is not self.keeper:
                graph.release()

    def close(self) -> None:
        """Gives the memory back, that of the graphs' pool included, which the allocator would else keep apart."""
        self.pool = self.keeper = None
        with contextlib.suppress(RuntimeError):  # a broken context fails here too, and has nothing to give back
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
