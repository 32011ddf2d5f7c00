"""What fairseq, which is no longer developed, needs to run beside today's torch and Hydra; imported before the rest."""

import importlib
import os
import warnings

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig

from ..common.options import CONFIGS, quiet_imports

with quiet_imports():
    importlib.import_module("fairseq.models")

# fairseq calls torch and Hydra by older names: nothing a user can change, and dozens of lines before every training.
warnings.filterwarnings(
    "ignore",
    r"(?s)hydra\.experimental\.|.*(version_base parameter|Usage of deprecated keyword|against ConfigStore schema|"
    r"strict flag in the compose API|`torch\.cuda\.amp|'pin_memory' argument is set)",
)

# By default Hydra shortens the traceback of an error and ends the process, so that the run's record would not get the
# error.
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
