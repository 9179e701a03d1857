"""A small GPT-2 of transformers, whose linear layers are Conv1D: pruned, generating, and dense again."""

import copy

import pytest
import torch

from blockshock_lib import BlockSparse, Sparse24, checkpoint, dense_, load_sparse_, save_sparse, sparsify_

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


def gpt2(seed):
    config = transformers.GPT2Config(vocab_size=96, n_embd=64, n_layer=1, n_head=4, bos_token_id=1, eos_token_id=2)
    torch.manual_seed(seed)
    return transformers.GPT2LMHeadModel(config).eval()


@pytest.mark.parametrize(
    "config", [Sparse24(), Sparse24(frozen=False), BlockSparse(block=16, sparsity=0.05), Sparse24(dtype="int8")]
)
def test_a_state_of_a_sparse_gpt2_is_a_dense_ones_in_both_directions(config, tmp_path):
    sparse, dense, tokens = gpt2(0), gpt2(1), torch.arange(20)[None]
    sparsify_(sparse, config, "*.h.*")
    state = sparse.state_dict()
    assert all(state[name].shape == value.shape for name, value in dense.state_dict().items())
    dense.load_state_dict(state)
    plain = copy.deepcopy(sparse)
    dense_(plain)
    torch.testing.assert_close(dense(tokens).logits, plain(tokens).logits)
    sparse.save_pretrained(tmp_path)
    read = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    torch.testing.assert_close(read(tokens).logits, plain(tokens).logits)
    for name in ("attn.c_proj", "mlp.c_fc"):
        layer = sparse.transformer.h[0].get_submodule(name)
        x = torch.randn(3, layer.in_features)
        weight = plain.transformer.h[0].get_submodule(name).weight
        torch.testing.assert_close(layer.to_linear().weight, weight.t())
        assert layer.to_dense().shape == weight.t().shape == (layer(x).shape[1], layer.in_features)
    if isinstance(config, BlockSparse) or config.dtype:
        return
    before = sparse(tokens).logits
    doubled = {name: 2 * value if "c_" in name else value for name, value in plain.state_dict().items()}
    plain.load_state_dict(doubled)
    for assign in (False, True):
        sparse.load_state_dict({name: value.clone() for name, value in doubled.items()}, assign=assign)
        assert not torch.equal(sparse(tokens).logits, before)
        torch.testing.assert_close(sparse(tokens).logits, plain(tokens).logits)


def test_a_sparse_gpt2_goes_by_file_and_by_checkpoint_with_its_optimizer_to_a_dense_one(tmp_path):
    sparse, again, tokens = gpt2(0), gpt2(1), torch.arange(20)[None]
    sparsify_(sparse, Sparse24(frozen=False), "*.h.*")
    save_sparse(tmp_path / "model.safetensors", sparse)
    load_sparse_(again, tmp_path / "model.safetensors")
    assert torch.equal(again(tokens).logits, sparse(tokens).logits)
    dense_(again)
    models, optimizers = [sparse, again], [torch.optim.AdamW(one.parameters(), 0.01) for one in (sparse, again)]
    masks = {n: p.detach() != 0 for n, p in again.named_parameters() if "c_" in n and n.endswith("weight")}

    def step(model, optimizer):
        optimizer.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        for name, mask in masks.items() if model is again else ():
            model.get_parameter(name).grad.mul_(mask)
        optimizer.step()

    step(sparse, optimizers[0])
    checkpoint.save(tmp_path / "folder", sparse, optimizers[0])
    checkpoint.load(tmp_path / "folder", again, optimizers[1])
    for model, optimizer in zip(models, optimizers, strict=True):
        step(model, optimizer)
    torch.testing.assert_close(again(tokens).logits, sparse(tokens).logits, rtol=1e-4, atol=1e-4)
    checkpoint.load(tmp_path / "folder", sparse, optimizers[0])
