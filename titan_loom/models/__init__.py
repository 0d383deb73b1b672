"""The model families by name. A configuration names a family and a flavor of it; nothing here imports torch.

A family is a package with `FLAVORS`, a table of named arguments. The arguments know how to build their model.
"""

from typing import TYPE_CHECKING

from titan_loom.config import job_config
from titan_loom.config.decoding import override
from titan_loom.errors import UserError
from titan_loom.models import loom, nanocoder
from titan_loom.models.loom.args import LoomArgs
from titan_loom.models.nanocoder.args import NanoCoderArgs

if TYPE_CHECKING:
    from torch import nn

ModelArgs = NanoCoderArgs | LoomArgs

FAMILIES: dict[str, dict[str, ModelArgs]] = {"nanocoder": nanocoder.FLAVORS, "loom": loom.FLAVORS}


def model_args(config: job_config.Model) -> ModelArgs:
    """The arguments of the model that `[model]` describes: its flavor, with `[model.args]` laid over it.

    Raises:
        UserError: for an unknown family, flavor or argument, and for arguments that describe no model.
    """
    flavors = _choose("model.name", config.name, FAMILIES)
    flavor = _choose("model.flavor", config.flavor, flavors)
    return override(flavor, config.args, prefix="model.args")


def build_model(args: ModelArgs) -> "nn.Module":
    """The model of `args`, on the current default device (use `with torch.device("meta")` to allocate nothing)."""
    return args.build()


def _choose(key: str, name: str, choices: dict):
    if name not in choices:
        raise UserError(f"{key} is {name!r}; it must be one of {', '.join(choices)}")
    return choices[name]
