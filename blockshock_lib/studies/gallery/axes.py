"""How the cases and methods of the gallery are named in tables and figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from blockshock_lib.report.axes import Axes, Work
from blockshock_lib.studies.gallery.arms import ARMS
from blockshock_lib.studies.gallery.methods import ACTS, DECODERS, METHODS, PATTERNS, WAYS
from blockshock_lib.studies.gallery.params import LATER, LLAMA

if TYPE_CHECKING:
    import pandas as pd


class GalleryAxes(Axes):
    def work(self, frame: pd.DataFrame) -> pd.Series:
        return frame["n"].astype(float) * frame["k"].astype(float) * frame["batch"].astype(float)

    work_name = "N*K*B"

    def case(self, row: Mapping) -> str:
        if row["trained"]:
            return f"{row['pattern']}, {row['weight']}, {row['trained'] / 1e6:.3g}M tokens"
        if row["pattern"] == LLAMA:
            return f"{row['weight']}, {row['context']} tokens before, B={row['batch']}"
        blocks = f" of {row['block']}" if row["block"] else ""
        return f"{row['pattern']}{blocks} at {row['sparsity']:g}, {row['weight']}, B={row['batch']}"


TOKEN = {"token": Work("a token of each sequence", ", token")}
AXES = GalleryAxes(
    columns=("pattern", "weight", "n", "k", "batch", "sparsity", "block", "trained", *LATER),
    x="sparsity",
    y="batch",
    methods=METHODS | WAYS | DECODERS | ARMS,
    over="searched",
    under="two_four",
    times={"forward": Work("a forward"), "dx": Work("a dX", ", dX"), "step": Work("a training step", ", step")} | TOKEN,
    checked=("pattern",),
    bytes={"packed_bytes": "packed weight", "peak_bytes": "peak memory"},
    headers={
        "batch": "B",
        "weight": "weight (out x in)",
        "n": "out features",
        "k": "in features",
        "detail": "tensor",
        "world_size": "ranks",
    },
    words={
        "pattern": {name: name for name in (*PATTERNS, *ACTS, LLAMA, "GPT")},
        "detail": {"": "y", "dx": "dX"},
        "trained": {0: ""},
    },
)
TOKENS = replace(
    AXES, x="context", over="decode_searched", under="decode_24", times=TOKEN, settings=("weight",), checked=("weight",)
)
