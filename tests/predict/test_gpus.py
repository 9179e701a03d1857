import pytest

from blockshock_lib.predict.gpus import GPUS, named


@pytest.mark.parametrize(
    "title, name",
    [
        ("2x NVIDIA H200", "H200"),
        ("8x NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("4x NVIDIA A100-SXM4-80GB", "A100 SXM 80 GB"),
        ("2x NVIDIA B200", "B200 (HGX)"),
        ("2x NVIDIA L40S", "L40S"),
        ("2x NVIDIA GeForce RTX 4090", "RTX 4090"),
    ],
)
def test_a_machine_is_known_by_its_title(title, name):
    assert named(title).name == name


@pytest.mark.parametrize(
    "title",
    [
        "CPU, 2 cores: AMD EPYC",
        "2x NVIDIA GeForce RTX 2080",
        "2x NVIDIA GH200 480GB",
        "2x NVIDIA H100 PCIe",
        "2x NVIDIA H100 NVL",
        "2x NVIDIA H200 NVL",
        "2x NVIDIA A100-PCIE-40GB",
        "2x NVIDIA A100-SXM4-40GB",
        "1x NVIDIA GeForce RTX 4090 Laptop GPU",
        "1x NVIDIA H200 + 1x NVIDIA B200",
    ],
)
def test_another_machine_is_not_taken_for_one_of_the_table(title):
    assert named(title) is None


def test_published_sparse_rates_are_about_twice_the_dense_ones():
    assert all(1.99 < gpu.sparse / gpu.dense < 2.03 and gpu.source for gpu in GPUS)
