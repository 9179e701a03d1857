"""Published rates of GPUs, for predictions. Nothing here was measured by this project."""

from __future__ import annotations

import re
from typing import NamedTuple


class Gpu(NamedTuple):
    """Peak rates by the maker: dense and 2:4 sparse TFLOP/s of bf16 products that are summed in fp32 (the sparse one as
    it is published, zeros counted), memory and link in GB/s. The link is one GPU's to its peers, one way: half of the
    published sum of both ways. `title` is the name that the driver gives it: of a GPU's variants, PCIe, NVL or laptop,
    each has its own and other rates.
    """

    name: str
    title: str
    dense: float
    sparse: float
    memory: float
    link: float
    source: str


GPUS = (
    Gpu(
        "A100 SXM 80 GB",
        "NVIDIA A100-SXM4-80GB",
        312,
        624,
        2039,
        300,
        "NVIDIA A100 datasheet; NVLink 600 GB/s both ways",
    ),
    Gpu(
        "H100 SXM",
        "NVIDIA H100 80GB HBM3",
        989.4,
        1978.9,
        3350,
        450,
        "NVIDIA H100 datasheet; NVLink 900 GB/s both ways",
    ),
    Gpu("H200", "NVIDIA H200", 989.4, 1978.9, 4800, 450, "NVIDIA H200 datasheet; NVLink 900 GB/s both ways"),
    Gpu(
        "B200 (HGX)", "NVIDIA B200", 2250, 4500, 7700, 900, "NVIDIA HGX B200 specifications; NVLink 1800 GB/s both ways"
    ),
    Gpu(
        "L40S", "NVIDIA L40S", 362.05, 733, 864, 32, "NVIDIA L40S datasheet; no NVLink, PCIe 4.0 x16 64 GB/s both ways"
    ),
    Gpu(
        "RTX 4090",
        "NVIDIA GeForce RTX 4090",
        165.2,
        330.4,
        1008,
        32,
        "NVIDIA Ada architecture whitepaper; no NVLink, PCIe 4.0 x16",
    ),
)

NODE_GPUS = 8
NODE_LINK = 400.0
"""A machine's way out in GB/s, one way, all its adapters together: an all-reduce's rings each cross it by their own.
DGX H200: eight ConnectX-7 adapters of 400 Gb/s a machine of eight GPUs (NVIDIA DGX H200 user guide).
"""


def named(text: str) -> Gpu | None:
    """The GPU that a machine's title, as "2x NVIDIA H200", speaks of; None where it is not in the table."""
    return next((gpu for gpu in GPUS if re.fullmatch(rf"\d+x {re.escape(gpu.title)}", text)), None)
