from types import SimpleNamespace

import pytest
import torch

from blockshock_lib.errors import UnsupportedError
from blockshock_lib.kernels import graph

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (RuntimeError("not permitted\nwhen capturing"), UnsupportedError),
        (UnsupportedError("no batch"), UnsupportedError),
        (torch.OutOfMemoryError("full"), torch.OutOfMemoryError),
        (TypeError("ours"), TypeError),
    ],
)
def test_what_cannot_be_captured_says_why_and_what_failed_otherwise_is_not_hidden(error, found, monkeypatch):
    def call(*_, **__):
        raise error

    monkeypatch.setattr(graph, "Graph", call)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    with pytest.raises(found) as raised:
        graph.try_capture(call, CPU)
    if found is UnsupportedError:
        assert str(raised.value) == f"it cannot be captured in a CUDA graph: {str(error).splitlines()[0]}"


@pytest.mark.parametrize("ends", [True, False])
def test_a_capture_that_failed_is_ended_for_the_allocator_and_the_generator_too(ends, monkeypatch):
    told = []
    monkeypatch.setattr(graph, "_capture_well", lambda device: told.append(("well", device.index)))
    for name in ("endAllocateToPool", "releasePool"):
        monkeypatch.setattr(torch._C, f"_cuda_{name}", lambda *of, name=name: told.append((name, *of)))

    def capture_end():
        if not ends:
            raise RuntimeError("operation failed due to a previous error during capture")

    graph._abandon(SimpleNamespace(capture_end=capture_end), (0, 7), torch.device("cuda", 1))
    assert told == ([] if ends else [("endAllocateToPool", 1, (0, 7)), ("releasePool", 1, (0, 7)), ("well", 1)])
