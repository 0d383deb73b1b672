"""Thirty experts of width 512 on 1,024 and 4,096 tokens of width 512, six for each, against a loop over the experts.

    python benchmarks/experts.py [--repeats 5]

The reference takes one expert after another: it gathers the expert's tokens, multiplies by its matrices, taken from
`weight.unbind(0)` (indexing a stack fills a whole one with zeros in backward), and adds the results where they belong.
On a CPU the grouped products that the project uses on CUDA stand beside its path. All take turns, so that they see the
same machine. Prints the median times of routing, forward and backward, and the median ratio of the reference's time to
the others', turn by turn: above 1 is faster. The load is printed.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_loom.models.layers import mixture_of_experts
from titan_loom.models.layers.expert_sum import expert_sum, grouped_expert_sum, grouped_expert_sum_backward
from titan_loom.models.layers.mixture_of_experts import MixtureOfExperts, route

DIM, WIDTH, EXPERTS, TOP_K = 512, 512, 30, 6


def by_loop(experts: MixtureOfExperts, x: Tensor, router: Tensor, bias: Tensor) -> Tensor:
    routing = route(x, router, bias, TOP_K)
    out = torch.zeros(x.shape, dtype=routing.gates.dtype, device=x.device)
    weights = zip(experts.gate_up.unbind(0), experts.down.unbind(0), strict=True)
    for expert, (gate_up, down) in enumerate(weights):
        tokens, slot = (routing.selected == expert).nonzero(as_tuple=True)
        gate, up = F.linear(x[tokens], gate_up).chunk(2, -1)
        y = F.linear(F.silu(gate) * up, down)
        out = out.index_add(0, tokens, routing.gates[tokens, slot].unsqueeze(-1) * y)
    return out


def ours(experts: MixtureOfExperts, x: Tensor, router: Tensor, bias: Tensor) -> Tensor:
    return experts(x, router, bias)[0]


class Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *arguments: Tensor) -> tuple[Tensor, Tensor]:
        out, hidden = grouped_expert_sum(*arguments)
        ctx.save_for_backward(*arguments, hidden)
        return out, hidden

    @staticmethod
    def backward(ctx, grad: Tensor, _: Tensor):
        return *grouped_expert_sum_backward(grad, *ctx.saved_tensors), None, None


def grouped(experts: MixtureOfExperts, x: Tensor, router: Tensor, bias: Tensor) -> Tensor:
    mixture_of_experts.expert_sum = Grouped.apply
    out = experts(x, router, bias)[0]
    mixture_of_experts.expert_sum = expert_sum
    return out


PATHS: dict[str, Callable] = {"loop over unbind(0)": by_loop, "ours": ours, "grouped products": grouped}


def measure(tokens: int, dtype: torch.dtype, device: str, repeats: int) -> dict[str, list[float]]:
    """Seconds of each turn by path."""
    torch.manual_seed(0)
    sizes = {"dim": DIM, "num_experts": EXPERTS, "num_shared_experts": 0, "top_k": TOP_K, "expert_dim": WIDTH}
    experts = MixtureOfExperts(**sizes).to(device, dtype)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=DIM**-0.5)
    x = torch.randn(tokens, DIM, device=device, dtype=dtype, requires_grad=True)
    upstream = torch.randn(tokens, DIM, device=device)
    router = (torch.randn(EXPERTS, DIM, device=device) * DIM**-0.5).to(dtype).requires_grad_()
    bias = torch.zeros(EXPERTS, device=device)
    seconds = {name: [] for name in PATHS}
    for repeat in range(repeats + 1):
        for name, path in PATHS.items():
            start = time.perf_counter()
            path(experts, x, router, bias).backward(upstream)
            if device == "cuda":
                torch.cuda.synchronize()
            if repeat:  # the first turn warms up
                seconds[name].append(time.perf_counter() - start)
            for tensor in (x, router, *experts.parameters()):
                tensor.grad = None
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="timed turns; the median counts")
    repeats = parser.parse_args().repeats
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(
        f"load average {os.getloadavg()[0]:.2f}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, {device}\n"
    )
    print(f"{'tokens':>7} {'dtype':9}" + "".join(f"{name + ', ms':>25}{'ratio':>7}" for name in PATHS))
    for tokens in (1024, 4096):
        for dtype in (torch.float32, torch.bfloat16):
            seconds = measure(tokens, dtype, device, repeats)
            reference = next(iter(seconds.values()))
            row = f"{tokens:7} {str(dtype).removeprefix('torch.'):9}"
            for of_path in seconds.values():
                ratio = statistics.median(a / b for a, b in zip(reference, of_path, strict=True))
                row += f"{1000 * statistics.median(of_path):25.0f}{ratio:7.2f}"
            print(row, flush=True)
    print(f"\nload average {os.getloadavg()[0]:.2f}")


if __name__ == "__main__":
    main()
