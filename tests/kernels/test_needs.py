"""What the kernels need of a GPU is told from its card."""

import pytest
import torch

from blockshock_lib.kernels import compiled, needs


def missing(*capabilities):
    return needs.missing([{"index": i, "capability": one} for i, one in enumerate(capabilities)])


@pytest.fixture(autouse=True)
def whole(monkeypatch):
    """A machine that lacks nothing."""
    monkeypatch.setattr(torch.backends.cusparselt, "is_available", lambda: True)
    monkeypatch.setattr(compiled, "unsupported", lambda device: "")
    monkeypatch.setattr(needs, "version", lambda name: "1.0")


def test_older_gpus_have_no_sparse_products_and_the_small_batch_kernel_is_hoppers_own():
    old = "2:4 products need compute capability 8.0 or newer, GPU 1 has 7.5"
    assert missing("9.0", "7.5") == dict.fromkeys(("cslt", "planned products", "small-batch product"), old)
    for other in ("8.0", "10.0"):
        said = f"its kernel needs compute capability 9.0 (Hopper), GPU 1 has {other}"
        assert missing("9.0", other) == {"small-batch product": said}
    assert missing("9.0", "9.0") == {}


def test_what_the_library_adds_to_the_2_4_product_says_why_it_is_missing(monkeypatch):
    monkeypatch.setattr(compiled, "unsupported", lambda device: "no compiler")
    monkeypatch.setattr(needs, "version", lambda name: "")
    nvmath = "nvmath-python is not installed (the extra `cuda`)"
    said = {"triton": "triton is not installed", "planned products": nvmath, "small-batch product": "no compiler"}
    assert missing("9.0") == said
    monkeypatch.setattr(torch.backends.cusparselt, "is_available", lambda: False)
    assert set(missing("9.0").values()) == {"this build of torch has no cuSPARSELt", "triton is not installed"}


def test_an_installed_package_that_cannot_be_imported_says_why(tmp_path, monkeypatch):
    (tmp_path / "half_there.py").write_text("import what_it_needs")
    monkeypatch.syspath_prepend(tmp_path)
    said = "half-there cannot be imported: No module named 'what_it_needs'"
    assert needs.lacks("half-there", "attention", "half_there:it") == said
    assert needs.lacks("there", "attention", "json:loads") == ""
    assert needs.lacks("there", "attention", "json:no_such").endswith("module 'json' has no attribute 'no_such'")
    monkeypatch.setattr(needs, "version", lambda name: "")
    assert needs.lacks("gone", "attention", "json") == "gone is not installed (the extra `attention`)"
