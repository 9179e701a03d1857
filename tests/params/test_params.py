"""Params: layers merge in order, every shipped file loads. What is refused: test_params_refused.py."""

import itertools
import json
import shutil

import pytest
from pydantic import ValidationError

from blockshock_lib import files, params, studies
from blockshock_lib.params import parse_override
from blockshock_lib.runs import records
from blockshock_lib.studies.linear import PHASES, STUDY
from blockshock_lib.studies.linear.params import PRESETS


def load(*args, **more):
    return params.load(STUDY, *args, **more)


def on_cpu(phase="phase1", overrides=None, **more):
    return load(phase, overrides, **{"detect": lambda: "cpu"} | more)


def names(folder):
    return sorted(path.stem for path in (params.PARAMS / folder).glob("*.yaml"))


def put(root, files):
    """Write these files, relative path -> text or bytes, over the shipped ones in `root`."""
    for relative, text in files.items():
        (root / relative).write_bytes(text if isinstance(text, bytes) else text.encode())


@pytest.fixture
def root(tmp_path):
    return shutil.copytree(params.PARAMS, tmp_path / "params")


@pytest.mark.parametrize(("phase", "hardware"), list(itertools.product(PHASES, names("hardware"))))
def test_every_shipped_phase_and_sweep_loads_on_every_hardware(phase, hardware):
    loaded = load(phase, choose={"hardware": hardware})
    assert (loaded.study, loaded.phase, loaded.hardware.name) == ("linear", phase, hardware)
    assert loaded.layers == {"hardware": hardware, "sweep": f"{phase}-{loaded.hardware.device}"}
    for sweep in names("linear/sweeps"):
        only = {"optimizers": ["sgd"]} if (phase, sweep) == ("phase3", "dtypes") else {}  # AdamW has no fp16
        chosen = {"hardware": hardware, "sweep": sweep}
        assert hardware in ("cuda-4", "cuda-8") or load(phase, only, choose=chosen).layers == chosen


@pytest.mark.parametrize("kind", PRESETS)
def test_every_preset_is_chosen_by_its_name_and_run_alone(kind):
    for name, value in PRESETS[kind].items():
        loaded = on_cpu("phase0", choose={kind: name})
        assert getattr(loaded, kind) == value == getattr(on_cpu("phase0", {f"layers.{kind}": name}), kind)
        assert kind == "methods" or getattr(loaded, f"{kind}s") == (value,)


@pytest.mark.parametrize("path", sorted((files.ROOT / "outputs" / "reference").rglob("manifest.json")), ids=str)
def test_the_parameters_of_every_shipped_run_still_read_and_expand_to_its_cases(path):
    old = json.loads(path.read_text())
    if "methods" in old.get("params", ()):  # not the findings
        study = studies.load(old.get("study", "linear"))
        read = study.params.model_validate(old["params"])
        recorded, asked = {one["id"] for one in records.scan(path.parent)[0]}, {case.id for case in study.expand(read)}
        assert recorded <= asked and len(asked) == old["cases"]
        assert recorded == asked or old["reason"].startswith(f"stopped after {len(recorded)} of {len(asked)} ")


def test_params_cannot_be_changed():
    loaded = on_cpu()
    for part in (loaded, loaded.hardware, loaded.sweep, loaded.timing):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(part, next(iter(type(part).model_fields)), None)


def test_each_layer_overrides_the_one_before_it(root):
    order = ["linear/base", "linear/phases/phase1", "hardware/cpu", "linear/sweeps/phase1-cpu"]
    put(root, {"base.yaml": (root / "base.yaml").read_text().replace("seed: 0", "seed: 1")})
    assert on_cpu(root=root).seed == 1
    for seed, name in enumerate(order, start=2):
        put(root, {f"{name}.yaml": (root / f"{name}.yaml").read_text() + f"\nseed: {seed}\n"})
        assert on_cpu(root=root).seed == seed, name
    assert on_cpu(overrides={"seed": 99}, root=root).seed == 99


def test_mappings_merge_and_lists_replace():
    loaded = on_cpu(overrides={"timing": {"warmup": 7}, "sweep.n": [128]})
    lead_in = {"lead_in_s": 0.001, "lead_in_most_s": 3.0}
    assert loaded.timing.model_dump() == {"warmup": 7, "samples": 8, "groups": 2, "min_sample_ms": 1.0} | lead_in
    assert loaded.sweep.n == (128,) and loaded.sweep.b == (16, 256)


def test_auto_hardware_is_what_the_machine_has_and_auto_sweep_the_hardwares_own_else_its_devices(root):
    put(root, {"linear/sweeps/phase1-cuda-4.yaml": "sweep: {n: [8192], b: [1]}"})
    for choose, hardware, sweep in (
        ({}, "cuda-4", "phase1-cuda-4"),
        ({"hardware": "auto"}, "cuda-4", "phase1-cuda-4"),
        ({"hardware": "cuda-8"}, "cuda-8", "phase1-cuda"),
    ):
        layers = load("linear/phase1", choose=choose, detect=lambda: "cuda-4", root=root).layers
        assert layers == {"hardware": hardware, "sweep": sweep}


def test_what_is_asked_for_by_name_is_not_swept_over():
    assert len(on_cpu("phase0").masks) == 7 and len(on_cpu("phase0").workloads) == 5
    assert [mask.name for mask in on_cpu("phase0", {"mask": "random"}).masks] == ["random"]
    assert on_cpu("phase0", {"dtype": "fp16"}, choose={"sweep": "dtypes"}).dtypes == ("fp16",)
    both = on_cpu("phase0", {"sweep.masks": ["magnitude"]}, choose={"mask": "random"})
    assert [mask.name for mask in both.masks] == ["magnitude"]


@pytest.mark.parametrize(
    ("text", "pair"),
    [
        ("sweep.n=[4096,8192]", ("sweep.n", [4096, 8192])),
        ("limits.case_seconds=1e-3", ("limits.case_seconds", 0.001)),
        ("mask.name=no", ("mask.name", "no")),
        ('mask.pattern="0110"', ("mask.pattern", "0110")),
        ("mask.pattern=", ("mask.pattern", "")),
        ("mask={name: a, family: random}", ("mask", {"name": "a", "family": "random"})),
        (" seed = 3", ("seed", 3)),
        ("x=a=b", ("x", "a=b")),
    ],
)
def test_override_values_are_yaml_1_2(text, pair):
    assert parse_override(text) == pair
    assert type(parse_override(text)[1]) is type(pair[1])
