"""How the cases and methods of the gallery are named in tables and figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from blockshock_lib.report.axes import Axes, Work
from blockshock_lib.studies.gallery.methods import ACTS, ARMS, DECODERS, METHODS, PATTERNS, WAYS
from blockshock_lib.studies.gallery.params import LATER, LLAMA, words

if TYPE_CHECKING:
    import pandas as pd


class GalleryAxes(Axes):
    def work(self, frame: pd.DataFrame) -> pd.Series:
        return frame["n"].astype(float) * frame["k"].astype(float) * frame["batch"].astype(float)

    def case(self, row: Mapping) -> str:
        return words(row)


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
    looser=True,
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
SPEEDS = replace(AXES, settings=("pattern", "weight", "block"))  # of tables, whose rows may differ in all of them
_PAIR = {"over": "decode_searched_compiled", "under": "decode_24_compiled"}
TOKENS = replace(AXES, x="context", times=TOKEN, settings=("weight",), checked=("weight",), **_PAIR)
