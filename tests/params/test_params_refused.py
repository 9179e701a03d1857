"""Params: every kind of bad input is refused, with its file, its key, and what would be right."""

import math
import shutil

import pytest

from blockshock_lib import params, studies
from blockshock_lib.errors import ParamsError
from blockshock_lib.notebook import workbook
from tests.params.test_params import on_cpu, put


def refusal(*args, **more):
    with pytest.raises(ParamsError) as caught:
        on_cpu(*args, **more)
    return str(caught.value)


# (the overrides, the key that is named, what is said of it)
PAIR = {"sweep.n": [], "sweep.features": [[320, 256]]}
VALUES = [
    ({"n": [256]}, "n", "did you mean 'sweep.n'"),
    ({"timing.samples": 8.0}, "timing.samples", "8.0: Input should be a valid integer"),
    ({"seed": True}, "seed", "a valid integer"),
    ({"sweep.n": 4096}, "sweep.n", "4096; allowed: a list"),
    ({"methods": ["dense", "block_shok"]}, "methods.1", "did you mean 'block_shock'"),
    ({"methods": ["dense", "dense"]}, "methods", "'dense' is listed twice"),
    ({"methods": "headlin"}, "methods", "is no set of methods; allowed: all, training, headline; did you mean"),
    ({"hardware.world_size": 9}, "hardware.world_size", "less than or equal to 8"),
    ({"hardware.world_size": 3}, "hardware.world_size", "allowed: 2, 4, 8"),
    ({"hardware.backend": "nccl"}, "hardware.backend", "allowed: gloo with device cpu"),
    ({"hardware.name": "../x"}, "hardware.name", "no path"),
    ({"sweep.n": [0]}, "sweep.n.0", "0: Input should be greater than or equal to 64"),
    ({"sweep.n": [1 << 40]}, "sweep.n.0", "less than or equal to 1048576"),
    ({"sweep.n": []}, "sweep.n", "no size to run"),
    ({"sweep.features": [[256, 256, 256]]}, "sweep.features.0", "at most 2 items"),
    ({"sweep.n": [320]}, "sweep.n", "320 in_features (workload gaussian): row_parallel on 2 ranks splits them by 2; "),
    ({"sweep.n": [320]}, "sweep.n", "allowed: multiples of 128; nearest: 256"),
    (PAIR | {"methods": ["block_shock"], "hardware.world_size": 4}, "sweep.features", "block_shock on 4 ranks splits"),
    ({"sweep.features": [[256, 320]], "methods": ["column_parallel"]}, "sweep.features", "320 out_features"),
    ({"seed": -1}, "seed", "greater than or equal to 0"),
    ({"seed": 1 << 63}, "seed", "less than 9223372036854775808"),
    ({"timing.samples": 0}, "timing.samples", "greater than or equal to 1"),
    ({"dtype": "float16"}, "dtype", "did you mean 'fp16'"),
    ({"limits.case_seconds": 0}, "limits.case_seconds", "greater than 0"),
    ({"limits.case_seconds": 3e6}, "limits.case_seconds", "less than or equal to 2147483"),
    ({"mask": {"name": "uniform_1100", "family": "uniform", "pattern": "1110"}}, "mask", "is no mask; allowed: unif"),
    ({"mask": {"name": "random", "family": "random"}}, "mask", "is no mask"),
    ({"mask.family": "random"}, "mask", "{'family': 'random'} is no mask; allowed: uniform_1100, uniform_1010"),
    ({"workload.in_scale": 2}, "workload", "{'in_scale': 2} is no workload; allowed: gaussian, uniform"),
    ({"methods.0": "dense"}, "methods", "{'0': 'dense'}; allowed: a list"),
    ({"sweep.masks.0": "random"}, "sweep.masks", "{'0': 'random'}; allowed: a list"),
    ({"seed.low": 1}, "seed", "{'low': 1}: Input should be a valid integer"),
    ({"sweep.n.0": 4096}, "sweep.n", "{'0': 4096}; allowed: a list"),
    ({"workload": {"name": ["x"]}}, "workload", "is no workload; allowed: gaussian, uniform"),
    ({"sweep.masks": [1100]}, "sweep.masks.0", "1100 is no mask"),
    ({"mask": "random", "methods": ["permuted_dense"]}, "methods", "random is not periodic"),
    ({"timing.lead_in_s": 9.0}, "timing.lead_in_s", "lead_in_s, 9, is longer than lead_in_most_s, 3"),
    ({"timing.lead_in_most_s": 0.0}, "timing.lead_in_most_s", "is longer than lead_in_most_s, 0"),
    ({"sweep..n": [256]}, "sweep..n", "not a dotted key"),
    ({"seed": 1, "seed.x": 2}, "seed.x", "set as a whole too"),
    ({"optimizers": ["sgd"]}, "optimizers", "phase1 trains no weight; leave it out, or run phase3"),
    ({"dw": "full"}, "dw", "phase1 trains no weight"),
]
TRAINING = [
    ({"dw": "periodic", "mask": "random"}, "dw", "mask random is not periodic; nearest: exchange"),
    ({"dw": "exchange", "hardware.emulated": True}, "dw", "emulated ranks are one process; nearest: full"),
    ({"optimizers": []}, "optimizers", "nothing to train with"),
    ({"optimizers": ["sgd", "sgd"]}, "optimizers", "'sgd' is listed twice"),
    ({"learning_rates.sgd": 0.0}, "learning_rates.sgd", "greater than 0"),
    ({"learning_rates.adamw": math.nan}, "learning_rates.adamw", "finite"),
    ({"loss_steps": -1}, "loss_steps", "greater than or equal to 0"),
]


@pytest.mark.parametrize(
    ("phase", "given", "key", "says"),
    [("phase1", *one) for one in VALUES] + [("phase3", *one) for one in TRAINING],
    ids=lambda value: str(value)[:50],
)
def test_a_bad_value_is_named_with_its_key(phase, given, key, says):
    first = refusal(phase, given).splitlines()[0]
    assert first.startswith(f"--set: {key}: ") and says in first


@pytest.mark.parametrize(
    ("text", "opens", "says"),
    [
        ("timing={samples: 1, samples: 2}", "--set: timing.samples:", "duplicate key"),
        ("sweep.n=[4096", "--set: sweep.n:", "not valid YAML"),
        ("seed", "--set: seed:", "allowed: KEY=VALUE"),
        ("=3", "--set: =3:", "allowed: KEY=VALUE"),
    ],
)
def test_an_override_that_is_no_yaml_is_refused(text, opens, says):
    with pytest.raises(ParamsError) as caught:
        params.parse_override(text)
    assert str(caught.value).startswith(f"{opens} ") and says in str(caught.value)


def test_a_name_that_is_no_file_phase_or_preset_or_a_folder_without_files_is_refused(tmp_path):
    assert "empty/base.yaml: cannot be read: No such file" in refusal(root=tmp_path / "empty")
    assert refusal("phase7").startswith("phase: 'phase7' is no phase of linear; allowed: phase0, phase1")
    for (kind, name), said in {
        ("hardware", "gpu"): "--hardware: 'gpu' is no file of params/hardware; allowed: auto, cpu, cuda, cuda-1,",
        ("mask", "../x"): "--mask: '../x' is no mask",
        ("masc", "random"): "--masc: the study linear has no such choice; allowed: hardware, sweep",
        ("sweep", "phase1-cpx"): "--sweep: 'phase1-cpx' is no file of params/linear/sweeps; allowed: auto,",
    }.items():
        assert refusal(overrides={f"layers.{kind}": name}).startswith(said), "a flag, as the command passes it on"
        said = said.removeprefix("--")
        assert refusal(choose={kind: name}, said="settings").startswith(said), "an argument of open_run"
        chosen = f"settings: layers.{said}"
        assert refusal(overrides={f"layers.{kind}": name}, said="settings").startswith(chosen)


def test_of_keys_that_do_not_go_together_the_one_that_was_typed_is_named():
    def told(study, phase, given):
        with pytest.raises(ParamsError) as caught:
            params.load(studies.load(study), phase, given, choose={"hardware": "cpu"})
        return str(caught.value)

    assert told("gpt", "gpt_training", {"tracks": 3}).startswith("--set: tracks: 4 heads cannot be dealt")
    assert told("gpt", "gpt_latency", {"latency.widths": [100]}).startswith("--set: latency.widths: heads of 16 in 100")
    given = {"layers.size": "25M", "hardware.world_size": 5}
    assert told("gpt", "gpt_correctness", given).startswith("--size: '25M': 12 heads cannot be dealt")
    bound = "'latency': 'no_sync' is a bound of time"
    assert told("gpt", "gpt_training", {"layers.methods": "latency"}).startswith(f"--methods: {bound}")
    assert told("gpt", "gpt_training", {"methods": "latency"}).startswith(f"--set: methods {bound}")
    wide = {"layers.mask": "random", "layers.methods": "headline", "hardware.world_size": 8, "sweep.n": [320]}
    assert told("linear", "phase1", wide).startswith("--set: sweep.n: 320 in_features")
    assert told("linear", "phase3", {"dtype": "fp16"}).startswith("--set: dtype: adamw's squared gradients vanish")


def test_a_study_is_no_phase_and_names_its_phases():
    with pytest.raises(ParamsError, match=r"^'gpt' is a study; its phases: gpt_correctness, gpt_training, gpt"):
        studies.of_phase("gpt")


def test_every_problem_is_named_in_one_go():
    said = refusal(overrides={"bias": 1, "timing.samples": 0, "sweep.b": ["x"]})
    assert sorted(line.split(": ")[1] for line in said.splitlines()) == ["bias", "sweep.b.0", "timing.samples"]


NINE = ["[{}]".format(", ".join([f"*a{level}"] * 9)) for level in range(9)]
# Nine levels of nine: 387,420,489 values from 500 bytes, were aliases followed.
BOMB = "".join(f"a{i}: &a{i} {given}\n" for i, given in enumerate(["[x, x, x, x, x, x, x, x, x]", *NINE[:8]]))
MERGING_BOMB = "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} {{<<: {given}}}\n" for i, given in enumerate(NINE, 1))
BASE, STUDY, CPU = "base.yaml", "linear/base.yaml", "hardware/cpu.yaml"
PHASE, SWEEP = "linear/phases/phase1.yaml", "linear/sweeps/phase1-cpu.yaml"
OK = "bias: true\nprofile: last\n"  # what a phase's file must hold
LIST = "sweep: {b: [16], "
REST = "mask: checkerboard\nworkload: gaussian\nmethods: all\nproduct: auto\n"  # what the study's must

# What is bad: (a file under params/, its content, the dotted key that the message names or "", what that says).
BAD_FILES = {
    "unknown_key": (PHASE, "colour: red", "colour", "unknown key; allowed: study, phase,"),
    "misspelt_key": (PHASE, "bias: true\nprofle: last", "profle", "mean 'profile'"),
    "misspelt_nested_key": (PHASE, "timing: {smples: 2}", "timing.smples", "mean 'samples'"),
    "duplicate_key": (PHASE, "bias: true\nbias: false", "bias", "duplicate key (line 2)"),
    "duplicate_nested_key": (CPU, "timing: {samples: 2, groups: 1, samples: 3}", "timing.samples", "duplicate key"),
    "yes_for_a_bool": (PHASE, "bias: yes\nprofile: last", "bias", "'yes': Input should be a valid boolean"),
    "number_for_a_mask": (PHASE, OK + "mask: 1100", "mask", "1100 is no mask; allowed: uniform_1100"),
    "list_for_a_mapping": (PHASE, OK + "timing: [1]", "timing", "a mapping, with keys such as warmup, samples"),
    "nothing_for_a_mapping": (PHASE, OK + "limits:", "limits", "None; allowed: a mapping, with keys such as start"),
    "missing_key": (BASE, "seed: 0", "dtype", "missing"),
    "no_method": (STUDY, REST.replace("all", "[]"), "methods", "at least 1"),
    "size_not_a_multiple_of_64": (SWEEP, LIST + "n: [256, 4000]}", "sweep.n.1", "multiples of 64; nearest: 3968"),
    "bad_mask": (SWEEP, LIST + "n: [256], masks: [rndom]}", "sweep.masks.0", "mean 'random'"),
    "unknown_name_of_a_mask": (PHASE, OK + "mask: checkerbord", "mask", "is no mask; allowed: uniform_1100"),
    "phase_that_a_file_says": (PHASE, OK + "phase: phase0", "phase", "the command says it"),
    "files_that_a_file_chooses": (PHASE, "layers: cpu", "layers", "the command says it"),
    "yaml_tag": (PHASE, "bias: !!python/object/apply:os.getcwd []", "bias", "tag"),
    "harmless_yaml_tag": (PHASE, "seed: !!int '3'", "seed", "tag"),
    "yaml_anchor": (PHASE, "timing: {samples: &many 9}", "timing.samples", "anchors"),
    "yaml_anchor_of_a_key": (PHASE, "timing: {&many samples: 9}", "timing.samples", "anchors"),
    "yaml_alias": (PHASE, "seed: *many", "seed", "aliases"),
    "merge_key": (PHASE, "<<: {bias: true}", "<<", "a key must be text"),
    "key_that_is_a_number": (PHASE, "timing: {1: 2}", "timing.1", "a key must be text"),
    "yaml_1_1": (PHASE, "%YAML 1.1\n---\nbias: no", "", "allowed: YAML 1.2"),
    "two_documents": (PHASE, "bias: true\n---\nbias: false", "", "not valid YAML"),
    "broken_file": (PHASE, "bias: 'true\n", "", "not valid YAML"),
    "deep_nesting": (PHASE, "seed: " + "[" * 60000, "seed", "deeper than 16"),
    "file_of_65_kib": (PHASE, "# " + "é" * 33000, "", "larger than 64 KiB"),
    "file_that_is_not_utf8": (PHASE, b"bias: \xff", "", "not UTF-8"),
    "integer_of_5000_digits": (PHASE, "seed: " + "9" * 5000, "", "not valid YAML"),
    "file_that_holds_a_list": (PHASE, "[bias]", "", "allowed: a mapping"),
    "misspelt_kind_of_device": (CPU, "hardware: {device: cpi}", "hardware.device", "did you mean 'cpu'"),
    "text_for_a_size": (SWEEP, LIST + "n: ['256']}", "sweep.n.0", "'256': Input should be a valid integer"),
    "list_of_lists_for_batches": (SWEEP, "sweep: {n: [256], b: [[16]]}", "sweep.b.0", "a valid integer"),
    "number_that_is_not_one": (PHASE, OK + "limits: {case_seconds: .inf}", "limits.case_seconds", "a finite number"),
    "date_for_a_seed": (PHASE, OK + "seed: 2026-11-21", "seed", "a valid integer"),
    "tag_that_would_run_a_program": (STUDY, "dw: !!python/object/apply:os.system [exit 1]", "dw", "tag"),
    "bomb_of_9_to_the_9_aliases": (PHASE, BOMB, "a0", "anchors and aliases are not allowed"),
    "bomb_of_9_to_the_9_merge_keys": (CPU, MERGING_BOMB, "a0", "anchors and aliases are not allowed"),
    "file_of_1_mb": (BASE, b"seed: 1 #" + b"x" * 1_000_000, "", "larger than 64 KiB"),
}


@pytest.mark.parametrize("claim", BAD_FILES)
def test_40_bad_parameter_files(claim, tmp_path, nothing_starts):
    (file, content, key, says), out = BAD_FILES[claim], tmp_path / "out"
    root = shutil.copytree(params.PARAMS, tmp_path / "params")
    put(root, {file: content})
    with pytest.raises(ParamsError) as caught:
        workbook.execute("phase1", hardware="cpu", out=out, root=root)
    first = str(caught.value).splitlines()[0]
    assert first.startswith(f"params/{file}: {key and key + ': '}") and says in first
    assert not out.exists()
