"""40 bad files of parameters: what is in them, and what must be said of each."""

from types import MappingProxyType
from typing import NamedTuple


class Bad(NamedTuple):
    """A bad input: how its message opens, what else that says, and the input. `files` go over the shipped ones."""

    opens: str
    says: str
    files: dict = MappingProxyType({})
    overrides: dict = MappingProxyType({})
    choose: dict = MappingProxyType({})
    phase: str = "phase1"
    text: str = ""


def put(root, files):
    """Write these files, relative path -> text or bytes, over the shipped ones in `root`."""
    for relative, text in files.items():
        (root / relative).write_bytes(text if isinstance(text, bytes) else text.encode())


# Nine levels of nine: 387,420,489 values from 500 bytes, were aliases followed.
BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9)
)
MERGING_BOMB = "a0: &a0 {x: 1}\n" + "".join(
    f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, 10)
)

BAD_FILES = {
    "unknown_key_of_a_file": Bad(
        "params/phases/phase1.yaml: colour:",
        "unknown key; allowed: phase,",
        files={"phases/phase1.yaml": "colour: red"},
    ),
    "misspelt_key": Bad(
        "params/phases/phase1.yaml: profle:", "mean 'profile'", files={"phases/phase1.yaml": "bias: true\nprofle: last"}
    ),
    "misspelt_nested_key": Bad(
        "params/phases/phase1.yaml: timing.smples:",
        "mean 'samples'",
        files={"phases/phase1.yaml": "timing: {smples: 2}"},
    ),
    "misspelt_key_of_a_mask_file": Bad(
        "params/masks/checkerboard.yaml: mask.famly:",
        "allowed: name, family, pattern; did you mean 'family'",
        files={"masks/checkerboard.yaml": "mask: {famly: transposable, pattern: checkerboard}"},
    ),
    "duplicate_key": Bad(
        "params/phases/phase1.yaml: bias:",
        "duplicate key (line 2)",
        files={"phases/phase1.yaml": "bias: true\nbias: false"},
    ),
    "duplicate_nested_key": Bad(
        "params/hardware/cpu.yaml: timing.samples:",
        "duplicate key",
        files={"hardware/cpu.yaml": "timing: {samples: 2, groups: 1, samples: 3}"},
    ),
    "yes_for_a_bool": Bad(
        "params/phases/phase1.yaml: bias:",
        "'yes'; allowed: true or",
        files={"phases/phase1.yaml": "bias: yes\nprofile: last"},
    ),
    "number_for_a_pattern": Bad(
        "params/masks/uniform_1100.yaml: mask.pattern:",
        'in quotes, as in "1100"',
        files={"masks/uniform_1100.yaml": "mask: {family: uniform, pattern: 1100}"},
        choose={"mask": "uniform_1100"},
    ),
    "list_for_a_mapping": Bad(
        "params/phases/phase1.yaml: timing:",
        "a mapping, with keys such as warmup, samples",
        files={"phases/phase1.yaml": "bias: true\nprofile: last\ntiming: [1]"},
    ),
    "nothing_for_a_mapping": Bad(
        "params/phases/phase1.yaml: limits:",
        "None; allowed: a mapping, with keys such as start_seconds",
        files={"phases/phase1.yaml": "bias: true\nprofile: last\nlimits:"},
    ),
    "missing_key": Bad(
        "params/workloads/gaussian.yaml: workload.distribution:",
        "missing",
        files={"workloads/gaussian.yaml": "workload: {}"},
    ),
    "no_method": Bad("params/methods/all.yaml: methods:", "at least 1", files={"methods/all.yaml": "methods: []"}),
    "size_not_a_multiple_of_64": Bad(
        "params/sweeps/phase1-cpu.yaml: sweep.n.1:",
        "4000 is not a multiple of 64; allowed: multiples of 64; nearest: 3968",
        files={"sweeps/phase1-cpu.yaml": "sweep: {n: [256, 4000], b: [16]}"},
    ),
    "bad_file_named_in_a_sweep": Bad(
        "params/masks/mine.yaml: mask.family:",
        "did you mean 'random'",
        files={"masks/mine.yaml": "mask: {family: rndom}"},
        overrides={"sweep.masks": ["mine"]},
    ),
    "unknown_file_chosen_by_a_file": Bad(
        "params/phases/phase1.yaml: layers.mask:",
        "is no file of params/masks; allowed: checkerboard, magnitude",
        files={"phases/phase1.yaml": "layers: {mask: checkerbord}"},
    ),
    "earlier_kind_chosen_by_a_file": Bad(
        "params/masks/checkerboard.yaml: layers.workload:",
        "allowed: methods, hardware, sweep",
        files={"masks/checkerboard.yaml": "layers: {workload: uniform}"},
    ),
    "layers_that_are_no_mapping": Bad(
        "params/phases/phase1.yaml: layers:", "a mapping with the keys", files={"phases/phase1.yaml": "layers: cpu"}
    ),
    "yaml_tag": Bad(
        "params/phases/phase1.yaml: bias:",
        "tag",
        files={"phases/phase1.yaml": "bias: !!python/object/apply:os.getcwd []"},
    ),
    "harmless_yaml_tag": Bad(
        "params/phases/phase1.yaml: seed:", "tag", files={"phases/phase1.yaml": "seed: !!int '3'"}
    ),
    "yaml_anchor": Bad(
        "params/phases/phase1.yaml: timing.samples:",
        "anchors",
        files={"phases/phase1.yaml": "timing: {samples: &many 9}"},
    ),
    "yaml_alias": Bad("params/phases/phase1.yaml: seed:", "aliases", files={"phases/phase1.yaml": "seed: *many"}),
    "merge_key": Bad(
        "params/phases/phase1.yaml: <<:", "a key must be text", files={"phases/phase1.yaml": "<<: {bias: true}"}
    ),
    "key_that_is_a_number": Bad(
        "params/phases/phase1.yaml: timing.1:", "a key must be text", files={"phases/phase1.yaml": "timing: {1: 2}"}
    ),
    "yaml_1_1": Bad(
        "params/phases/phase1.yaml:", "allowed: YAML 1.2", files={"phases/phase1.yaml": "%YAML 1.1\n---\nbias: no"}
    ),
    "two_documents": Bad(
        "params/phases/phase1.yaml:", "not valid YAML", files={"phases/phase1.yaml": "bias: true\n---\nbias: false"}
    ),
    "broken_file": Bad("params/phases/phase1.yaml:", "not valid YAML", files={"phases/phase1.yaml": "bias: 'true\n"}),
    "deep_nesting": Bad(
        "params/phases/phase1.yaml: seed:", "deeper than 16", files={"phases/phase1.yaml": "seed: " + "[" * 60000}
    ),
    "file_of_65_kib": Bad(
        "params/phases/phase1.yaml:", "larger than 64 KiB", files={"phases/phase1.yaml": "# " + "é" * 33000}
    ),
    "file_that_is_not_utf8": Bad(
        "params/phases/phase1.yaml:", "not UTF-8", files={"phases/phase1.yaml": b"bias: \xff"}
    ),
    "integer_of_5000_digits": Bad(
        "params/phases/phase1.yaml:", "not valid YAML", files={"phases/phase1.yaml": "seed: " + "9" * 5000}
    ),
    "file_that_holds_a_list": Bad(
        "params/phases/phase1.yaml:", "allowed: a mapping", files={"phases/phase1.yaml": "[bias]"}
    ),
    "misspelt_kind_of_device": Bad(
        "params/hardware/cpu.yaml: hardware.device:",
        "did you mean 'cpu'",
        files={"hardware/cpu.yaml": "hardware: {device: cpi, world_size: 2, backend: gloo, threads: 1}"},
    ),
    "text_for_a_size": Bad(
        "params/sweeps/phase1-cpu.yaml: sweep.n.0:",
        "'256'; allowed: a whole number",
        files={"sweeps/phase1-cpu.yaml": "sweep: {n: ['256'], b: [16]}"},
    ),
    "list_of_lists_for_batches": Bad(
        "params/sweeps/phase1-cpu.yaml: sweep.b.0:",
        "a whole number",
        files={"sweeps/phase1-cpu.yaml": "sweep: {n: [256], b: [[16]]}"},
    ),
    "number_that_is_not_one": Bad(
        "params/phases/phase1.yaml: limits.case_seconds:",
        "a finite number",
        files={"phases/phase1.yaml": "bias: true\nprofile: last\nlimits: {case_seconds: .inf}"},
    ),
    "date_for_a_seed": Bad(
        "params/phases/phase1.yaml: seed:",
        "a whole number",
        files={"phases/phase1.yaml": "bias: true\nprofile: last\nseed: 2026-11-21"},
    ),
    "tag_that_would_run_a_program": Bad(
        "params/workloads/gaussian.yaml: workload.distribution:",
        "tag",
        files={"workloads/gaussian.yaml": "workload: {distribution: !!python/object/apply:os.system [exit 1]}"},
    ),
    "bomb_of_9_to_the_9_aliases": Bad(
        "params/phases/phase1.yaml: a0:",
        "anchors and aliases are not allowed",
        files={"phases/phase1.yaml": BOMB},
    ),
    "bomb_of_9_to_the_9_merge_keys": Bad(
        "params/hardware/cpu.yaml: a0:",
        "anchors and aliases are not allowed",
        files={"hardware/cpu.yaml": MERGING_BOMB},
    ),
    "file_of_1_mb": Bad(
        "params/base.yaml:",
        "larger than 64 KiB",
        files={"base.yaml": b"seed: 1 #" + b"x" * 1_000_000},
    ),
}
