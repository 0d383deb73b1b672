"""Cross-entropy with z-loss over a large vocabulary, chunk by chunk, so that the full logits never exist.

Loss and gradients of a chunk are computed together in forward, while its logits are there; backward only multiplies by
the upstream gradient. Nothing is recomputed, and no more than `chunk_tokens` rows of logits are held at a time.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from titan_loom.data.lanes import IGNORED_LABEL


class Losses(NamedTuple):
    loss_sum: Tensor
    """Sum over the supervised tokens of ce + z_coefficient * z, not divided: 0-dim fp32, differentiable."""

    ce: Tensor
    """Cross-entropy of each token, 0 where ignored: (...) fp32, detached."""

    z: Tensor
    """logsumexp(logits)^2 of each token, 0 where ignored: (...) fp32, detached."""


Chunk = Callable[[Tensor, Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor, Tensor | None]]
Loss = Callable[..., Losses]
"""`chunked_cross_entropy` with its chunks chosen: takes hidden, head_weight, labels and, if any, z_coefficient."""


def chunked_cross_entropy(
    hidden: Tensor,
    head_weight: Tensor,
    labels: Tensor,
    *,
    z_coefficient: Tensor | None = None,
    chunk_tokens: int,
    chunk: Chunk | None = None,
) -> Losses:
    """Losses of the logits hidden @ head_weight.T.

    Matrix products run in hidden's dtype, softmax in fp32, and the head's gradient is summed over chunks in fp32.

    Args:
        hidden: (..., dim), floating.
        head_weight: (vocab, dim), floating.
        labels: (...) int64, `IGNORED_LABEL` for tokens that count nowhere.
        z_coefficient: 0-dim; a tensor, so that a change does not recompile. Default: 0.
        chunk_tokens: tokens whose logits exist at one time.
        chunk: `chunk_losses`, or what a compiler made of it.
    """
    # Inside a Function gradients are always off, so it has to be told whether anyone wants them.
    needs_gradient = torch.is_grad_enabled() and (hidden.requires_grad or head_weight.requires_grad)
    if z_coefficient is None:
        z_coefficient = torch.zeros((), device=hidden.device)
    loss_sum, ce, z = _ChunkedCrossEntropy.apply(
        hidden.flatten(0, -2),
        head_weight,
        labels.flatten(),
        z_coefficient,
        chunk_tokens,
        chunk or chunk_losses,
        needs_gradient,
    )
    return Losses(loss_sum, ce.view_as(labels), z.view_as(labels))


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, head_weight, labels, z_coefficient, chunk_tokens, chunk_function, needs_gradient):
        weight = head_weight.to(hidden.dtype)
        ce = torch.empty(labels.shape, dtype=torch.float32, device=hidden.device)
        z = torch.empty_like(ce)
        if needs_gradient:
            grad_hidden = torch.empty_like(hidden)
            grad_weight = torch.zeros_like(head_weight, dtype=torch.float32)
        for start in range(0, len(labels), chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            ce[chunk], z[chunk], grad_logits = chunk_function(
                hidden[chunk], weight, labels[chunk], z_coefficient, needs_gradient
            )
            if needs_gradient:
                torch.mm(grad_logits, weight, out=grad_hidden[chunk])
                grad_weight += grad_logits.T @ hidden[chunk]
        if needs_gradient:
            ctx.save_for_backward(grad_hidden, grad_weight.to(head_weight.dtype))
        ctx.mark_non_differentiable(ce, z)
        return ce.sum() + z_coefficient * z.sum(), ce, z

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss, _grad_ce, _grad_z):
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad_loss, grad_weight * grad_loss, None, None, None, None, None


def chunk_losses(
    hidden: Tensor, weight: Tensor, labels: Tensor, z_coefficient: Tensor, needs_gradient: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cross-entropy and z of a chunk, both (tokens,) fp32, and the gradient of its logits in hidden's dtype."""
    logits = (hidden @ weight.T).float()  # (tokens, vocab), the one large tensor: what follows works in place
    supervised = labels != IGNORED_LABEL
    target = labels.where(supervised, 0).unsqueeze(1)
    target_logit = logits.gather(1, target).squeeze(1)
    maximum = logits.amax(1)
    exponentials = logits.sub_(maximum.unsqueeze(1)).exp_()
    total = exponentials.sum(1)
    logsumexp = maximum + total.log()
    ce = (logsumexp - target_logit) * supervised
    z = logsumexp.square() * supervised
    if not needs_gradient:
        return ce, z, None
    # d(ce + c z) / d(logits) = softmax * (1 + 2 c logsumexp) - one_hot(target)
    factor = (1 + 2 * z_coefficient * logsumexp) * supervised / total
    grad_logits = exponentials.mul_(factor.unsqueeze(1)).scatter_add_(1, target, -supervised.float().unsqueeze(1))
    return ce, z, grad_logits.to(hidden.dtype)
