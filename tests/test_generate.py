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


def said(example, capsys, *args):
    """What it says of arguments that it does not take: one sentence, and no table of them."""
    with pytest.raises(SystemExit) as error:
        example.main([*map(str, args)])
    assert error.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_numbers_and_files_that_cannot_be_are_refused_in_a_sentence(example, capsys, tmp_path):
    transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=512, **example.SMALL)).save_pretrained(tmp_path)
    for words, args in (
        ("argument --tokens: 1: a whole number from 2 on", ["--tokens", 1]),
        ("argument --batch: 0: a whole number from 1 on", ["--batch", 0]),
        ("argument --repeats: 0: a whole number from 1 on", ["--repeats", "0"]),
        ("argument --calibration: -1: a whole number from 0 on", ["--calibration", -1]),
        ("argument --tokens: x: a whole number from 2 on", ["--tokens", "x"]),
        ("none.txt is no file", ["--text", "none.txt"]),
        ("nowhere is no folder", ["nowhere"]),
        ("cannot be read as a tokenizer", [tmp_path]),
        ("as --tokens 5000 after a prompt of 32 needs 5032 positions, and the model has 2048", ["--tokens", 5000]),
        ("no linear layer of the model is taken by filter='*.nope.*'", ["--filter", "*.nope.*"]),
    ):
        assert words in said(example, capsys, *args), words


def test_models_that_the_loop_would_decode_wrongly_are_refused_by_name(example, capsys, tmp_path):
    common = {"vocab_size": 96, "hidden_size": 64, "num_layers": 2}
    neo = transformers.GPTNeoConfig(**common, num_heads=2, attention_types=[[["global", "local"], 1]], window_size=64)
    rotating = transformers.MistralConfig(**example.SMALL, vocab_size=96, sliding_window=48)
    bloom = transformers.BloomConfig(vocab_size=96, hidden_size=64, n_layer=1, n_head=2)
    mamba = transformers.MambaConfig(vocab_size=96, hidden_size=64, num_hidden_layers=1)
    for config, words in (
        (neo, "attends to 64 tokens (window_size), and prompt and --tokens are 96: leave out --tokens beyond 32"),
        (rotating, "attends to 48 tokens (sliding_window), and prompt and --tokens are 96"),
        (bloom, "BloomForCausalLM takes no static cache"),
        (mamba, "MambaForCausalLM takes no static cache"),
    ):
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / config.model_type)
        assert words in said(example, capsys, tmp_path / config.model_type, "--tokens", "64")
    assert not example.unfit(transformers.AutoModelForCausalLM.from_config(neo), 32, 32)


def test_the_layers_are_found_under_the_names_of_llama_and_of_gpt2(example):
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=96, n_embd=64, n_layer=1, n_head=2))
    llama = example.loaded(None, "cpu", torch.float32)
    assert example.filter_of(gpt2) == "*.h.*" and example.filter_of(llama) == "*.layers.*"
