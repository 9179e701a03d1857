"""Small models of transformers, from their configs: trained and generating as the dense model (docs/own_model.md)."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from blockshock_lib import BlockShockLinear, BlockShockParallel
from tests import training

transformers = pytest.importorskip("transformers")
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
MODELS = {
    "Llama": (SIZES, ("model.layers.*.mlp.*_proj", "model.layers.*.self_attn.*_proj"), 14),
    "Mixtral": (
        SIZES | {"num_local_experts": 4, "num_key_value_heads": 4, "experts_implementation": "eager"},
        ("model.layers.*.self_attn.*_proj",),
        8,
    ),
    "GPT2": ({"n_embd": 128, "n_layer": 2, "n_head": 4}, ("transformer.h.*.mlp.c_*",), 4),
}


def plain(block):
    """A Conv1D, [K, N], as an nn.Linear."""
    for name in ("c_fc", "c_proj"):
        conv = getattr(block, name)
        linear = nn.Linear(*conv.weight.shape, device="meta")
        linear.weight, linear.bias = nn.Parameter(conv.weight.detach().t().contiguous()), conv.bias
        setattr(block, name, linear)


def lives(ctx, name):
    """[losses of three steps, tokens, weights] of the dense model and of the converted one, and how many it has."""
    import transformers

    sizes, plan, _ = MODELS[name]
    config = getattr(transformers, f"{name}Config")(vocab_size=96, bos_token_id=1, eos_token_id=2, **sizes)
    torch.manual_seed(0)
    dense = getattr(transformers, {"GPT2": "GPT2LMHeadModel"}.get(name, f"{name}ForCausalLM"))(config).double().eval()
    for block in dense.transformer.h if name == "GPT2" else ():
        plain(block.mlp)
    model = copy.deepcopy(dense)
    parallelize_module(model, init_device_mesh("cpu", (ctx.world_size,)), dict.fromkeys(plan, BlockShockParallel()))
    tokens, found = torch.arange(3, 35).view(2, 16), []
    for one in (dense, model):
        optimizer, losses = training.adamw(one), []
        for _ in range(3):
            optimizer.zero_grad()
            loss = one(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        said = one.generate(tokens[:, :8], max_new_tokens=8, do_sample=False)
        found.append((losses, said.tolist(), training.dense_view(one)))
    return found, sum(isinstance(module, BlockShockLinear) for module in model.modules())


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_transformers_trains_and_generates_as_the_dense_one(pair, name):
    for ((losses, tokens, weights), (found, said, state)), count in pair.call(lives, name, seconds=600):
        assert count == MODELS[name][2]
        assert found == pytest.approx(losses, abs=1e-6) and said == tokens
        torch.testing.assert_close(state, weights, rtol=0, atol=1e-6)
