"""Params: every kind of bad input is refused, with its file, its key, and what would be right."""

import shutil

import pytest

from blockshock_lib import params
from blockshock_lib.errors import ParamsError
from blockshock_lib.params import load, parse_override
from tests.params.bad_files import BAD_FILES, Bad, put


def on_cpu(phase="phase1", overrides=None, **more):
    return load(phase, overrides, **{"detect": lambda: "cpu"} | more)


@pytest.fixture
def root(tmp_path):
    return shutil.copytree(params.PARAMS, tmp_path / "params")


BAD = BAD_FILES | {
    "key_of_another_place": Bad("--set: n:", "did you mean 'sweep.n'", overrides={"n": [256]}),
    "duplicate_key_of_a_value": Bad("--set: timing.samples:", "duplicate key", text="timing={samples: 1, samples: 2}"),
    "text_for_a_whole_number": Bad(
        "--set: sweep.n.0:", "'4096'; allowed: a whole number", overrides={"sweep.n": ["4096"]}
    ),
    "fraction_for_a_whole_number": Bad(
        "--set: timing.samples:", "8.0; allowed: a whole number", overrides={"timing.samples": 8.0}
    ),
    "bool_for_a_whole_number": Bad("--set: seed:", "a whole number", overrides={"seed": True}),
    "number_for_a_bool": Bad("--set: bias:", "allowed: true or false", overrides={"bias": 1}),
    "number_for_a_list": Bad("--set: sweep.n:", "4096; allowed: a list", overrides={"sweep.n": 4096}),
    "mapping_for_a_number": Bad("--set: seed:", "{'x': 3}; allowed: a whole number", overrides={"seed.x": 3}),
    "unknown_dtype": Bad(
        "--set: dtype:", "allowed: bf16, fp16, fp32; did you mean 'bf16'", overrides={"dtype": "bf61"}
    ),
    "unknown_product": Bad(
        "--set: product:",
        "auto, reference, torch, cslt, small, tuned; did you mean 'cslt'",
        overrides={"product": "clst"},
    ),
    "unknown_method": Bad(
        "--set: methods.1:", "did you mean 'block_shock'", overrides={"methods": ["dense", "block_shok"]}
    ),
    "method_listed_twice": Bad("--set: methods:", "'dense' is listed twice", overrides={"methods": ["dense", "dense"]}),
    "world_size_of_three": Bad(
        "--set: hardware.world_size:", "3 is not allowed; allowed: 2, 4, 8", overrides={"hardware.world_size": 3}
    ),
    "nccl_on_a_cpu": Bad(
        "--set: hardware.backend:", "allowed: gloo with device cpu", overrides={"hardware.backend": "nccl"}
    ),
    "no_thread": Bad("--set: hardware.threads:", "0; allowed: at least 1", overrides={"hardware.threads": 0}),
    "size_of_zero": Bad("--set: sweep.n.0:", "0; allowed: at least 64", overrides={"sweep.n": [0]}),
    "negative_size": Bad("--set: sweep.n.0:", "at least 64", overrides={"sweep.n": [-64]}),
    "size_beyond_any_machine": Bad("--set: sweep.n.0:", "allowed: at most 1048576", overrides={"sweep.n": [1 << 40]}),
    "no_size": Bad("--set: sweep.n:", "no size to run", overrides={"sweep.n": []}),
    "features_not_a_multiple_of_64": Bad(
        "--set: sweep.features.0.1:", "nearest: 128", overrides={"sweep.features": [[256, 100]]}
    ),
    "features_that_are_no_pair": Bad(
        "--set: sweep.features.0.1:", "allowed: a pair [in, out]", overrides={"sweep.features": [[256]]}
    ),
    "features_of_three": Bad(
        "--set: sweep.features.0:", "allowed: 2 values", overrides={"sweep.features": [[256, 256, 256]]}
    ),
    "shard_not_a_multiple_of_64": Bad(
        "--set: sweep.n:",
        "320 in_features (workload gaussian): row_parallel on 2 ranks splits them by 2; "
        "allowed: multiples of 128; nearest: 256",
        overrides={"sweep.n": [320]},
    ),
    "shard_of_a_term_not_a_multiple_of_64": Bad(
        "--set: sweep.features:",
        "block_shock on 4 ranks splits them by 2",
        overrides={"sweep.features": [[320, 256]], "methods": ["block_shock"], "hardware.world_size": 4},
    ),
    "output_shard_not_a_multiple_of_64": Bad(
        "--set: sweep.features:",
        "320 out_features",
        overrides={"sweep.features": [[256, 320]], "methods": ["column_parallel"]},
    ),
    "batch_of_zero": Bad("--set: sweep.b.1:", "0; allowed: at least 1", overrides={"sweep.b": [16, 0]}),
    "no_batch": Bad("--set: sweep.b:", "at least 1", overrides={"sweep.b": []}),
    "negative_seed": Bad("--set: seed:", "at least 0", overrides={"seed": -1}),
    "seed_too_large": Bad("--set: seed:", "less than 9223372036854775808", overrides={"seed": 1 << 63}),
    "no_sample": Bad("--set: timing.samples:", "at least 1", overrides={"timing.samples": 0}),
    "deadline_of_zero": Bad("--set: limits.case_seconds:", "more than 0", overrides={"limits.case_seconds": 0}),
    "deadline_without_end": Bad(
        "--set: limits.case_seconds:", "finite", overrides={"limits.case_seconds": float("inf")}
    ),
    "uniform_pattern_of_three_ones": Bad(
        "--set: mask.pattern:", "two of four", overrides={"mask": {"name": "x", "family": "uniform", "pattern": "1110"}}
    ),
    "unknown_tile": Bad(
        "--set: mask.pattern:",
        "did you mean 'checkerboard'",
        overrides={"mask": {"name": "x", "pattern": "chekerboard"}},
    ),
    "pattern_of_another_family": Bad(
        "--set: mask.pattern:", "allowed: ''", overrides={"mask": {"name": "x", "family": "random", "pattern": "1100"}}
    ),
    "changed_mask_under_an_old_name": Bad(
        "--set: mask.pattern:", "set mask.name too", overrides={"mask.pattern": "random"}
    ),
    "name_that_is_a_path": Bad("--set: hardware.name:", "no path", overrides={"hardware.name": "../x"}),
    "permuted_dense_without_a_periodic_mask": Bad(
        "--set: methods:",
        "random is not periodic",
        overrides={"methods": ["permuted_dense"]},
        choose={"mask": "random"},
    ),
    "periodic_gradient_of_a_mask_that_is_not": Bad(
        "--set: dw:",
        "mask random is not periodic; nearest: exchange",
        phase="phase3",
        overrides={"dw": "periodic"},
        choose={"mask": "random"},
    ),
    "entries_swapped_between_emulated_ranks": Bad(
        "--set: dw:",
        "emulated ranks are one process; nearest: full",
        phase="phase3",
        overrides={"dw": "exchange", "hardware.emulated": True},
    ),
    "unknown_gradient": Bad("--set: dw:", "'exchange'", phase="phase3", overrides={"dw": "exchanged"}),
    "optimizer_where_nothing_is_trained": Bad(
        "--set: optimizers:", "phase1 trains no weight", overrides={"optimizers": ["sgd"]}
    ),
    "gradient_where_nothing_is_trained": Bad(
        "--set: dw:", "phase2 trains no weight", phase="phase2", overrides={"dw": "full"}
    ),
    "loss_where_nothing_is_trained": Bad("--set: loss_steps:", "phase1 trains no weight", overrides={"loss_steps": 5}),
    "no_optimizer": Bad("--set: optimizers:", "nothing to train with", phase="phase3", overrides={"optimizers": []}),
    "unknown_optimizer": Bad("--set: optimizers.0:", "'adamw'", phase="phase3", overrides={"optimizers": ["adam"]}),
    "optimizer_twice": Bad(
        "--set: optimizers:", "listed twice", phase="phase3", overrides={"optimizers": ["sgd", "sgd"]}
    ),
    "adamw_in_fp16": Bad(
        "params/phases/phase3.yaml: optimizers:", "vanish in fp16", phase="phase3", overrides={"dtype": "fp16"}
    ),
    "learning_rate_of_zero": Bad(
        "--set: learning_rates.sgd:", "more than 0", phase="phase3", overrides={"learning_rates.sgd": 0.0}
    ),
    "unknown_mask_in_a_sweep": Bad(
        "--set: sweep.masks.1:", "did you mean 'magnitude'", overrides={"sweep.masks": ["random", "magnitud"]}
    ),
    "number_for_a_mask_in_a_sweep": Bad(
        "--set: sweep.masks.0:", "1100 is no file of params/masks", overrides={"sweep.masks": [1100]}
    ),
    "bad_inline_workload": Bad(
        "--set: sweep.workloads.0.distribution:",
        "'gaussian'",
        overrides={"sweep.workloads": [{"name": "x", "distribution": "gausian"}]},
    ),
    "file_named_in_a_sweep_that_sets_more": Bad(
        "--set: sweep.masks.0:",
        "mine sets seed",
        files={"masks/mine.yaml": "mask: {family: random}\nseed: 3"},
        overrides={"sweep.masks": ["mine"]},
    ),
    "two_masks_of_one_name": Bad(
        "--set: sweep.masks:",
        "two different entries are called 'random'",
        overrides={"sweep.masks": ["random", {"name": "random", "family": "magnitude"}]},
    ),
    "unknown_phase": Bad(
        "command line: phase:",
        "'phase7' is no file of params/phases; allowed: phase0, phase1, phase2, phase3",
        phase="phase7",
    ),
    "phase_in_an_override": Bad("--set: phase:", "the run is of phase1", overrides={"phase": "phase0"}),
    "unknown_file_chosen": Bad(
        "command line: layers.hardware:", "allowed: auto, cpu, cuda, cuda-1", choose={"hardware": "cuda-2"}
    ),
    "unknown_file_chosen_by_an_override": Bad(
        "--set: layers.sweep:", "mean 'phase1-cpu'", overrides={"layers.sweep": "phase1-cpx"}
    ),
    "path_for_a_file": Bad("command line: layers.mask:", "is no file", choose={"mask": "../masks/random"}),
    "unknown_kind": Bad("command line: layers.masc:", "did you mean 'mask'", choose={"masc": "random"}),
    "tag_in_an_override": Bad("--set: seed:", "tag", text="seed=!!int 3"),
    "broken_override": Bad("--set: sweep.n:", "not valid YAML", text="sweep.n=[4096"),
    "override_without_a_value": Bad("--set: seed:", "allowed: KEY=VALUE", text="seed"),
    "override_without_a_key": Bad("--set: =3:", "allowed: KEY=VALUE", text="=3"),
    "override_of_an_empty_part": Bad("--set: sweep..n:", "not a dotted key", overrides={"sweep..n": [256]}),
    "override_in_whole_and_in_part": Bad("--set: seed.x:", "set as a whole too", overrides={"seed": 1, "seed.x": 2}),
}


@pytest.mark.parametrize("claim", BAD)
def test_bad_input_is_refused_with_its_file_and_key(claim, root):
    bad = BAD[claim]
    put(root, bad.files)
    with pytest.raises(ParamsError) as caught:
        overrides = dict([parse_override(bad.text)]) if bad.text else bad.overrides
        on_cpu(bad.phase, overrides, choose=bad.choose, root=root)
    first = str(caught.value).splitlines()[0]
    assert first.startswith(bad.opens + " ")
    assert bad.says in first
    assert str(root.parent) not in str(caught.value)


def test_every_problem_is_named_in_one_go():
    with pytest.raises(ParamsError) as caught:
        on_cpu(overrides={"bias": 1, "timing.samples": 0, "sweep.b": ["x"]})
    assert [line.split(": ")[1] for line in str(caught.value).splitlines()] == ["bias", "sweep.b.0", "timing.samples"]


def test_folder_without_files_is_refused(tmp_path):
    with pytest.raises(ParamsError, match=r"empty/base.yaml: cannot be read: No such file"):
        on_cpu(root=tmp_path / "empty")
