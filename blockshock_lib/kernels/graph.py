"""Calls captured in one CUDA graph: the one clock of kernel time; and refusals told from a broken context."""

import contextlib
import weakref
from collections.abc import Callable, Iterator

import torch
from torch.utils._pytree import tree_leaves

from blockshock_lib.errors import UnsupportedError, first_line
from blockshock_lib.kernels.compiled import CompileError
from blockshock_lib.kernels.tuning.search import BrokenContextError

_SAMPLE_MS = 2.0  # a sample of a `Clock` repeats its graph for about this long


class Pool:
    """What one graph frees serves the next only if both are captured with one pool of memory and one stream."""

    def __init__(self, device: torch.device):
        self.handle, self.stream, self.graphs = None, torch.cuda.Stream(device), weakref.WeakSet()

    def joined(self, graph: torch.cuda.CUDAGraph) -> tuple[int, int]:
        """The handle for this graph: a new one where no other lives, for PyTorch 2.11 may not take up an empty pool."""
        if not self.graphs:
            self.handle = torch.cuda.graph_pool_handle()
        self.graphs.add(graph)
        return self.handle


class Graph:
    """`calls` captured in one CUDA graph: kernel time without the host. On a CPU, which has no graphs, they just run.

    keeps: the last call's output, to be checked; else its memory serves the pool's next graphs. restore: called after
    they ran to warm up and to be captured. warm: they have run; the allocator's cache stays.
    """

    def __init__(
        self,
        calls: list[Callable[[], object]],
        device: torch.device,
        pool: Pool | None = None,
        keeps: bool = True,
        restore: Callable[[], None] = lambda: None,
        warm: bool = False,
    ):
        self.calls, self.graph, self.out = calls, None, None
        if device.type != "cuda":
            return
        pool, self.graph = pool or Pool(device), torch.cuda.CUDAGraph()
        stream, current = pool.stream, torch.cuda.current_stream(device)
        stream.wait_stream(current)
        if not warm:
            with torch.cuda.stream(stream):
                for call in calls:
                    call()
            current.wait_stream(stream)
            torch.cuda.synchronize(device)
            restore()
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()  # the graph's memory is its own
        outs = []
        with torch.cuda.stream(stream):
            # NCCL's watchdog thread queries events while we capture; only this thread's calls may end up in the graph.
            self.graph.capture_begin(pool=pool.joined(self.graph), capture_error_mode="thread_local")
            try:
                for call in calls:
                    out = call()
                    if keeps:  # outputs that are kept lie apart, as those of calls in a row do
                        outs.append(out)
                    del out  # the next call may have its memory
                self.graph.capture_end()
            except BaseException:
                _abandon(self.graph, pool.handle, device)
                raise
        current.wait_stream(stream)
        restore()
        self.out = outs[-1] if keeps else None

    def __call__(self) -> object:
        if self.graph is None:
            for call in self.calls:
                self.out = call()
        else:
            self.graph.replay()
        return self.out

    def ms(self, replays: int = 1) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(replays):
            self.graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    def fresh(self) -> object:
        """Runs it on outputs overwritten with NaN, whole numbers with -1, so that a replay that does nothing shows."""
        if self.graph is not None:
            for tensor in filter(torch.is_tensor, tree_leaves(self.out)):
                tensor.fill_(float("nan") if tensor.is_floating_point() else -1)
        return self()

    def release(self) -> None:
        """Frees the graph; NCCL cannot shut down while a captured collective is alive."""
        if self.graph is not None:
            self.graph.reset()
        self.calls, self.graph, self.out = [], None, None


def _abandon(graph: torch.cuda.CUDAGraph, pool: tuple[int, int], device: torch.device) -> None:
    """Ends a capture that failed. PyTorch's own end raises before its allocator hears of it, which then keeps back all
    memory that several streams have used, until the capture ends: each later call takes more, until none is left. Nor
    does the generator hear of it, which then refuses every draw, until another capture has ended well.
    """
    try:
        graph.capture_end()
    except RuntimeError:  # what went wrong is raised already
        index = torch.cuda.current_device() if device.index is None else device.index
        with contextlib.suppress(RuntimeError, AttributeError):  # should a later PyTorch tell its allocator
            torch._C._cuda_endAllocateToPool(index, pool)
            torch._C._cuda_releasePool(index, pool)
        with contextlib.suppress(RuntimeError):
            one, well = torch.zeros((), device=device), torch.cuda.CUDAGraph()
            with torch.cuda.graph(well, stream=torch.cuda.current_stream(device), capture_error_mode="thread_local"):
                one += 1


def try_capture(call: Callable[[], object], device: torch.device) -> None:
    """UnsupportedError where a call cannot be captured. It is tried alone, before others depend on it."""
    try:
        Graph([call], device, keeps=False).release()
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, UnsupportedError) as error:
        torch.cuda.synchronize(device)
        raise UnsupportedError(f"it cannot be captured in a CUDA graph: {first_line(error)}") from error


def stream_after(last: torch.cuda.Stream | None, device: torch.device) -> torch.cuda.Stream:
    """The current stream, which from here on waits for `last` where that is another."""
    if last is not None and torch._C._cuda_getCurrentRawStream(device.index) == last.cuda_stream:
        return last  # 0.1 us, where current_stream takes 4
    now = torch.cuda.current_stream(device)
    if last is not None:
        now.wait_stream(last)
    return now


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
