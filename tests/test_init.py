"""What users import is there, and nothing heavy comes with it."""

import subprocess
import sys

import pytest

import blockshock_lib


@pytest.mark.parametrize("name", blockshock_lib.__all__)
def test_every_public_name_can_be_imported(name):
    assert getattr(blockshock_lib, name).__name__.rpartition(".")[2] == name


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(AttributeError, match="BlockShockLinear"):
        blockshock_lib.BlockShokLinear  # noqa: B018


def test_importing_the_package_loads_no_torch():
    subprocess.run([sys.executable, "-c", "import sys, blockshock_lib; assert 'torch' not in sys.modules"], check=True)
