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
from typing import Any

import numpy as np
import torch
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
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
