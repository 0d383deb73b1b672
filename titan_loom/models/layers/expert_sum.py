"""The weighted sum of each token's experts, with the pairs of token and expert sorted by expert.

On a CPU it runs one expert after the other, each on all its tokens, so that what lies between the matrix products stays
in the cache: in benchmarks/experts.py that takes 0.77 to 1.06 times as long as grouped products over all experts. On
CUDA, where the host would have to wait to learn how many tokens each expert has, it is grouped products, which read the
ends of the groups on the device. Either way it is one opaque operator, so that the groups' sizes, which always change,
are no reason to compile anything again, and every sum has a fixed order.

Only W_gate x and W_up x are kept for backward. The gradient of a gate needs no output of an expert:
<dL/dout, W_down a> = <W_down^T dL/dout, a>, which backward has anyway.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

# With fewer rows than this a CPU's product adds in another order, in fp32 and fp64. A group is filled up to it, so that
# no bit of a token's result depends on how many others chose its expert.
MIN_ROWS = 16


@torch.library.custom_op("titan_loom::expert_sum", mutates_args=(), device_types="cpu")
def expert_sum(
    x: Tensor, gates: Tensor, gate_up: Tensor, down: Tensor, order: Tensor, ends: Tensor
) -> tuple[Tensor, Tensor]:
    """out[i] = sum over j of gates[i, j] E(x[i]), with E = W_down(silu(W_gate x) * W_up x) of the token's j-th expert.

    Args:
        x: (tokens, dim).
        gates: (tokens, k), fp32 at least.
        gate_up: (experts, 2 width, dim): W_gate above W_up. In x's dtype, as `down` is.
        down: (experts, dim, width).
        order: (tokens x k,) int64: the pairs i k + j, sorted by expert.
        ends: (experts,) int32: where each expert's pairs end. An expert may have none.

    Returns:
        out, (tokens, dim) in the gates' dtype, and [W_gate x; W_up x] of every pair in that order, for backward.
    """
    out, hidden = _empty_results(x, gates, gate_up, down, order, ends)
    out.zero_()
    weights = zip(gate_up.unbind(0), down.unbind(0), strict=True)
    for rows, (w_in, w_out) in zip(_groups(ends), weights, strict=True):
        pairs = order[rows]
        count, tokens = len(pairs), pairs // gates.shape[1]
        if count:
            h = x[F.pad(tokens, (0, max(MIN_ROWS - count, 0)))] @ w_in.T
            hidden[rows] = h[:count]
            y = _swiglu(h) @ w_out.T
            out.index_add_(0, tokens, gates.flatten()[pairs].unsqueeze(-1) * y[:count])
    return out, hidden


@torch.library.custom_op("titan_loom::expert_sum_backward", mutates_args=(), device_types="cpu")
def expert_sum_backward(
    grad: Tensor,
    x: Tensor,
    gates: Tensor,
    gate_up: Tensor,
    down: Tensor,
    order: Tensor,
    ends: Tensor,
    hidden: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, gates, gate_up and down, shaped like them, of `grad`, shaped like the sum."""
    grad_x, grad_gates, grad_gate_up, grad_down = _empty_gradients(grad, x, gates, gate_up, down, order, ends, hidden)
    sum_x = torch.zeros_like(grad_x, dtype=grad.dtype)
    weights = zip(gate_up.unbind(0), down.unbind(0), grad_gate_up.unbind(0), grad_down.unbind(0), strict=True)
    for rows, (w_in, w_out, grad_in, grad_out) in zip(_groups(ends), weights, strict=True):
        pairs = order[rows]
        tokens, weight = pairs // gates.shape[1], gates.flatten()[pairs].unsqueeze(-1)
        of_y, h = grad[tokens], hidden[rows]
        of_a = of_y.to(x.dtype) @ w_out  # but for the gate
        a = _swiglu(h)
        grad_gates.view(-1)[pairs] = (a.to(grad.dtype) * of_a).sum(-1)
        torch.mm((weight * of_y).to(x.dtype).T, a, out=grad_out)
        of_h = _swiglu_backward((weight * of_a).to(x.dtype), h)
        torch.mm(of_h.T, x[tokens], out=grad_in)
        sum_x.index_add_(0, tokens, (of_h @ w_in).to(grad.dtype))
    return grad_x.copy_(sum_x), grad_gates, grad_gate_up, grad_down


@expert_sum.register_kernel("cuda")
def grouped_expert_sum(x, gates, gate_up, down, order, ends):
    """`expert_sum` by grouped products."""
    hidden = F.grouped_mm(x[order // gates.shape[1]], gate_up.transpose(1, 2), offs=ends)
    y = F.grouped_mm(_swiglu(hidden), down.transpose(1, 2), offs=ends)
    return (gates.unsqueeze(-1) * _by_token(y, order, gates)).sum(1), hidden


@expert_sum_backward.register_kernel("cuda")
def grouped_expert_sum_backward(grad, x, gates, gate_up, down, order, ends, hidden):
    """`expert_sum_backward` by grouped products."""
    tokens, weight = order // gates.shape[1], gates.flatten()[order].unsqueeze(-1)
    of_y = grad[tokens]
    of_a = F.grouped_mm(of_y.to(x.dtype), down, offs=ends)
    a = _swiglu(hidden)
    grad_gates = _by_token((a.to(grad.dtype) * of_a).sum(-1, keepdim=True), order, gates).squeeze(-1)
    grad_down = F.grouped_mm((weight * of_y).to(x.dtype).T, a, offs=ends)
    of_h = _swiglu_backward((weight * of_a).to(x.dtype), hidden)
    grad_gate_up = F.grouped_mm(of_h.T, x[tokens], offs=ends)
    # Gathered and added up: adding where the rows fall would add in no fixed order.
    grad_x = _by_token(F.grouped_mm(of_h, gate_up, offs=ends), order, gates).sum(1, dtype=grad.dtype).to(x.dtype)
    return grad_x, grad_gates, grad_gate_up, grad_down


def _groups(ends: Tensor) -> Iterator[slice]:
    return (slice(start, end) for start, end in pairwise([0, *ends.tolist()]))


def _by_token(rows: Tensor, order: Tensor, gates: Tensor) -> Tensor:
    """Rows of the sorted pairs, (tokens x k, ...), as (tokens, k, ...)."""
    return rows[order.argsort()].unflatten(0, gates.shape)


def _swiglu(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, dim=-1)
    return F.silu(gate) * up


def _swiglu_backward(grad: Tensor, h: Tensor) -> Tensor:
    gate, up = h.chunk(2, dim=-1)
    return torch.cat((torch.ops.aten.silu_backward(grad * up, gate), grad * F.silu(gate)), dim=-1)


@expert_sum.register_fake
def _empty_results(x, gates, gate_up, down, order, ends):
    return x.new_empty(x.shape, dtype=gates.dtype), x.new_empty(len(order), gate_up.shape[1])


@expert_sum_backward.register_fake
def _empty_gradients(grad, x, gates, gate_up, down, order, ends, hidden):
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, gates, gate_up, down))


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, grad, _grad_hidden):
    return *expert_sum_backward(grad, *ctx.saved_tensors), None, None


expert_sum.register_autograd(_backward, setup_context=_save)
