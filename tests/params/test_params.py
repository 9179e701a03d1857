"""Params: layers merge in order, every shipped file loads. What is refused: test_params_refused.py."""

import copy
import functools
import itertools
import json
import pickle
import shutil

import pytest
from pydantic import ValidationError

from blockshock_lib import params
from blockshock_lib.errors import ParamsError
from blockshock_lib.params import Hardware, Mask, Params, load, parse_override, stack

PHASES = ("phase0", "phase1", "phase2", "phase3")


def names(folder):
    return sorted(path.stem for path in (params.PARAMS / folder).glob("*.yaml"))


def on_cpu(phase="phase1", overrides=None, **more):
    return load(phase, overrides, **{"detect": lambda: "cpu"} | more)


@pytest.fixture
def root(tmp_path):
    return shutil.copytree(params.PARAMS, tmp_path / "params")


def put(root, files):
    for relative, text in files.items():
        (root / relative).write_text(text)


def test_machine_is_not_probed_before_bad_input_is_refused_or_when_hardware_is_named():
    def detect():
        raise AssertionError("the machine was probed")

    with pytest.raises(ParamsError, match=r"layers\.mask"):
        load("phase1", choose={"mask": "x"}, detect=detect)
    assert load("phase1", choose={"hardware": "cuda-8"}, detect=detect).hardware.world_size == 8


@pytest.fixture
def parsed_once(monkeypatch):
    """Thousands of stacks of the same few files: what a file holds is found out once."""
    parse = functools.cache(stack.parse)
    monkeypatch.setattr(stack, "parse", lambda data, label: copy.deepcopy(parse(data, label)))


@pytest.mark.parametrize(("phase", "hardware"), list(itertools.product(PHASES, names("hardware"))))
def test_every_shipped_file_loads_in_every_combination(phase, hardware, parsed_once):
    for mask, workload, methods in itertools.product(names("masks"), names("workloads"), names("methods")):
        chosen = {"hardware": hardware, "mask": mask, "workload": workload, "methods": methods}
        loaded = load(phase, choose=chosen)
        assert chosen.items() <= loaded.layers.items()
        assert (loaded.hardware.name, loaded.mask.name, loaded.workload.name) == (hardware, mask, workload)
        assert loaded.masks == (loaded.mask,) and loaded.workloads == (loaded.workload,)


@pytest.mark.parametrize(("phase", "sweep"), list(itertools.product(PHASES, names("sweeps"))))
def test_every_shipped_sweep_loads_on_every_hardware(phase, sweep):
    only = {"optimizers": ["sgd"]} if (phase, sweep) == ("phase3", "dtypes") else {}  # AdamW has no fp16
    for hardware in ("cpu", "cuda-1", "cuda"):
        assert load(phase, only, choose={"hardware": hardware, "sweep": sweep}).layers["sweep"] == sweep


def test_every_shipped_file_opens_with_what_it_is_for():
    for path in params.PARAMS.rglob("*.yaml"):
        first, *rest = path.read_text().splitlines()
        assert first.startswith("# ") and first.endswith("."), path.name
        assert rest


def test_params_come_back_from_json_unchanged():
    for phase in PHASES:
        loaded = on_cpu(phase, {"sweep.features": [[256, 1024]], "dtype": "fp32"})
        again = Params.model_validate(json.loads(json.dumps(loaded.model_dump(mode="json"))))
        assert again == loaded
        assert pickle.loads(pickle.dumps(loaded)) == loaded


def test_params_cannot_be_changed():
    loaded = on_cpu()
    for part in (loaded, loaded.mask, loaded.sweep, loaded.timing):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(part, next(iter(type(part).model_fields)), None)


def test_each_layer_overrides_the_one_before_it(root):
    """seed is set in ever later layers; the last one set wins, whatever the files before it say."""
    order = [
        "base.yaml",
        "phases/phase1.yaml",
        "workloads/gaussian.yaml",
        "masks/checkerboard.yaml",
        "methods/all.yaml",
        "hardware/cpu.yaml",
        "sweeps/phase1-cpu.yaml",
    ]
    whole = {name: (root / name).read_text() for name in order}
    put(root, {"base.yaml": whole["base.yaml"].replace("seed: 0", "seed: 1")})
    assert on_cpu(root=root).seed == 1
    for seed, name in enumerate(order[1:], start=2):
        put(root, {name: f"{whole[name]}\nseed: {seed}\n"})
        assert on_cpu(root=root).seed == seed, name
    assert on_cpu(overrides={"seed": 99}, root=root).seed == 99


def test_mappings_merge_and_lists_replace():
    loaded = on_cpu(overrides={"timing": {"warmup": 7}, "sweep.n": [128]})
    assert loaded.timing.model_dump() == {"warmup": 7, "samples": 8, "groups": 2, "min_sample_ms": 1.0}
    assert loaded.sweep.n == (128,) and loaded.sweep.b == (16, 256)


def test_overrides_are_not_changed():
    given = {"timing": {"warmup": 7}, "timing.samples": 3, "sweep.masks": ["random"], "layers.methods": "headline"}
    before = json.dumps(given)
    assert on_cpu(overrides=given).timing.samples == 3
    assert json.dumps(given) == before


def test_a_file_chooses_later_layers_and_the_command_line_wins(root):
    put(root, {"phases/phase1.yaml": "bias: false\nprofile: last\nlayers: {methods: headline, mask: random}\n"})
    assert on_cpu(root=root).layers == {
        "phase": "phase1",
        "workload": "gaussian",
        "mask": "random",
        "methods": "headline",
        "hardware": "cpu",
        "sweep": "phase1-cpu",
    }
    assert on_cpu(root=root, choose={"mask": "magnitude"}).mask.family == "magnitude"
    both = on_cpu(root=root, choose={"mask": "magnitude"}, overrides={"layers.mask": "uniform_1010"})
    assert both.mask == Mask(name="uniform_1010", family="uniform", pattern="1010")


@pytest.mark.parametrize("hardware", names("hardware"))
def test_auto_hardware_is_what_the_machine_has(hardware):
    assert load("phase1", detect=lambda: hardware).hardware.name == hardware
    assert load("phase1", choose={"hardware": "auto"}, detect=lambda: hardware).layers["hardware"] == hardware


def test_auto_sweep_is_the_hardwares_own_else_its_devices(root):
    for hardware in ("cuda-1", "cuda", "cuda-4", "cuda-8"):
        assert load("phase1", choose={"hardware": hardware}).layers["sweep"] == "phase1-cuda"
        assert load("phase0", choose={"hardware": hardware}).layers["sweep"] == "phase0-cuda"
    put(root, {"sweeps/phase1-cuda-4.yaml": "sweep: {n: [8192], b: [1]}"})
    assert load("phase1", choose={"hardware": "cuda-4"}, root=root).layers["sweep"] == "phase1-cuda-4"
    assert load("phase1", choose={"hardware": "cuda-8"}, root=root).layers["sweep"] == "phase1-cuda"
    put(root, {"hardware/cpu.yaml": (root / "hardware/cpu.yaml").read_text() + "layers: {sweep: dtypes}\n"})
    assert on_cpu(root=root).layers["sweep"] == "dtypes"


def test_shipped_values_are_those_of_the_plan():
    cpu, gpu = on_cpu("phase0"), load("phase1", choose={"hardware": "cuda"})
    assert (cpu.bias, cpu.profile, cpu.timing.groups, cpu.timing.samples) == (True, "none", 1, 12)
    assert (gpu.bias, gpu.profile, gpu.timing.groups, gpu.timing.samples) == (False, "last", 5, 12)
    assert (on_cpu("phase1").timing.groups, on_cpu("phase1").timing.samples) == (2, 8)
    assert gpu.sweep.n == (4096, 8192, 16384, 40960) and gpu.sweep.b == (16, 64, 256, 1024, 4096)
    assert (gpu.hardware.world_size, gpu.hardware.backend, gpu.hardware.processes) == (2, "nccl", 2)
    one = load("phase1", choose={"hardware": "cuda-1"}).hardware
    assert (one.world_size, one.emulated, one.processes) == (2, True, 1)
    assert (gpu.dtype, gpu.product, gpu.seed, gpu.mask.name) == ("bf16", "auto", 0, "checkerboard")
    assert set(params.METHOD_NAMES) - set(gpu.methods) == {"block_shock_recompress"}
    assert (gpu.optimizers, gpu.dw, gpu.loss_steps) == ((), "auto", 0)
    train = load("phase3", choose={"hardware": "cuda"})
    assert train.methods == params.METHOD_NAMES and train.optimizers == ("sgd", "adamw") and train.loss_steps == 200
    assert (train.learning_rates.sgd, train.learning_rates.adamw) == (0.5, 0.001)
    assert train.sweep.n == (4096, 16384, 40960) and train.sweep.b == (4096,) and train.timing.groups == 4


def test_parameters_of_a_run_made_before_training_still_read():
    old = on_cpu().model_dump(mode="json")
    for later in ("optimizers", "learning_rates", "dw", "loss_steps"):
        del old[later]
    assert Params.model_validate(old) == on_cpu()


def test_what_is_asked_for_by_name_is_not_swept_over():
    assert len(on_cpu("phase0").masks) == 7 and len(on_cpu("phase0").workloads) == 5
    assert [m.name for m in on_cpu("phase0", choose={"mask": "random"}).masks] == ["random"]
    assert [w.name for w in on_cpu("phase0", {"layers.workload": "mlp_up"}).workloads] == ["mlp_up"]
    assert [m.name for m in on_cpu("phase0", {"mask": {"name": "mine", "pattern": "random"}}).masks] == ["mine"]
    assert on_cpu("phase0", {"dtype": "fp16"}, choose={"sweep": "dtypes"}).dtypes == ("fp16",)
    both = on_cpu("phase0", {"sweep.masks": ["magnitude"]}, choose={"mask": "random"})
    assert [m.name for m in both.masks] == ["magnitude"]


def test_names_in_a_sweep_become_what_their_files_describe():
    inline = {"name": "mine", "family": "uniform", "pattern": "0110"}
    masks = on_cpu(overrides={"sweep.masks": ["uniform_1100", inline]}).masks
    assert masks == (Mask(name="uniform_1100", family="uniform", pattern="1100"), Mask(**inline))


def test_names_may_come_as_tuples_from_a_notebook():
    loaded = on_cpu(overrides={"sweep.masks": ("random",), "sweep.n": (256,), "methods": ("dense",)})
    assert (loaded.masks[0].family, loaded.sweep.n, loaded.methods) == ("random", (256,), ("dense",))


def test_only_what_a_method_splits_must_be_divisible():
    odd = {"sweep.features": [[320, 192]], "sweep.n": []}
    assert on_cpu(overrides=odd | {"methods": ["dense", "block_shock"]}).sweep.features == ((320, 192),)
    wide = {"sweep.n": [256], "methods": ["block_shock"], "hardware.world_size": 8}
    assert on_cpu(overrides=wide).hardware.world_size == 8


@pytest.mark.parametrize("name", names("masks"))
def test_periodic_and_transposable_are_told_by_the_mask(name):
    mask = on_cpu(choose={"mask": name}).mask
    assert mask.periodic == (name.startswith("uniform") or name == "checkerboard")
    assert mask.transposable == (name in ("checkerboard", "transposable_random"))


def test_permuted_dense_alone_runs_where_one_mask_is_periodic():
    loaded = on_cpu(overrides={"methods": ["permuted_dense"], "sweep.masks": ["random", "uniform_1001"]})
    assert loaded.methods == ("permuted_dense",)


def test_emulated_hardware_is_one_process():
    common = {"name": "x", "device": "cpu", "world_size": 8, "backend": "gloo", "threads": 1}
    assert Hardware(**common).processes == 8
    assert Hardware(**common, emulated=True).processes == 1


@pytest.mark.parametrize(
    ("text", "pair"),
    [
        ("sweep.n=[4096,8192]", ("sweep.n", [4096, 8192])),
        ("bias=true", ("bias", True)),
        ("limits.case_seconds=1e-3", ("limits.case_seconds", 0.001)),
        ("mask.name=no", ("mask.name", "no")),
        ('mask.pattern="0110"', ("mask.pattern", "0110")),
        ("mask.pattern=", ("mask.pattern", "")),
        ("mask={name: a, family: random}", ("mask", {"name": "a", "family": "random"})),
        ("layers.sweep=dtypes", ("layers.sweep", "dtypes")),
        (" seed = 3", ("seed", 3)),
        ("x=a=b", ("x", "a=b")),
    ],
)
def test_override_values_are_yaml_1_2(text, pair):
    assert parse_override(text) == pair
    assert type(parse_override(text)[1]) is type(pair[1])
