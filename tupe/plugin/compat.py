"""What fairseq, which is no longer developed, needs to run beside today's torch and Hydra; imported before the rest."""

import importlib
import os
import warnings

from ..common.options import quiet_imports

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
