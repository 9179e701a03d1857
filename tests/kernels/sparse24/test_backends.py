import pytest
import torch

from blockshock_lib.errors import UnsupportedError
from blockshock_lib.kernels.sparse24 import backends

from .problems import problem

CPU = torch.device("cpu")
REFERENCE = backends.BACKENDS["reference"]


def test_auto_is_the_tuned_product_on_a_gpu_and_the_reference_elsewhere_and_a_named_one_is_never_replaced():
    found = [backends.choose(*asked).name for asked in (("auto", "cpu"), ("auto", "cuda:1"), ("torch", CPU))]
    assert found == ["reference", "tuned", "torch"]
    with pytest.raises(ValueError, match="auto, reference, torch, cslt"):
        backends.choose("cuslt", CPU)


def test_packed_bytes_are_those_of_the_storage_each_counted_once():
    buffer = torch.zeros(1000, dtype=torch.uint8)
    views = backends.Packed("x", (1, 1), torch.uint8, (buffer[:10], buffer[500:]))
    assert views.nbytes == 1000  # a view holds its whole storage, and both are one


@pytest.mark.parametrize("name", ["torch", "cslt", "tuned"])
def test_gpu_backends_say_why_they_cannot_run_here(name):
    backend = backends.BACKENDS[name]
    assert "device type 'cpu'" in backend.unsupported(CPU, torch.bfloat16)
    assert "1:2 pattern" in backend.unsupported(torch.device("cuda"), torch.float32)
    assert "float64" in backend.unsupported(torch.device("cuda"), torch.float64)
    _, weight, mask = problem()
    with pytest.raises(UnsupportedError, match=r"cannot run: .*device type 'cpu'"):
        backend.pack(weight, mask)
