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

    def forward(self, x0: Tensor, a: Tensor, positions: Tensor | None = None) -> Tensor:
        """x0: the scaled token embedding, a: the attention's output, both (batch, seq, dim), and so is what returns.

        With `positions`, (batch, seq) int64, each token's in its document, the convolution starts anew in each.
        """
        n = self.attention_norm(a.detach())
        g = self.gate(n) + causal_convolution(n, self.kernel, positions)
        return self.output_norm(self.output(F.silu(g) * self.value(self.embedding_norm(x0))))


def causal_convolution(x: Tensor, kernel: Tensor, positions: Tensor | None = None) -> Tensor:
    """y[t] = sum over j of kernel[:, 8 - j] * x[t - j], zero before the start: of the row, or, with `positions` (batch,
    seq), of the document. x and y: (batch, seq, dim).
    """
    if positions is None:
        padded = F.pad(x.transpose(1, 2), (KERNEL_SIZE - 1, 0))
        return F.conv1d(padded, kernel.unsqueeze(1), groups=len(kernel)).transpose(1, 2)
    padded = F.pad(x, (0, 0, KERNEL_SIZE - 1, 0))
    y = x * kernel[:, -1]
    for back in range(1, KERNEL_SIZE):
        term = padded[:, KERNEL_SIZE - 1 - back : -back] * kernel[:, KERNEL_SIZE - 1 - back]
        # Chosen, not multiplied by 0: an infinity stays in its document, and backward keeps nothing of term's size.
        y = y + term.where((positions >= back).unsqueeze(-1), 0)
    return y
