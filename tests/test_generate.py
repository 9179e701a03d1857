"""The decode example: its loop decodes as generate() does, and it prints what it says."""

import importlib.util
import re
from unittest import mock

import pytest
import torch

from blockshock_lib.files import ROOT

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "examples" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("batch", "compiled"), [(1, False), (2, False), (2, True)])
def test_its_loop_gives_the_tokens_of_generate_again_and_again(example, batch, compiled):
    model = example.loaded(None, "cpu", torch.float64)
    prompt = torch.randint(512, (batch, 9), generator=torch.Generator().manual_seed(batch))
    wanted = model.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)[:, 9:]
    decoder = example.Decoder(model, prompt, 12, compiled)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(2):
            assert torch.equal(decoder()[0], wanted)


@pytest.mark.long
@pytest.mark.parametrize("method", ["magnitude", "sparsegpt"])
def test_it_prints_rates_perplexity_and_agreement_side_by_side(example, capsys, method, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    example.main(["--method", method, "--tokens", "4", "--repeats", "1", *["--compile"] * (method == "magnitude")])
    said = capsys.readouterr().out
    assert "14 of 14 layers converted" in said and "say nothing about speed" in said
    rows = re.findall(r"^(dense|2:4) +([\d.]+) tokens/s  perplexity ([\d.]+)$", said, re.M)
    assert [name for name, *_ in rows] == ["dense", "2:4"] and all(float(rate) > 0 for _, rate, _ in rows)
    assert re.search(r"2:4 over dense: [\d.]+x; first [0-4] of 4 greedy tokens agree", said)


def test_calibration_never_holds_the_text_of_the_perplexity(example, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        example.main(["--method", "wanda", "--calibration", "0", "--tokens", "4", "--repeats", "1"])
    assert "too little --text: perplexity takes 16 rows" in capsys.readouterr().err


def test_the_first_step_on_another_stream_waits_for_what_was_queued_before(example):
    decoder, waited = example.Decoder.__new__(example.Decoder), []
    with mock.patch.object(torch, "cuda") as cuda:
        decoder.prefill = lambda: None
        decoder.step = lambda: waited.append(cuda.Stream().wait_stream.call_args)
        decoder.capture()
        assert waited[0] == mock.call(cuda.current_stream())
