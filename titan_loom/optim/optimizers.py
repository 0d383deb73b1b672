"""The optimizers of a run: Muon or AdamW for the blocks' matrices, AdamW for the other groups, behind one container.

Learning rates and weight decay are set before every step from the schedules; no state of theirs is kept here. The
moments are plain tensors under the parameters' names, so a checkpoint does not depend on the order of the groups.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from titan_loom.config import job_config
from titan_loom.errors import UserError
from titan_loom.optim.groups import NamedParameters
from titan_loom.optim.muon import Muon

# What each optimizer keeps for a parameter.
_STATES = {"Muon": {"momentum_buffer"}, "AdamW": {"step", "exp_avg", "exp_avg_sq"}}


@dataclass(frozen=True)
class Group:
    """Parameters that share an optimizer, a peak learning rate and an initial weight decay."""

    name: str
    optimizer: str
    lr: float
    weight_decay: float
    members: NamedParameters

    def describe(self) -> dict[str, Any]:
        """What a reader of the log or of a checkpoint wants to know, as plain data."""
        return {
            "name": self.name,
            "tensors": len(self.members),
            "parameters": sum(parameter.numel() for _, parameter in self.members),
            "optimizer": self.optimizer,
            "lr": self.lr,
            "weight_decay": self.weight_decay,
        }

    def split_by_decay(self) -> list[tuple[NamedParameters, float]]:
        """The members with their weight decay.

        A vector beside matrices, as `injection_scales` is, never decays: it scales what they compute, and decay would
        switch that off. A group of nothing but vectors decays as it is told.
        """
        if all(parameter.ndim <= 1 for _, parameter in self.members):
            return [(self.members, self.weight_decay)]
        matrices = [(name, parameter) for name, parameter in self.members if parameter.ndim > 1]
        vectors = [(name, parameter) for name, parameter in self.members if parameter.ndim <= 1]
        return [(matrices, self.weight_decay)] + ([(vectors, 0.0)] if vectors else [])


def plan_groups(model_groups: dict[str, NamedParameters], config: job_config.Optimizer) -> list[Group]:
    """The groups that `[optimizer]` makes of a model's; empty ones are left out.

    The model's group `muon`, its blocks' matrices, is called `matrices` when AdamW trains it.
    """
    groups = []
    for name, members in model_groups.items():
        if not members:
            continue
        if name == "muon" and config.name == "AdamW":
            groups.append(Group("matrices", "AdamW", config.lr, config.weight_decay, members))
            continue
        section = getattr(config, name)
        decay = config.weight_decay if section.weight_decay is None else section.weight_decay
        groups.append(Group(name, "Muon" if name == "muon" else "AdamW", section.lr, decay, members))
    return groups


class Optimizers:
    """The optimizers of `[optimizer]`, which step together.

    Args:
        model_groups: a model's groups, whose parameters may be sharded (DTensor).
    """

    def __init__(self, model_groups: dict[str, NamedParameters], config: job_config.Optimizer):
        self._groups = groups = plan_groups(model_groups, config)
        self._weight_decay = config.weight_decay
        self._optimizers: list[torch.optim.Optimizer] = []
        if muon := _parameter_groups(groups, "Muon"):
            self._optimizers.append(
                Muon(
                    muon,
                    momentum=config.muon.momentum,
                    ns_steps=config.muon.ns_steps,
                    ns_dtype=config.muon.ns_dtype,
                    ns_coefficients=config.muon.ns_coefficients,
                    adjust_lr_fn=config.muon.adjust_lr,
                )
            )
        if adamw := _parameter_groups(groups, "AdamW"):
            self._optimizers.append(
                torch.optim.AdamW(
                    adamw,
                    betas=(config.beta1, config.beta2),
                    eps=config.eps,
                    fused=config.implementation == "fused",
                    foreach=config.implementation == "foreach",
                )
            )

    def step(self) -> None:
        for optimizer in self._optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad()

    def set_lr(self, factor: float) -> None:
        """Set every group's learning rate to `factor` times its peak."""
        for group in self.param_groups:
            group["lr"] = group["initial_lr"] * factor

    def set_weight_decay(self, value: float) -> None:
        """Follow the schedule of `[optimizer] weight_decay`: what decays is scaled as that value is."""
        if self._weight_decay > 0:
            for group in self.param_groups:
                group["weight_decay"] = group["initial_weight_decay"] * value / self._weight_decay

    def lr(self) -> dict[str, float]:
        """The present learning rate by group."""
        return {group["name"]: group["lr"] for group in self.param_groups}

    def describe(self) -> list[dict[str, Any]]:
        """For each group name, tensors, parameters, optimizer, lr and weight_decay (peak and initial values)."""
        return [group.describe() for group in self._groups]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """torch's parameter groups, of all optimizers; two for a group in which some members never decay."""
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    def named_states(self) -> dict[str, Tensor]:
        """Every tensor of the optimizers' states as `<parameter>.<state>`; empty before the first step."""
        return {
            f"{name}.{key}": state
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for name, parameter in zip(group["param_names"], group["params"], strict=True)
            for key, state in optimizer.state.get(parameter, {}).items()
        }

    def prepare_states(self, shapes: dict[str, torch.Size]) -> dict[str, Tensor]:
        """Install zeros for states of the given names and shapes, and return them, to be filled in place.

        A state of its parameter's shape is laid out like the parameter (a DTensor for a DTensor), any other is whole.

        Raises:
            UserError: the states are those of another optimizer.
        """
        keys: dict[str, set[str]] = {}
        for full_key in shapes:
            name, _, key = full_key.rpartition(".")
            keys.setdefault(name, set()).add(key)
        for optimizer in self._optimizers:
            expected = _STATES[type(optimizer).__name__]
            for group in optimizer.param_groups:
                for name, parameter in zip(group["param_names"], group["params"], strict=True):
                    found = keys.get(name, set())
                    if found and found != expected:
                        raise UserError(
                            f"optimizer.name gives {name} to {type(optimizer).__name__}, but the checkpoint holds "
                            f"{', '.join(sorted(found))} for it; it must be the optimizer that wrote the checkpoint"
                        )
                    optimizer.state[parameter] = {
                        key: _zeros(shapes[f"{name}.{key}"], parameter, group) for key in sorted(found)
                    }
        return self.named_states()


def _parameter_groups(groups: list[Group], optimizer: str) -> list[dict[str, Any]]:
    return [
        {
            "params": members,  # torch splits the pairs and keeps the names as "param_names"
            "name": group.name,
            "lr": group.lr,
            "initial_lr": group.lr,
            "weight_decay": weight_decay,
            "initial_weight_decay": weight_decay,
        }
        for group in groups
        if group.optimizer == optimizer
        for members, weight_decay in group.split_by_decay()
    ]


def _zeros(shape: torch.Size, parameter: Tensor, group: dict[str, Any]) -> Tensor:
    if shape == parameter.shape:
        return torch.zeros_like(parameter)
    # The step count. Only a fused kernel reads it on the device; elsewhere that would cost a synchronisation.
    return torch.zeros(shape, dtype=torch.float32, device=parameter.device if group.get("fused") else "cpu")
