"""The decoding phase: the model is transformers' Llama, planted faults are refused; its rule, table and figure."""

import contextlib
import re

import numpy as np
import pandas as pd
import pytest
import torch
from torch._functorch import config
from torch.nn.attention import SDPBackend

from blockshock_lib.engine import experiment
from blockshock_lib.layers import Linear24
from blockshock_lib.report import verdicts
from blockshock_lib.studies.gallery import decode, hypotheses, results
from blockshock_lib.studies.gallery.axes import AXES, TOKENS
from blockshock_lib.studies.gallery.methods import DECODERS
from blockshock_lib.studies.gallery.params import columns
from blockshock_lib.studies.gallery.report import decoded
from tests.report.frames import row
from tests.studies.gallery import cases
from tests.studies.gallery.cases import ABOUT, QUICK, STUDY, opened, said

COMPILED = ("decode_compiled", "decode_searched_compiled", "decode_24_compiled")
RUNS = ("decode_dense", "decode_searched", "decode_24", *COMPILED)  # on a CPU


def problem(**more):
    params = cases.asked("decode", QUICK | {"decode.batches": [2]} | more)
    return opened(params), params


def measured(**more):
    one, params = problem(**more)
    return pd.DataFrame(experiment.measure(one, params, STUDY))


def test_every_model_is_the_dense_one_of_the_same_weights_and_is_timed():
    rows = measured()
    found = said(rows)
    assert [name for name, words in found.items() if words == "ok"] == list(RUNS) and "GPU" in found["decode_torch"]
    timed = {(one.method, one.metric) for one in rows.itertuples() if one.value > 0}
    assert {(name, f"token_{kind}") for name in (*RUNS, "twin") for kind in ("kernel", "call")} <= timed
    value = rows.set_index(["metric", "method"])["value"]
    assert value["greedy"].eq(1).all() and value["floor_token"]["decode_24"] < value["floor_token"]["decode_searched"]
    blocks = 2 * 4 * (128 * (128 + 2 * 64) + 128 * 128 + 3 * 128 * 256)  # fp32
    assert value["packed_bytes", "decode_dense"] == blocks + 4 * 128 * 512
    assert value["packed_bytes", "decode_24"] == blocks / 4 * (4 / 2 + 1 / 8) + 4 * 128 * 512
    took = rows[rows["metric"].eq("compile_time")].set_index("method")["value"]
    assert [*took.index] == [*COMPILED] and took.gt(0).all()


def test_all_methods_take_the_kernel_of_attention_that_is_the_fastest_where_it_runs(monkeypatch):
    one, params = problem()
    times, seen = iter([3.0, 2.0, 1.0]), []  # of those that a CPU has

    @contextlib.contextmanager
    def timed(self, calls):
        seen.append(len(calls))
        ms = next(times)
        yield lambda: ms

    monkeypatch.setattr(decode.Clock, "timed", timed)
    monkeypatch.setattr(decode, "ORDER", [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
    monkeypatch.setattr(decode.Clock, "close", lambda self: seen.append("closed"))
    monkeypatch.setattr(decode, "guarded", lambda device: contextlib.nullcontext())
    one.attention = one._attention()
    assert one.attention == [SDPBackend.MATH] and seen == [
        2,
        2,
        "closed",
    ]  # of both layers; cuDNN is none
    monkeypatch.setattr(decode, "ORDER", [SDPBackend.CUDNN_ATTENTION])
    assert one._attention() == [SDPBackend.CUDNN_ATTENTION], "where none can be timed, it is left to PyTorch"
    asked = []
    monkeypatch.setattr(decode, "sdpa_kernel", lambda kernels: asked.append(kernels) or contextlib.nullcontext())
    rows = pd.DataFrame(experiment.measure(one, params, STUDY))
    assert [name for name, words in said(rows).items() if words == "ok"] == list(RUNS)
    assert all(kernels == one.attention for kernels in asked) and asked
    assert rows.loc[rows["metric"].eq("attention"), "detail"].tolist() == ["MATH"]


@pytest.mark.parametrize("method", COMPILED)
def test_a_compiled_model_steps_on_as_the_eager_dense_one_in_one_graph_that_is_compiled_once(method):
    one, _ = problem(**{"methods": [method]})
    runner = decode.DecodeRunner(one, method)
    tokens, caches, place = one.before, [cache.clone() for cache in one.caches], one.place
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for step in range(4):
            logits = runner.step(tokens, runner.caches, place + step)
            wanted = one.model(tokens, caches, place + step)
            torch.testing.assert_close([logits, *runner.caches], [wanted, *caches], rtol=1e-5, atol=1e-5)
            tokens = logits.argmax(-1)
            assert torch.equal(tokens, wanted.argmax(-1))
        with pytest.raises(torch._dynamo.exc.RecompileError):  # so would another length, and it is seen
            runner.step(tokens, [cache[:, :, 1:] for cache in caches], place)


def test_no_graph_on_disk_whose_kernel_of_attention_is_not_known_is_taken_for_a_compiled_model(monkeypatch):
    runner, asked = problem()[0].build("decode_compiled"), []
    made, usual = runner.make, config.enable_autograd_cache
    monkeypatch.setattr(runner, "make", lambda part: asked.append(config.enable_autograd_cache) or made(part))
    runner.tune()
    assert asked == [False] and config.enable_autograd_cache == usual


def test_what_the_compiler_cannot_take_is_said_and_the_others_are_timed(monkeypatch):
    def backend(graph, given):
        raise torch.OutOfMemoryError("no memory is left")

    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, **how: compiled(model, **how | {"backend": backend}))
    rows = measured(methods=["decode_dense", "decode_24", "decode_24_compiled"])
    assert said(rows)["decode_24_compiled"] == "rank 0: it cannot be compiled: no memory is left"
    assert set(rows["status"]) == {"ok", "unsupported"}
    assert {*rows[rows["metric"].eq("token_call")]["method"]} == {"decode_dense", "decode_24", "twin"}
    monkeypatch.setattr(decode, "copies_past_cache", lambda *_: 2)
    one, _ = problem()
    assert [bool(one.unsupported(name)) for name in RUNS] == [False] * 3 + [True] * 3


def test_the_model_is_transformers_llama():
    transformers = pytest.importorskip("transformers")
    mine = problem()[0].model
    layer, heads, kv = mine.layers[0], *mine.layers[0].split[:2]
    config = transformers.LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        vocab_size=512,
        rms_norm_eps=1e-5,
        rope_theta=decode.THETA,
        rope_parameters={"rope_type": "default", "rope_theta": decode.THETA},
    )
    theirs = transformers.LlamaForCausalLM(config).eval()
    theirs.model.embed_tokens.weight.data, theirs.lm_head.weight.data = mine.tokens.weight, mine.head.weight
    for other, layer in zip(theirs.model.layers, mine.layers, strict=True):
        attention, mlp = other.self_attn, other.mlp
        q, k, v = layer.qkv.weight.split([n * layer.size for n in layer.split])
        attention.q_proj.weight.data, attention.k_proj.weight.data, attention.v_proj.weight.data = q, k, v
        attention.o_proj.weight.data, mlp.down_proj.weight.data = layer.out.weight, layer.down.weight
        mlp.gate_proj.weight.data, mlp.up_proj.weight.data = layer.up.weight.chunk(2)
    tokens, caches = torch.tensor([[3, 500], [77, 8]]), torch.zeros(2, 2, 2 * kv, 8, layer.size)
    with torch.no_grad():
        for place in range(8):
            logits = mine(tokens[:, place], [*caches[..., : place + 1, :]], torch.tensor([place]))
            torch.testing.assert_close(logits, theirs(tokens[:, : place + 1]).logits[:, -1], rtol=1e-4, atol=1e-4)
            if place:
                tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], 1)


def flipped(patch):
    local = Linear24.forward
    patch.setattr(Linear24, "forward", lambda self, x: local(self, x).roll(1, -1))


def dropped(patch):
    local = Linear24.forward
    zeroed = lambda y: y.index_fill(-1, torch.tensor([5]), 0)  # noqa: E731
    patch.setattr(Linear24, "forward", lambda self, x: zeroed(local(self, x)))


def stale(patch):
    """The token's own key and value are not written into the runner's cache."""
    make = decode.DecodeRunner.make

    def forgets(self, part):
        caches, self.caches = self.caches, [one.roll(1, -2) for one in self.caches]
        made = make(self, part)
        self.caches = caches
        return made

    patch.setattr(decode.DecodeRunner, "make", forgets)


def next_token(patch):
    make = decode.DecodeRunner.make
    patch.setattr(decode.DecodeRunner, "make", lambda self, part: (made := make(self, part), (made[0], made[1] ^ 1))[1])


@pytest.mark.parametrize("plant", [flipped, dropped, stale, next_token])
def test_planted_faults_are_refused_and_not_timed(plant, monkeypatch):
    plant(monkeypatch)
    rows = measured(methods=["decode_dense", "decode_24", "decode_24_compiled"])
    for name in ("decode_24", "decode_24_compiled"):
        assert "a next token is not the dense model's" in said(rows)[name]
        assert not rows["method"].eq(name).to_numpy()[rows["metric"].eq("token_call")].any()


@pytest.mark.long
def test_a_fault_of_one_layer_of_many_is_refused_in_bf16(monkeypatch):
    def plant(self):
        if self.name == "decode_24":
            self.model.layers[-1].out.register_forward_hook(lambda layer, given, y: y.roll(1, -1))

    monkeypatch.setattr(decode.DecodeRunner, "tune", plant)
    deep = {"decode.layers": 24, "decode.contexts": [512], "decode.vocab": 64, "dtype": "bf16"}
    found = said(measured(methods=["decode_dense", "decode_24"], **deep))
    assert found["decode_dense"] == "ok" and "RMS error is" in found["decode_24"]


def planted(speeds, device="cuda", metric="token_kernel", rival=4.0, **other):
    """Records of Llama-3-8B's shape: batch -> speed of 2:4 over the best dense model, of 8 ms a token; compiled ones
    take half as long, the one without searched products `rival` ms.
    """
    rng, found = np.random.default_rng(0), []
    for batch, speed in speeds.items():
        shape = {"pattern": "Llama", **hypotheses.LLAMA_8B, "batch": batch, "sparsity": 0.5, "block": 0} | other
        about = columns(shape) | ABOUT | {"phase": "gallery_decode", "case": f"B={batch}", "device": device}
        for group in range(3):
            every = {"decode_searched": 8.0, "twin": 8.0, "decode_dense": 8.0, "decode_24": 8 / speed}
            every |= dict(zip(COMPILED, (rival, 4.0, 4 / speed), strict=True))
            for name, ms in every.items():
                rows = [row(name, "check", "bool", 1), row(name, "floor_token", "ms", 4), row(name, "greedy", "1", 1)]
                each = ms * np.exp(rng.normal(0, 0.002, 4))
                rows += [row(name, metric, "ms", value, at) for at, value in enumerate(each)]
                found += [about | {"group": group} | one for one in rows]
    return pd.DataFrame(found)


@pytest.mark.parametrize(
    ("speeds", "how", "verdict", "words"),
    [
        ({1: 1.5, 4: 1.5, 16: 1.45}, {}, "supported", "1.4 asked"),
        ({1: 1.5, 4: 1.5, 16: 1.3}, {}, "refuted", "B=16"),
        ({1: 1.5, 4: 1.5, 16: 1.4}, {}, "undecided", "B=16"),
        ({1: 1.5, 16: 1.5}, {}, "undecided", "B=16"),
        ({1: 1.5, 4: 1.5, 16: 1.5}, {"device": "cpu"}, "undecided", "CPU"),
        ({1: 1.5, 4: 1.5, 16: 1.5}, {"metric": "token_call"}, "undecided", "no cell"),
        ({1: 1.5, 4: 1.5, 16: 1.5}, {"layers": 4}, "not applicable", "4 layers of 4096x14336"),
        ({1: 1.5, 4: 1.5, 16: 1.5}, {"context": 64}, "not applicable", "64 tokens before"),
        ({}, {}, "undecided", "no cell"),
    ],
)
def test_a_whole_model_must_be_so_much_faster_at_every_batch(speeds, how, verdict, words):
    for rule in (hypotheses.p4, hypotheses.p4b):
        found = rule(planted(speeds, **how))
        assert found.verdict == verdict and words in found.why, found.why


def test_a_compiled_model_is_held_against_the_fastest_dense_one_compiled_or_not():
    speeds = dict.fromkeys(hypotheses.BATCHES, 1.5)
    assert hypotheses.p4b(planted(speeds, rival=3.0)).verdict == "refuted"
    assert hypotheses.p4b(planted(speeds, rival=5.0)).verdict == "supported"
    frame = planted(speeds)
    assert hypotheses.p4b(frame[~frame["method"].eq("decode_compiled")]).verdict == "undecided"
    eager = frame["method"].eq("decode_dense") & frame["metric"].eq("token_kernel")
    assert hypotheses.p4b(frame.assign(value=frame["value"].mask(eager, frame["value"] * 0.4))).verdict == "refuted"


def test_the_table_the_figure_and_the_answer_say_tokens_a_second():
    frame, answer = planted({1: 1.5, 16: 1.2}), STUDY.answers["gallery_decode"]
    table = STUDY.tables["tokens"](frame).set_index(["B", "method"])
    assert table.loc[(16, DECODERS["decode_searched"].label), "tokens/s"] == pytest.approx(2000, rel=0.01)
    vs = table["vs fastest dense"]
    assert vs[1, DECODERS["decode_24_compiled"].label].startswith("1.5")
    assert vs[1, DECODERS["decode_24"].label].startswith("0.75")
    assert table["same next token (share)"].eq(1).all() and len(table) == 12
    quick = STUDY.tables["tokens"](planted({1: 1.5}, rival=3.0)).set_index("method")  # than the searched and compiled
    assert quick.loc[DECODERS["decode_compiled"].label, "vs fastest dense"] == "1 (itself)"
    assert quick.loc[DECODERS["decode_24_compiled"].label, "vs fastest dense"].startswith("1.1")
    assert answer(planted({1: 1.5}, rival=3.0)).split("second ")[1].startswith("1.1")
    drawn = STUDY.figures["tokens"](frame).alt
    assert drawn.startswith("2:4, compiled makes of the fastest dense model's tokens a second 1.5")
    assert re.search(r"Dense, searched (19[89]|20[01])\d at B=16\.", drawn)
    assert answer(frame).startswith("2:4, compiled makes of the fastest dense model's tokens a second 1.5")
    assert answer(planted({1: 1.5}, rival=2.0)).endswith("tokens before); fastest dense: dense, compiled in 1.")
    compiled, time = frame["method"].isin(COMPILED), frame["metric"].eq("token_kernel")
    assert answer(frame[~(compiled & time)]).startswith("2:4 makes"), "what has no time leaves the eager models"
    assert "undecided at B=1, 1.2" in answer(planted({1: 1.0, 16: 1.2})) and "undecided" not in answer(frame)
    assert "CPU" in answer(planted({1: 1.5}, "cpu")) and "Not answered" in answer(frame.iloc[:0])
    (words,) = verdicts.twin_sentences(frame, AXES)
    assert words.startswith("dense again differs from dense in 0 of 2 cells")


def test_the_study_says_how_many_tokens_a_whole_model_makes_behind_what_its_products_say():
    said = results.answer(planted({16: 1.2, 1: 1.5}, rival=3.0))  # ms of the fastest dense one: 4 / 3 of it
    assert (
        said.startswith("Not answered: no case")
        and said.count("; a token in a CUDA graph: 2:4, compiled makes of the") == 1
    )
    assert said.index("1.1") < said.index("at B=1,") < said.index("0.9") < said.index("at B=16 (")
    assert results.answer(planted({1: 1.5}, "cpu")).endswith("graph: not answered here (no claim about speed: CPU).")
    assert decoded(planted({1: 1.5}).iloc[:0]).startswith("Not answered: no case holds valid times")
    frame = planted({1: 1.5, 4: 1.5})
    assert decoded(frame).startswith("2:4, compiled makes") and "left out" not in decoded(frame)
    fewer = decoded(frame[~frame["method"].isin(["decode_compiled", "decode_searched_compiled"])])
    assert all(f"without {TOKENS.short(name)}" in fewer for name in ("decode_compiled", "decode_searched_compiled"))
    fewer = decoded(frame[~(frame["method"].eq("decode_dense") & frame["batch"].eq(4))])
    assert "1 case left out, for one has no valid time there" in fewer and "B=4" not in fewer
    points = decoded(frame[frame["group"].eq(0)])
    assert points.startswith("No claim, for an interval is missing; by the points 2:4, compiled makes")


def test_models_of_several_shapes_are_told_apart():
    frame = pd.concat([planted({1: 1.5, 16: 1.5}), planted({1: 1.5}, layers=4).replace({"case": {"B=1": "short"}})])
    assert "1 other setting not drawn" in STUDY.figures["tokens"](frame).alt
    assert hypotheses.p4(frame).verdict == "undecided"
    assert len(STUDY.tables["tokens"](frame)) == 18
