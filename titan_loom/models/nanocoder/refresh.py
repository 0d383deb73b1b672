"""The gated refresh: the token embedding comes back through a gate that reads what attention has just found."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

KERNEL_SIZE = 9


class GatedRefresh(nn.Module):
    """RMSNorm_out(W_out(silu(g) * v)), with g = W_gate n + conv(n), n = RMSNorm_att(stop_grad(a)) and
    v = W_value RMSNorm_emb(x0).

    conv is depthwise and causal over time. `kernel`: (dim, 9), its last column multiplies the current token.
    """

    def __init__(self, dim: int, norm_eps: float):
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim, eps=norm_eps)
        self.embedding_norm = nn.RMSNorm(dim, eps=norm_eps)
        self.output_norm = nn.RMSNorm(dim, eps=norm_eps)
        self.gate = nn.Linear(dim, dim, bias=False)
        self.value = nn.Linear(dim, dim, bias=False)
        self.output = nn.Linear(dim, dim, bias=False)
        self.kernel = nn.Parameter(torch.empty(dim, KERNEL_SIZE))

    def forward(self, x0: Tensor, a: Tensor) -> Tensor:
        """x0: the scaled token embedding, a: the attention's output, both (batch, seq, dim), and so is what returns."""
        n = self.attention_norm(a.detach())
        g = self.gate(n) + causal_convolution(n, self.kernel)
        return self.output_norm(self.output(F.silu(g) * self.value(self.embedding_norm(x0))))


def causal_convolution(x: Tensor, kernel: Tensor) -> Tensor:
    """y[t] = sum over j of kernel[:, 8 - j] * x[t - j], zero before the start. x and y: (batch, seq, dim)."""
    padded = F.pad(x.transpose(1, 2), (KERNEL_SIZE - 1, 0))
    return F.conv1d(padded, kernel.unsqueeze(1), groups=len(kernel)).transpose(1, 2)
