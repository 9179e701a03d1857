"""A GPT as its users write one: GPT-2's shape, of plain nn.Linear layers, all of which `sparsify_` takes."""

import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Pre-norm; causal self-attention, then an MLP with GPT-2's GELU."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, width] -> the same."""
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))


class GPT(nn.Module):
    """Learned positions, tied head; weights are drawn as GPT-2's, from torch's own generator."""

    def __init__(self, layers: int, width: int, heads: int, vocab: int, context: int):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                ends = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if ends else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """tokens [B, S] -> logits [B, S, vocab]; with targets [B, S] the mean cross-entropy, in nats."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
