"""A layer's whole forward as one CUDA graph for each batch size: the host launches it all at once."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from blockshock_lib.layers.sharded import ShardedLinear


class Graphed(nn.Module):
    """x [..., K] -> y [..., N], what `layer` gives, for inference: product, collective and bias in one launch.

        with layer.graphed() as fast, torch.no_grad():
            y = fast(x)

    The first call with a batch size runs the layer and captures it for the next ones; a later call copies x in, replays
    and copies y out, so that y is the caller's own. What a graph reads is looked at before each call:

    | what changed | what happens |
    |---|---|
    | values in place: an optimizer's step, `load_state_dict` | the graph reads them; copies are refreshed before |
    | storage: `weight.data = w`, another parameter, dtype or device | all graphs go and are captured anew |
    | what the layer cannot see: `weight.data.add_`, another CUDA graph | call `layer.refresh()`, as without graphs |
    | a tuned algorithm, `layer.chunks` | counts from the next capture on; `close()` lets one follow |

    The plain forward runs, with its own errors, on a CPU, under `torch.compile`, `torch.autocast` and the capture of
    another graph, where a gradient is wanted, for an empty batch, and where x does not fit.

    **Close it before `torch.distributed.destroy_process_group()`**, which can hang while a captured collective is alive
    (pytorch#115388): leave the `with`, call `close`, or let go of it. **All ranks alike:** they make it together and
    call it with the same shapes in the same order, and what changes a weight's storage does so on all ranks. A call
    runs the collective once, captured or not.

    Args:
        layer: any sharded layer; it stays as it is, and its state is found under "layer.".
        shapes: batch sizes whose graphs are kept; the one unused for longest goes. Each holds x, y and its temporaries.
    """

    def __init__(self, layer: ShardedLinear, shapes: int = 8):
        super().__init__()
        if shapes < 1:
            raise ValueError(f"shapes={shapes}: at least one batch size must be kept")
        self.layer, self.shapes = layer, shapes
        self._begin()

    def _begin(self) -> None:
        self._graphs: OrderedDict[int, Capture] = OrderedDict()
        self._memory: tuple = ()
        self._lock = threading.Lock()  # x is written and y read for one caller at a time
        weakref.finalize(self, _free, self._graphs)

    def forward(self, x: Tensor) -> Tensor:
        if not self._can_replay(x):
            return self.layer(x)
        with self._lock:
            self.layer.prepare()
            self._drop_stale()
            rows = x.numel() // self.layer.in_features
            if rows in self._graphs:
                self._graphs.move_to_end(rows)
                self.layer.group.take_turn(x.device)
                y = self._graphs[rows](x)
            else:
                y = self._first(x.reshape(rows, -1).contiguous())
        return y.reshape(*x.shape[:-1], self.layer.out_features)

    def _first(self, x: Tensor) -> Tensor:
        """Runs what is then captured: it compiles and allocates what may not be during a capture."""
        y = self.layer.multiply(x)
        if len(self._graphs) >= self.shapes:
            self._graphs.popitem(last=False)[1].release()
        self._graphs[x.shape[0]] = Capture(self.layer.multiply, x)
        return y

    def _can_replay(self, x: Tensor) -> bool:
        if torch.compiler.is_compiling() or not capturable(x):
            return False
        weight, bias = self.layer.weight, self.layer.bias
        if weight is None or weight.dtype != x.dtype or weight.device != x.device or not x.numel():
            return False
        if x.shape[-1:] != (self.layer.in_features,) or torch.is_autocast_enabled(x.device.type):
            return False
        wanted = x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
        return not (wanted and torch.is_grad_enabled())

    def _drop_stale(self) -> None:
        """Frees all graphs where what they read lies elsewhere now. UnsupportedError where the process group has been
        destroyed.
        """
        read = ((t.data_ptr(), t.dtype, t.device, t.shape, t.stride()) for t in self.layer.memory_read())
        if (memory := (id(self.layer.group.handle), *read)) != self._memory:
            _free(self._graphs)
            self._memory = memory

    def close(self) -> None:
        """Frees all graphs; a later call captures anew."""
        with self._lock:
            _free(self._graphs)

    def __enter__(self) -> Graphed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict:
        return {name: value for name, value in self.__dict__.items() if name not in ("_graphs", "_memory", "_lock")}

    def __setstate__(self, state: dict) -> None:
        """A copy captures graphs of its own."""
        super().__setstate__(state)
        self._begin()


def capturable(x: Tensor) -> bool:
    """Whether what reads x may be captured now: on a GPU, and not while another graph is."""
    return x.is_cuda and not torch.cuda.is_current_stream_capturing()


class Capture:
    """One CUDA graph of `compute` on a tensor like x [B, K], contiguous, with memory of its own for input and output.

    `compute` has run on such a tensor before. Here it does not run: it is recorded.
    """

    def __init__(self, compute: Callable[[Tensor], Tensor], x: Tensor):
        self.graph, self.last, self.last_handle = torch.cuda.CUDAGraph(), None, None
        # Replays write the input; a tensor made in inference mode could be written in that mode only.
        with torch.inference_mode(False), torch.no_grad(), torch.cuda.stream(torch.cuda.current_stream(x.device)):
            # The stream above is set again where a capture fails, which torch.cuda.graph leaves undone. One of its own
            # to capture on, as cuBLAS has a workspace a stream, which graphs on two streams must not share.
            # NCCL's watchdog thread queries events meanwhile; only this thread's calls may end up in the graph.
            capture = torch.cuda.graph(self.graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local")
            with capture:
                # In the graph's own pool: freed, its memory is nobody else's while a replay may still run.
                self.x = torch.empty_like(x)
                self.y = compute(self.x)

    def __call__(self, x: Tensor) -> Tensor:
        """A new tensor, compute(x) of x [..., K] with as many rows, on the current stream."""
        self._follow(x.device)
        self.x.view(x.shape).copy_(x)
        self.graph.replay()
        return self.y.clone()

    def _follow(self, device: torch.device) -> None:
        """Lets the current stream wait for the stream of the last call, whose input and output are those of this."""
        handle = torch._C._cuda_getCurrentRawStream(device.index)  # 0.1 us where current_stream takes 4
        if handle != self.last_handle:
            stream = torch.cuda.current_stream(device)
            if self.last is not None:
                stream.wait_stream(self.last)
            self.last, self.last_handle = stream, handle

    def release(self) -> None:
        self.graph.reset()
        self.x = self.y = None


def _free(graphs: OrderedDict[int, Capture]) -> None:
    while graphs:
        graphs.popitem()[1].release()
