"""A layer's whole forward as one CUDA graph for each batch size: the host launches it all at once."""

import contextlib
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor, nn

from blockshock_lib.kernels.graph import Graph, stream_after


class Graphed(nn.Module, contextlib.AbstractContextManager):
    """x [..., K] -> y [..., N], what `layer` gives, for inference: product, collective and bias in one launch.

        with layer.graphed() as fast, torch.no_grad():
            y = fast(x)

    The first call with a batch size runs the layer and captures it; a later one copies x in, replays and copies y out.
    Values changed in place are followed; where storage, dtype or device changed all is captured anew. A tuned algorithm
    and `layer.chunks` count from the next capture on. The plain forward runs where nothing can be captured, a gradient
    is wanted, or x does not fit.

    **Close it before `torch.distributed.destroy_process_group()`**, which can hang while a captured collective is alive
    (pytorch#115388): leave the `with`, call `close`, or let go of it. **All ranks alike** make it and call it with the
    same shapes in the same order. `shapes` batch sizes are kept; the one unused for longest goes.
    """

    def __init__(self, layer: nn.Module, shapes: int = 8):
        super().__init__()
        if shapes < 1:
            raise ValueError(f"shapes={shapes}: at least one batch size must be kept")
        self.layer, self.shapes = layer, shapes
        self._graphs: OrderedDict[int, Capture] = OrderedDict()
        self._memory: tuple = ()
        self._lock = threading.Lock()  # x is written and y read for one caller at a time
        weakref.finalize(self, _free, self._graphs)

    def forward(self, x: Tensor) -> Tensor:
        if not self._can_replay(x):
            return self.layer(x)
        lead, rows = x.shape[:-1], x.numel() // self.layer.in_features
        with self._lock:
            self.layer.prepare()
            read = ((t.data_ptr(), t.dtype, t.device, t.shape, t.stride()) for t in self.layer.memory_read())
            if (memory := (id(self.layer.group.handle), *read)) != self._memory:  # it lies elsewhere now
                _free(self._graphs)
                self._memory = memory
            if rows in self._graphs:
                self._graphs.move_to_end(rows)
                self.layer.group.wait_for_last_stream(x.device)
                y = self._graphs[rows](x)
            else:
                x = x.reshape(rows, -1).contiguous()
                y = self.layer.multiply(x)  # compiles and allocates what may not be during a capture
                if len(self._graphs) >= self.shapes:
                    self._graphs.popitem(last=False)[1].release()
                self._graphs[rows] = Capture(self.layer.multiply, x)
        return y.reshape(*lead, self.layer.out_features)

    def _can_replay(self, x: Tensor) -> bool:
        if torch.compiler.is_compiling() or not capturable(x):
            return False
        weight, bias = self.layer.weight, self.layer.bias
        if weight is None or weight.dtype != x.dtype or weight.device != x.device or not x.numel():
            return False
        if x.shape[-1:] != (self.layer.in_features,) or torch.is_autocast_enabled(x.device.type):
            return False
        wanted = any(t is not None and t.requires_grad for t in (x, weight, bias))
        return not (wanted and torch.is_grad_enabled())

    def close(self) -> None:
        with self._lock:
            _free(self._graphs)

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict:
        return {name: value for name, value in vars(self).items() if name not in ("_graphs", "_memory", "_lock")}

    def __setstate__(self, state: dict) -> None:
        Graphed.__init__(self, state["_modules"]["layer"], state["shapes"])  # a copy captures graphs of its own
        super().__setstate__(state)


def capturable(x: Tensor) -> bool:
    return x.is_cuda and not torch.cuda.is_current_stream_capturing()


class Capture:
    """One CUDA graph of `compute`, which ran before, on a contiguous tensor like x [B, K], with memory of its own."""

    def __init__(self, compute: Callable[[Tensor], Tensor], x: Tensor):
        self.last, of = None, {"size": x.shape, "dtype": x.dtype, "device": x.device}

        def run() -> Tensor:
            # In the graph's own pool: freed, its memory is nobody else's while a replay may still run.
            self.x = torch.empty(**of)
            return compute(self.x)

        # Replays write the input; a tensor made in inference mode could be written in that mode only.
        with torch.inference_mode(False), torch.no_grad():
            torch.cuda.synchronize(x.device)
            torch.cuda.empty_cache()  # no capture can free what the cache keeps
            self.graph = Graph([run], x.device, warm=True)
        self.graph.calls = []  # they would keep the layer, and this

    def __call__(self, x: Tensor) -> Tensor:
        self.last = stream_after(self.last, x.device)  # whose input and output are those of this call
        self.x.view(x.shape).copy_(x)
        return self.graph().clone()

    def release(self) -> None:
        self.graph.release()
        self.x = None


def _free(graphs: OrderedDict[int, Capture]) -> None:
    while graphs:
        graphs.popitem()[1].release()
