"""What a dry run says that a case of each study needs, beside what its ranks come to."""

import pkgutil
import re
from pathlib import Path

import pytest

from blockshock_lib import params, studies
from blockshock_lib.report.figures import byte_text
from blockshock_lib.runs import dry_run, machine, measure
from tests.processes import call

SMALL = {"timing.samples": 1, "timing.warmup": 1, "timing.groups": 1, "timing.min_sample_ms": 0, "profile": "none"}
BF16_SPEED = {"sweep.patterns": ["causal"], "sweep.lengths": [[2048]], "sweep.blocks": [128], "dtype": "bf16"}
WIDE = {"width": 256, "heads": 8, "vocab": 4096, "context": 128}
LINEAR = {"workload": "activation", "mask": "random", "sweep.n": [1024]}
STEPS = {"methods": ["row_parallel", "block_shock", "block_shock_recompress"], "sweep.b": [64], "loss_steps": 0}
CASES = {
    "phase0": LINEAR | {"sweep.b": [512]},
    "phase3": LINEAR | STEPS | {"optimizers": ["adamw"]},
    "attention_speed": BF16_SPEED | {"methods": ["dense", "reference"]},
    "gpt_correctness": {"size": WIDE, "methods": ["spd"]},
    "gpt_training": {
        **{"size": WIDE, "methods": ["spd"], "corpus": "nano", "training.tokens": 4096, "training.batch": 2},
        **{"training.validations": 1, "training.validation_tokens": 1024},
    },
    "gallery_speed": {"sweep.patterns": ["unstructured"], "sweep.weights": [[1024, 1024]], "sweep.sparsities": [0.9]},
    "gallery_training": {"sweep.patterns": ["GELU"], "sweep.weights": [[1024, 512]], "sweep.batches": [512]},
    "gallery_decode": {
        **{"decode.layers": 8, "decode.width": 512, "decode.mlp": 1024, "decode.heads": 8, "decode.kv_heads": 4},
        **{"decode.vocab": 8192, "decode.contexts": [512], "decode.batches": [4]},
    },
    "gallery_accuracy": {
        **{"methods": ["trained_dense", "sparsegpt_24"], "accuracy.seeds": 1, "accuracy.calibration": 32},
        **{"accuracy.width": 128, "accuracy.vocab": 4096, "accuracy.tokens": 4096, "accuracy.validation_tokens": 1024},
    },
    "gpt_latency": {"latency.widths": [512], "latency.prefill": [256], "methods": ["tensor_parallel", "spd"]},
}


def asked(phase, **more):
    study = studies.of_phase(phase)
    return study, params.load(study, phase, SMALL | CASES[phase] | more, choose={"hardware": "cpu"})


def resident(ctx, study, case, effective):
    measure.measure(ctx, study, case, effective, 0)
    # Not getrusage: its peak is the parent's where that was larger when it started this process.
    (kib,) = re.findall(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(kib) * 1024


@pytest.mark.long
@pytest.mark.parametrize("phase", CASES)
def test_memory_needed_is_above_the_measured_peak_and_not_far_above(phase, tmp_path):
    study, effective = asked(phase)
    case = study.expand(effective)[-1]
    need = pkgutil.resolve_name(study.need)(case, machine.probe())
    (tmp_path / "records").mkdir()
    measured = sum(
        call(resident, study.name, case, effective, processes=case.world_size, seconds=600, logs=tmp_path / "logs")
    )
    assert measured <= dry_run.memory_of(case, need) <= (2.5 if study.name == "linear" else 4) * measured


@pytest.mark.parametrize("phase", CASES)
def test_a_dry_run_knows_the_bytes_of_every_study_and_says_that_no_run_tells_the_time(phase, tmp_path, monkeypatch):
    (study, effective), card = asked(phase), machine.probe()
    monkeypatch.setattr(dry_run, "REFERENCE", tmp_path)
    text = dry_run.dry_run(study, effective, card, tmp_path)
    assert "not known: no earlier run of this study tells" in text and text.count("not known") == 1
    assert "(an upper estimate)" in text
    needs = [pkgutil.resolve_name(study.need)(case, card) for case in study.expand(effective)]
    assert all(need.bytes > 0 for need in needs)
    assert study.name == "linear" or not any(reason for need in needs for reason in need.unsupported.values())
    monkeypatch.setattr(dry_run.memory, "available", lambda: 1)
    assert "it cannot be expected to fit" in " ".join(dry_run.dry_run(study, effective, card, tmp_path).split())


def test_on_a_cpu_cases_that_run_side_by_side_need_their_memory_at_once(tmp_path):
    (study, effective), card = asked("gallery_accuracy", **{"accuracy.seeds": 2}), machine.probe()
    need = pkgutil.resolve_name(study.need)
    alone = max(dry_run.memory_of(case, need(case, card)) for case in study.expand(effective))
    text = " ".join(dry_run.dry_run(study, effective, card, tmp_path).split())
    assert f"at most {byte_text(2 * alone)}" in text
