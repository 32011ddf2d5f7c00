"""Everything that differs between the supported versions of torch, numpy and Hydra; imported before the rest.

Two stacks are supported: Python 3.11/3.12 with current torch and Hydra 1.3, and Python 3.10 with torch 2.4,
fairseq 0.12.2 and Hydra 1.0 (the time of the released code). No other file asks for a version.
"""

import argparse
import codecs
import importlib
import os
import warnings
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import hydra
import numpy as np
import torch
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import AnyNode, DictConfig, ListConfig
from omegaconf.base import ContainerMetadata, Metadata

from ..common.options import CONFIGS, quiet_imports

with quiet_imports():
    importlib.import_module("fairseq.models")
from fairseq.distributed.utils import _TensorPlaceholder


def _version(module):
    return tuple(int(part) for part in module.__version__.split(".")[:2])


# Checkpoints are loaded without running code from them: the default since torch 2.6; earlier versions need this.
if _version(torch) < (2, 6):
    os.environ.setdefault("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")

# fairseq calls torch and Hydra by older names: nothing a user can change, and dozens of lines before every training.
warnings.filterwarnings(
    "ignore",
    r"(?s)hydra\.experimental\.|.*(version_base parameter|Usage of deprecated keyword|against ConfigStore schema|"
    r"strict flag in the compose API|`torch\.cuda\.amp|'pin_memory' argument is set)",
)

# By default Hydra shortens the traceback of an error and ends the process, so that the run's record would not get the
# error. (And Hydra 1.0 crashes on Python 3.10 while it does so.)
os.environ.setdefault("HYDRA_FULL_ERROR", "1")

if _version(hydra) < (1, 1):
    from hydra.experimental import compose as _compose
    from hydra.experimental import initialize_config_dir as _initialize_config_dir
else:
    from hydra import compose as _compose
    from hydra import initialize_config_dir as _initialize_config_dir

# Later versions ask for the version whose defaults to use; fairseq's own entry point uses those of 1.1.
_VERSION_BASE = {"version_base": "1.1"} if _version(hydra) >= (1, 2) else {}


def compose(config_dir: str | os.PathLike, config_name: str, overrides: Iterable[str] = ()) -> DictConfig:
    """What `fairseq-hydra-train --config-dir config_dir --config-name config_name overrides...` reads from the files,
    before fairseq fills in defaults. Interpolations are not resolved.
    """
    # Hydra completes a file with the schema registered under the same name, if there is one. fairseq-hydra-train has
    # not imported this package yet when it reads the files; to read the same here, hide its schemas meanwhile.
    store = ConfigStore.instance().repo
    groups = [name for name in store if isinstance(store[name], dict) and name != "hydra"]
    schemas = {name: store.pop(name) for name in [*groups, f"{config_name}.yaml"] if name in store}
    GlobalHydra.instance().clear()
    try:
        with _initialize_config_dir(config_dir=os.path.abspath(config_dir), **_VERSION_BASE):
            return _compose(config_name=config_name, overrides=list(overrides))
    finally:
        store.update(schemas)


def override(config: DictConfig, words: Iterable[str]) -> None:
    """Change values of what was composed, as if `compose` had got these overrides too (not of groups)."""
    overrides = OverridesParser.create().parse_overrides(list(words))
    for each in overrides:
        if each.is_sweep_override():
            raise HydraException(f"{each.key_or_group} has several values; give one")
    ConfigLoaderImpl._apply_overrides_to_config(overrides, config)


def drop_schemas() -> None:
    """Under Hydra, remove the schemas of our models from its store; call this when all models are registered.

    Hydra completes configs/model/tupe_r.yaml with a schema of the same name. When Hydra
    composes the first job of a multirun there is none yet; later jobs run in the process where the first has imported
    this package.
    """
    if HydraConfig.initialized():
        schemas = ConfigStore.instance().repo["model"]
        for path in (CONFIGS / "model").glob("*.yaml"):
            schemas.pop(path.name, None)


def _allow_harmless_globals():
    """Allow weights-only loading of what fairseq's checkpoints hold besides tensors and plain Python: options of parts
    that have no dataclass, and a numpy number as the best metric. Also of what the first of several processes sends to
    the others when it has read a checkpoint: its configuration, and placeholders for the tensors."""
    scalar = np.float64(0).__reduce__()[0]  # numpy.core.multiarray.scalar; numpy._core... since numpy 2
    dtypes = {type(np.dtype(name)) for name in ("float64", "float32", "int64")}
    allowed = [argparse.Namespace, np.dtype, scalar, *dtypes, codecs.encode]  # the last: how pickle writes bytes
    if _version(torch) >= (2, 6):  # accepts (object, name) too, so that either numpy loads what the other one wrote
        allowed += [(scalar, "numpy.core.multiarray.scalar"), (scalar, "numpy._core.multiarray.scalar")]
    allowed += [DictConfig, ListConfig, AnyNode, ContainerMetadata, Metadata, Any, dict, list, int, defaultdict]
    allowed += [_TensorPlaceholder]
    torch.serialization.add_safe_globals(allowed)


_allow_harmless_globals()
