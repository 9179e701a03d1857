"""Cases of the gallery as the tests run them, on a CPU, and what the records of a GPU have in common."""

import pandas as pd
import torch

from blockshock_lib import studies
from blockshock_lib.comm import Group
from blockshock_lib.engine import experiment
from blockshock_lib.params import load
from blockshock_lib.studies.gallery import accuracy
from blockshock_lib.studies.gallery.params import expand

STUDY = studies.load("gallery")
QUICK = {"timing.samples": 2, "timing.warmup": 1, "timing.min_sample_ms": 0.01}
ABOUT = {"run": "a", "code": "", "seed": 0, "device": "cuda", "emulated": False, "world_size": 1, "dtype": "bf16"}


def asked(phase, settings=(), hardware="cpu"):
    return load(STUDY, f"gallery_{phase}", dict(settings), choose={"hardware": hardware})


def opened(params, case=0, state=None):
    found = accuracy.opened(expand(params)[case], params, device=torch.device("cpu"), group=Group())
    found.state = state
    return found


def measured(params, case=0, **how):
    return pd.DataFrame(experiment.measure(opened(params, case), params, STUDY, **how))


def said(rows):
    """Of each method what its check says."""
    rows = rows[rows["metric"].eq("check") & rows["method"].ne("twin")]
    return {one.method: one.reason or one.status for one in rows.itertuples()}
