"""What a wrapper, an optimizer or a rank would do wrong is said by name; the matrix is in test_compositions.py."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from blockshock_lib import Linear24, Sparse24, checkpoint, sparsify_
from blockshock_lib.comm import Group
from blockshock_lib.errors import UnsupportedError
from blockshock_lib.layers import guards, parts
from tests.layers.ranks import RUNNABLE, N, built, draw


def test_a_digest_sees_every_change_of_a_tensor():
    weight = draw(N, N, dtype=torch.bfloat16)
    first = guards._digest(weight)
    assert guards._digest(weight.clone()) == first == guards._digest(weight.t().contiguous().t())
    moved = weight.t(), weight.roll(1, 0), weight.roll(1, 1), weight.flip(0)
    for other in (*moved, -weight, weight.float(), weight[:32]):
        assert guards._digest(other) != first
    swapped = weight.clone()
    swapped[3, [5, 7]] = weight[3, [7, 5]]
    assert guards._digest(swapped) != first


@pytest.mark.parametrize("kind", sorted(guards.ENTRYWISE, key=str))
def test_the_state_of_an_entry_wise_optimizer_comes_back(kind, tmp_path):
    packed = Linear24.from_linear(nn.Linear(N, N, dtype=torch.float64), mask="magnitude")
    optimizer = kind(packed.parameters())
    packed(draw(4, N, dtype=torch.float64)).square().mean().backward()
    optimizer.step()
    checkpoint.save(tmp_path / "c", packed, optimizer)
    again, wanted = kind(packed.parameters()), packed.to_dense()
    checkpoint.load(tmp_path / "c", packed, again)
    assert again.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()
    assert torch.equal(packed.to_dense(), wanted)


def test_an_optimizer_of_a_whole_weight_is_refused_packed_values_and_trains_a_dense_master():
    model = nn.Sequential(nn.Linear(N, N, bias=False, dtype=torch.float64))
    master = Linear24.from_linear(model[0], mask="magnitude", update="recompress")
    dense, keep, x = master.to_linear(), master.pattern.mask(), draw(4, N, dtype=torch.float64)
    sparsify_(model, Sparse24(frozen=False))
    for kind in (torch.optim.Muon, torch.optim.Adafactor):
        with pytest.raises(UnsupportedError, match=r'0: Linear24\(.* update="recompress"'):
            kind(model.parameters())
        for _ in range(2):
            for one in (master, dense):
                optimizer = kind(one.parameters())
                one(x).square().mean().backward()
                one.weight.grad *= keep
                optimizer.step()
            dense.weight.data *= keep
        torch.testing.assert_close(master.to_dense(), dense.weight.detach())


@pytest.mark.parametrize("name", sorted({*RUNNABLE} - {"dense", "row_parallel", "permuted_dense"}))
def test_what_would_multiply_by_a_weight_past_its_layer_is_refused(name):
    layer, x, attention = built(name, "random", draw(N, N), None, Group(0, 2)), draw(3, N), nn.MultiheadAttention(N, 2)
    attention.out_proj = layer.to("meta").to_empty(device="cpu")
    for words, use in (
        ("linear", lambda: F.linear(x, layer.weight)),
        ("T", lambda: x @ layer.weight.T),
        ("t", lambda: x @ layer.weight.t()),
        ("matmul", lambda: torch.matmul(x, layer.weight)),
        ("matmul", lambda: x @ layer.weight),
        ("embedding_bag", lambda: F.embedding_bag(torch.zeros(1, 1, dtype=int), layer.weight)),
        ("multi_head_attention_forward", lambda: attention(x, x, x)),
        ("multi_head_attention_forward", lambda: attention.eval()(x, x, x)),
    ):
        with pytest.raises(UnsupportedError, match=rf"^{words} of the weight of {type(layer).__name__}\(.* call the "):
            use()


def test_a_known_hook_is_known_however_it_is_registered_and_a_users_beside_it_is_refused():
    module, known, own = nn.Linear(N, N), lambda *_: None, lambda *_: None
    module.register_forward_pre_hook(known, with_kwargs=True)
    module.register_forward_hook(known, with_kwargs=True, always_call=True)
    parts.refuse_hooks(module, known=[known])
    module.register_forward_hook(own, with_kwargs=True)
    with pytest.raises(UnsupportedError, match=r"it has hooks \(_forward_hooks\)"):
        parts.refuse_hooks(module, known=[known])
