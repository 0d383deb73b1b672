"""The closed form of the model's FLOPs against what torch counts in the kernels that run on a CPU.

Torch knows the CPU's attention kernel by no formula and would count nothing for it.
"""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from titan_loom.distributed.init import materialize
from titan_loom.models import build_model
from titan_loom.models.nanocoder.args import NanoCoderArgs

SCALAR = NanoCoderArgs(
    vocab_size=67,
    dim=24,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn_dim=40,
    prelude=1,
    loop=2,
    coda=1,
    num_loops=2,
    ngram_rows=53,
    ngram_dim=4,
)
GATED = replace(SCALAR, refresh="gated")
BATCH, SEQ = 2, 48

_aten = torch.ops.aten


def forward_count(query, key, value, *_args, out_shape=None, **_kwargs) -> int:
    return sdpa_flop_count(query, *_with_all_heads(query, key, value))


def backward_count(grad, query, key, value, *_args, out_shape=None, **_kwargs) -> int:
    return sdpa_backward_flop_count(grad, query, *_with_all_heads(query, key, value))


def _with_all_heads(query, *shapes) -> list[tuple[int, ...]]:
    """Every query head computes with a key and a value head, shared or not."""
    return [(batch, query[1], *rest) for batch, _, *rest in shapes]


KERNELS = {
    _aten._scaled_dot_product_flash_attention_for_cpu: forward_count,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: backward_count,
}


def counted(function) -> int:
    """FLOPs of matrix products and attention in `function()`; the closed form leaves convolutions out."""
    with FlopCounterMode(display=False, custom_mapping=KERNELS) as counter:
        function()
    convolutions = sum(flops for op, flops in counter.get_flop_counts()["Global"].items() if "convolution" in str(op))
    return counter.get_total_flops() - convolutions


@pytest.mark.parametrize(
    ("args", "num_loops", "backprop_loops"),
    [(SCALAR, None, None), (GATED, 3, None), *((SCALAR, 4, k) for k in (1, 3, 4)), (GATED, 4, 1)],
)
def test_forward_and_backward_each_equal_what_torch_counts(args, num_loops, backprop_loops):
    with torch.device("meta"):
        model = build_model(args)
    materialize(model, torch.device("cpu"), 0)
    tokens = torch.randint(0, args.vocab_size, (BATCH, SEQ))
    logits = []
    forward = counted(lambda: logits.append(model.logits(model(tokens, num_loops, backprop_loops).hidden)))
    backward = counted(lambda: logits[0].sum().backward())

    # Backward of the kernel computes the scores once more than the closed form, which has no recomputation, counts.
    stages = [len(stage.layers) for stage in args.stages(num_loops)]
    differentiated = sum(stages[args.num_undifferentiated(num_loops, backprop_loops) :])
    scores = 2 * BATCH * args.num_heads * SEQ**2 * args.head_dim
    closed_form = [BATCH * SEQ * model.flops_per_token(SEQ, num_loops, k) for k in (None, backprop_loops)]
    assert forward == closed_form[0] // 3
    assert backward - differentiated * scores == closed_form[1] - forward
