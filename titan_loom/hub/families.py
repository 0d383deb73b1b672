"""A model family's part of the export: its arguments from plain data, its code for transformers.

`models/<name>/export.py` has its names for transformers; the code that exports carry is in `models/<name>/hf/`, as
`configuration_<name>.py` and `modeling_<name>.py`.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from titan_loom.config.loading import decode
from titan_loom.errors import UserError
from titan_loom.models import FAMILIES


class HFClasses(NamedTuple):
    """The classes of a family in transformers."""

    config: type
    model: type


def require_transformers(what: str) -> None:
    """Raises UserError when transformers, which `what` needs, is not installed."""
    if find_spec("transformers") is None:
        raise UserError(f"{what} needs transformers: pip install 'titan-loom[export]'")


def export_of(name: str) -> ModuleType:
    """`titan_loom.models.<name>.export`."""
    return import_module(f"titan_loom.models.{name}.export")


def decode_args(name: str, values: dict[str, Any]) -> Any:
    """The family's arguments from plain data. Raises UserError when they describe no model."""
    args_class = type(next(iter(FAMILIES[name].values())))
    return decode(args_class, {key: value for key, value in values.items() if value is not None}, prefix="model.args")


def to_hf_config(name: str, args: Any) -> dict[str, Any]:
    """The arguments of the family's transformers configuration."""
    keys = export_of(name).CONFIG_KEYS
    return {keys.get(field, field): value for field, value in vars(args).items()}


def from_hf_config(name: str, config: dict[str, Any]) -> Any:
    """The family's arguments from a `config.json`. Raises UserError when it describes no model."""
    keys = export_of(name).CONFIG_KEYS
    names = {field: keys.get(field, field) for field in vars(next(iter(FAMILIES[name].values())))}
    return decode_args(name, {field: config[key] for field, key in names.items() if key in config})


def code_files(name: str) -> list[Path]:
    """The files that an export carries."""
    folder = Path(export_of(name).__file__).parent / "hf"
    return [folder / f"configuration_{name}.py", folder / f"modeling_{name}.py"]


def hf_classes(name: str, package: str | None = None) -> HFClasses:
    """The family's classes, by default from this package's own code, else from the package named so."""
    modeling = import_module(f"{package or f'titan_loom.models.{name}.hf'}.modeling_{name}")
    prefix = export_of(name).NAME
    return HFClasses(getattr(modeling, f"{prefix}Config"), getattr(modeling, f"{prefix}ForCausalLM"))


@contextmanager
def hf_classes_in(folder: Path, name: str) -> Iterator[HFClasses]:
    """The classes that the files in `folder` define, which runs them. Leaves nothing behind, there or elsewhere."""
    package = ModuleType("titan_loom_exported")
    package.__path__ = [str(folder)]
    writes_bytecode = not sys.dont_write_bytecode
    sys.modules[package.__name__] = package
    sys.dont_write_bytecode = True
    try:
        yield hf_classes(name, package.__name__)
    finally:
        sys.dont_write_bytecode = not writes_bytecode
        for module in [module for module in sys.modules if module.split(".")[0] == package.__name__]:
            del sys.modules[module]
