"""A small GPT-2 of transformers, whose linear layers are Conv1D: pruned, generating, and dense again."""

import pytest
import torch

from blockshock_lib import Sparse24, dense_, sparsify_

transformers = pytest.importorskip("transformers")


def test_a_gpt2_is_pruned_generates_and_becomes_dense_as_it_was():
    config = transformers.GPT2Config(vocab_size=96, n_embd=128, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).double().eval()
    tokens = torch.randint(96, (16, 40))
    before, loss = model.state_dict().keys(), model(tokens, labels=tokens).loss.item()
    report = sparsify_(model, Sparse24("sparsegpt"), calibration=[tokens[:8], {"input_ids": tokens[8:]}])
    assert len(report.converted) == 8 and list(report.refused) == ["lm_head"]
    assert "shares a parameter with transformer.wte" in report.refused["lm_head"]
    again = model(tokens, labels=tokens).loss.item()
    assert again != loss and again == pytest.approx(loss, rel=0.01)  # SparseGPT makes up for what it prunes
    said = model.generate(tokens[:2, :8], max_new_tokens=8, do_sample=False)
    dense_(model)
    assert type(model.transformer.h[0].mlp.c_fc) is transformers.pytorch_utils.Conv1D
    assert model.state_dict().keys() == before and model(tokens, labels=tokens).loss.item() == pytest.approx(again)
    assert torch.equal(model.generate(tokens[:2, :8], max_new_tokens=8, do_sample=False), said)
