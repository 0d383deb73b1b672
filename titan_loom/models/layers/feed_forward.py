"""The SwiGLU feed-forward layer (arXiv 2002.05202)."""

import torch.nn.functional as F
from torch import Tensor, nn


class SwiGLU(nn.Module):
    """W_down(silu(W_gate x) * W_up x), without biases. Input and output: (..., dim)."""

    def __init__(self, dim: int, ffn_dim: int):
        super().__init__()
        self.gate = nn.Linear(dim, ffn_dim, bias=False)
        self.up = nn.Linear(dim, ffn_dim, bias=False)
        self.down = nn.Linear(ffn_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))
