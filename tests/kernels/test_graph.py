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
