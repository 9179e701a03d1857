import pytest

from blockshock_lib.errors import ParamsError
from blockshock_lib.kernels.patterns.table import KERNELS, PATTERNS
from blockshock_lib.params import load
from blockshock_lib.studies.gallery import hypotheses
from blockshock_lib.studies.gallery.methods import METHODS
from blockshock_lib.studies.gallery.params import expand
from tests.studies.gallery import cases
from tests.studies.gallery.cases import STUDY


def asked(hardware="cpu", **settings):
    return cases.asked("speed", {f"sweep.{name}": value for name, value in settings.items()}, hardware)


def test_every_method_is_a_kernel_of_its_pattern_and_every_kernel_a_method():
    kernels = {name: pattern.name for name, (pattern, _) in KERNELS.items()}
    assert {method.kernel: method.pattern for method in METHODS.values()} == kernels
    assert {method.pattern for method in METHODS.values()} == PATTERNS.keys()


def test_a_pattern_is_asked_for_at_the_sparsities_and_blocks_that_it_can_have():
    every = ["unstructured", "blocks", "2:4", "2:4 in blocks", "rows"]
    expanded = expand(asked(patterns=every, sparsities=[0.25, 0.75], blocks=[64, 32], batches=[8]))
    found = [(case.pattern, case.sparsity, case.block) for case in expanded]
    assert found == [
        *(("unstructured", sparsity, 0) for sparsity in (0.25, 0.75)),
        *(("blocks", sparsity, block) for sparsity in (0.25, 0.75) for block in (64, 32)),
        ("2:4", 0.5, 0),
        *(("2:4 in blocks", 0.75, block) for block in (64, 32)),
        *(("rows", sparsity, 64) for sparsity in (0.25, 0.75)),
    ]
    assert expanded[0].methods == ("searched", "dense", "coo", "csr", "ust")


def test_the_sweep_of_a_gpu_times_every_kernel_of_unstructured_sparsity():
    expanded = expand(asked(hardware="cuda"))
    (found,) = {case.methods for case in expanded if case.pattern == "unstructured"}
    assert {name for name, method in METHODS.items() if method.pattern == "unstructured"} <= set(found)


def test_patterns_without_a_method_are_not_asked_for():
    params = cases.asked("speed", {"methods": ["searched", "csr"]})
    assert {case.pattern for case in expand(params)} == {"unstructured"}


@pytest.mark.parametrize(
    ("phase", "settings", "match"),
    [
        ("speed", {"sweep.blocks": [96]}, "blocks of 96 do not divide 256x512"),
        ("speed", {"sweep.sparsities": [1.0]}, "sparsities"),
        ("speed", {"sweep.patterns": ["block"]}, "patterns"),
        ("speed", {"methods": ["bsrr"]}, "'bsrr' is not allowed; .*did you mean 'bsr'"),
        ("speed", {"methods": ["bsr", "bsr"]}, "listed twice"),
        ("speed", {"hardware.world_size": 2}, "gallery_speed measures one device; allowed: 1"),
        ("decode", {"decode.heads": 3}, "3 do not divide the width"),
        ("decode", {"decode.kv_heads": 3}, "3 does not fit"),
        ("decode", {"decode.width": 100}, "decode.width"),
        ("decode", {"methods": ["step_t1"]}, "'step_t1' is not allowed"),
        ("training", {"sweep.patterns": ["blocks"]}, "'blocks' is none of gallery_training"),
        ("speed", {"sweep.patterns": ["GELU"]}, "'GELU' is none of gallery_speed"),
        ("training", {"methods": ["csr"]}, "'csr' is not allowed"),
        ("accuracy", {"methods": ["wanda_24"]}, "every arm is held against 'trained_dense'"),
        ("accuracy", {"methods": ["trained_dense", "csr"]}, "'csr' is not allowed"),
        ("accuracy", {"methods": ["trained_dense"], "accuracy.block": 48}, "48 does not divide the width of 64"),
        ("accuracy", {"methods": ["trained_dense"], "accuracy.width": 96}, "width"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(phase, settings, match):
    with pytest.raises(ParamsError, match=match):
        cases.asked(phase, settings)


def test_the_headline_cells_are_twenty_and_those_of_the_shipped_sweeps():
    own = {"unstructured": hypotheses.UNSTRUCTURED, "2:4": hypotheses.DECODE, "blocks": hypotheses.SEED}
    cells = {(pattern, *cell) for pattern, some in own.items() for cell in some}
    asked_for = {
        (case.pattern, (case.n, case.k), case.batch, case.sparsity)
        for sweep in ("cuda", "decode", "vit")
        for case in expand(load(STUDY, "gallery_speed", choose={"hardware": "cuda", "sweep": f"gallery_speed-{sweep}"}))
    }
    assert len(cells) == 20 and cells <= asked_for


def test_sparsegpt_is_given_as_many_rows_as_its_widest_layer_has_inputs():
    def model(*methods, calibration, batch=2):
        given = {"calibration": calibration, "batch": batch}  # of 32 tokens, for layers of up to 256 inputs
        settings = {"methods": list(methods)} | {f"accuracy.{name}": value for name, value in given.items()}
        return cases.asked("accuracy", settings)

    with pytest.raises(ParamsError, match="6 sequences; allowed with SparseGPT at this size: at least 8"):
        model("trained_dense", "sparsegpt_24", calibration=6)
    assert model("trained_dense", "sparsegpt_24", calibration=7)  # 4 whole batches
    assert model("trained_dense", "sparsegpt_24", calibration=8)
    assert model("trained_dense", "wanda_24", calibration=6)
