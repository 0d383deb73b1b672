"""Reading exports without running their code: the model's arguments and its tensors as the trainer has them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from titan_loom.errors import UserError
from titan_loom.hub.families import export_of, from_hf_config
from titan_loom.models import FAMILIES, build_model


def read_json(path: Path) -> dict[str, Any]:
    """Raises UserError when there is no JSON at `path`."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error


def read_args(folder: Path) -> tuple[str, Any]:
    """Family and arguments of the model in `folder`. Raises UserError when it is none of ours."""
    config = read_json(folder / "config.json")
    name = config.get("model_type", "")
    if name not in FAMILIES:
        raise UserError(f"{folder} holds a model of the type {name!r}; it must be one of {', '.join(FAMILIES)}")
    return name, from_hf_config(name, config)


def read_weights(folder: Path, name: str, args: Any) -> dict[str, Tensor]:
    """The tensors of the trainer's model by name, in its shapes and dtypes, of the export in `folder`.

    They are mapped from the files where these have that dtype. Raises UserError when anything is missing, too many or
    of another shape.
    """
    found = _read_tensors(folder)
    with torch.device("meta"):
        model = build_model(args)
    weights = {}
    for own_name, own in model.state_dict().items():
        hf_name, like = export_of(name).to_hf_tensor(own_name, own)
        if hf_name not in found:
            raise UserError(f"{folder} has no tensor {hf_name}")
        tensor = found.pop(hf_name)
        if tensor.shape != like.shape:
            raise UserError(f"{folder}: {hf_name} has the shape {list(tensor.shape)} instead of {list(like.shape)}")
        weights[own_name] = tensor.to(own.dtype).reshape(own.shape)
    if found:
        raise UserError(f"{folder} has tensors that are not the model's: {', '.join(sorted(found))}")
    return weights


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                tensors |= {key: file.get_tensor(key) for key in file.offset_keys()}
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path} cannot be read: {error}") from error
    return tensors
