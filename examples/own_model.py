"""A small GPT whose MLPs are Block-Shock on two ranks, trained beside its dense twin, saved and loaded.

torchrun --standalone --nproc-per-node 2 examples/own_model.py   # it saves into the folder gpt/ where it is called
"""

import copy
import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from blockshock_lib import BlockShockParallel, checkpoint


class MLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out, self.mlp = nn.Linear(width, 3 * width), nn.Linear(width, width), MLP(width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)  # 4 heads
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    def __init__(self, letters=11, context=64, width=128):  # widths of converted layers: multiples of 64
        super().__init__()
        self.letter, self.place = nn.Embedding(letters, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.head = nn.Linear(width, letters)

    def forward(self, text):
        return self.head(self.blocks(self.letter(text) + self.place.weight[: text.shape[1]]))


def loss_of(model, step):
    start = torch.randint(len(text) - 65, (16, 1), generator=torch.Generator().manual_seed(step))
    window = text[start + torch.arange(65)].to(device)
    return F.cross_entropy(model(window[:, :-1]).flatten(0, 1).float(), window[:, 1:].flatten())


device, dtype = "cpu", torch.float32  # on GPUs: "cuda", torch.bfloat16
text = torch.tensor(["0123456789 ".index(letter) for letter in " ".join(str(i * i) for i in range(3000))])


def main():
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh(device, (2,))  # starts torch.distributed too: gloo on a CPU, NCCL on GPUs
    torch.manual_seed(0)
    dense = GPT().to(device, dtype)
    shock = parallelize_module(copy.deepcopy(dense), mesh, {"blocks.*.mlp.*": BlockShockParallel(mask="checkerboard")})
    optimizers = {model: torch.optim.AdamW(model.parameters(), lr=1e-3) for model in (dense, shock)}
    for step in range(30):
        losses = []
        for model, optimizer in optimizers.items():
            losses.append(loss_of(model, step))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        if step % 10 == 9 and mesh.get_rank() == 0:
            print(f"step {step + 1}: loss {losses[0].item():.4f} dense, {losses[1].item():.4f} Block-Shock")

    checkpoint.save("gpt", shock, optimizers[shock], step=30)
    plain = GPT().to(device, dtype)
    done = checkpoint.load("gpt", plain)  # into plain layers; into other masks or more ranks just as well
    difference = (loss_of(plain, 30) - loss_of(shock, 30)).abs().item()
    if mesh.get_rank() == 0:
        print(f"loaded after step {done['step']}: the plain GPT's loss differs by {difference:.5f}")


if __name__ == "__main__":
    main()  # the mesh ends with it: one that outlives its process group can abort Python's exit
    torch.distributed.destroy_process_group()
