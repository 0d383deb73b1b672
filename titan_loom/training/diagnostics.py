"""What the loops do to the stream: a pass without gradient over one micro-batch, shown to an observer.

Everything stays on the device until the metrics are written. Padding is left out. In the names, loops count from 1 and
layers from 0.
"""

import torch
from torch import Tensor, nn

from titan_loom.data.lanes import IGNORED_LABEL
from titan_loom.distributed.data_parallel import DataParallel
from titan_loom.training.batches import MicroBatch
from titan_loom.training.loss import Loss


def diagnose(
    model: nn.Module,
    data_parallel: DataParallel,
    micro_batch: MicroBatch,
    num_loops: int | None,
    loss: Loss,
) -> dict[str, Tensor]:
    """Statistics of the forward pass of `micro_batch`, by name; called by all ranks together.

    Returns:
        `loop/<t>/layer/<l>/` `norm`, `variance`, `effective_rank`, `cosine`: see `stream_statistics`.
        `loop/<t>/loss`: cross-entropy as read out after the loop; `loop/<t>/angle`: mean angle in degrees between a
        token's state after the loop and after the one before.
        `expert/...`, of models with experts: see `expert_statistics`.
    """
    counted = micro_batch.labels != IGNORED_LABEL
    observer = StreamObserver(counted)
    with data_parallel.evaluation():
        output = model(
            micro_batch.inputs, num_loops, documents=micro_batch.documents, every_loop=True, observer=observer
        )
        for loop, hidden in enumerate(output.readouts, start=1):
            ce = loss(hidden, model.head_weight, micro_batch.labels).ce
            observer.values[f"loop/{loop}/loss"] = ce.sum() / counted.sum()
        if output.expert_load is not None:
            num_experts = output.expert_load.shape[1]
            observer.values |= expert_statistics(observer.selected, counted.flatten(), num_experts)
    return observer.values


class StreamObserver:
    """Takes the statistics of what it is shown; `counted`: (batch, seq) bool, the tokens to look at."""

    def __init__(self, counted: Tensor):
        self.values: dict[str, Tensor] = {}
        self.selected: dict[int, list[Tensor]] = {}
        """Of each loop, the experts that each layer chose: (tokens, k)."""
        self._counted = counted.flatten()
        self._z: Tensor | None = None

    def after_block(self, loop: int, layer: int, x: Tensor) -> None:
        for name, value in stream_statistics(x.flatten(0, 1), self._counted).items():
            self.values[f"loop/{loop + 1}/layer/{layer}/{name}"] = value

    def after_loop(self, loop: int, z: Tensor) -> None:
        z = z.flatten(0, 1).float()
        if self._z is not None:
            cosines = torch.cosine_similarity(z, self._z).clamp(-1, 1)
            self.values[f"loop/{loop + 1}/angle"] = _mean(cosines.acos().rad2deg(), self._counted)
        self._z = z

    def routing(self, loop: int, layer: int, selected: Tensor) -> None:
        self.selected.setdefault(loop, []).append(selected)


class GradientObserver:
    """Adds to `values`, while backward runs, the norm of the loss's gradient in the stream after each visit, as
    `loop/<t>/layer/<l>/gradient`: of this micro-batch, divided by the tokens of the global one."""

    def __init__(self, values: dict[str, Tensor]):
        self._values = values

    def after_block(self, loop: int, layer: int, x: Tensor) -> None:
        def keep(gradient: Tensor) -> None:
            self._values[f"loop/{loop + 1}/layer/{layer}/gradient"] = torch.linalg.vector_norm(gradient.float())

        if x.requires_grad:
            x.register_hook(keep)

    def after_loop(self, loop: int, z: Tensor) -> None: ...

    def routing(self, loop: int, layer: int, selected: Tensor) -> None: ...


def stream_statistics(x: Tensor, counted: Tensor) -> dict[str, Tensor]:
    """Of the tokens of `x`, (tokens, dim), for which `counted`, (tokens,) bool, holds.

    Returns:
        `norm`: mean length; `variance`: mean over the dimensions of the variance over tokens; `effective_rank`:
        exp(entropy) of the singular values' shares (Roy and Vetterli 2007); `cosine`: mean over all pairs of tokens.
    """
    x = x.float() * counted[:, None]
    count = counted.sum()
    norms = torch.linalg.vector_norm(x, dim=1)
    mean = x.sum(0) / count
    squares = torch.linalg.eigvalsh(x.T @ x)
    # What the product cannot tell from zero is zero.
    squares = squares.where(squares > squares[-1] * torch.finfo(x.dtype).eps * len(squares), 0)
    shares = squares.sqrt() / squares.sqrt().sum()
    units = torch.nn.functional.normalize(x, dim=1)
    return {
        "norm": norms.sum() / count,
        "variance": x.square().sum(0).div(count).sub(mean.square()).mean(),
        "effective_rank": torch.special.entr(shares).sum().exp(),
        "cosine": (units.sum(0).square().sum() - count) / (count * (count - 1)),
    }


def expert_statistics(selected: dict[int, list[Tensor]], counted: Tensor, num_experts: int) -> dict[str, Tensor]:
    """Of the experts that were `selected`, (tokens, k) for each layer of each loop, by the tokens `counted`.

    Returns:
        `expert/loop/<t>/layer/<l>/load`: (num_experts,), shares of the choices; `expert/loop/<t>/entropy`: of these
        shares, in nats, averaged over layers; `expert/loop/<t>/overlap`: experts that a token has in common with the
        loop before; `expert/distinct`: different experts of a token and layer over all loops.
    """
    values, before, ever = {}, None, None
    for loop, of_layers in sorted(selected.items()):
        # (layers, tokens, experts) bool
        chosen = torch.stack([_chosen(choice, num_experts) & counted[:, None] for choice in of_layers])
        load = chosen.sum(1) / chosen.sum((1, 2)).clamp(min=1)[:, None]
        values |= {f"expert/loop/{loop + 1}/layer/{layer}/load": shares for layer, shares in enumerate(load)}
        values[f"expert/loop/{loop + 1}/entropy"] = torch.special.entr(load).sum(1).mean()
        if before is not None:
            values[f"expert/loop/{loop + 1}/overlap"] = _mean((chosen & before).sum(2).float().mean(0), counted)
        before, ever = chosen, chosen if ever is None else ever | chosen
    return values | {"expert/distinct": _mean(ever.sum(2).float().mean(0), counted)}


def _chosen(selected: Tensor, num_experts: int) -> Tensor:
    """(tokens, experts) bool of (tokens, k) int64."""
    chosen = torch.zeros(len(selected), num_experts, dtype=torch.bool, device=selected.device)
    return chosen.scatter_(1, selected, True)


def _mean(values: Tensor, counted: Tensor) -> Tensor:
    return (values * counted).sum() / counted.sum()
