"""The part of the metadata that pyproject.toml cannot say: README.md as an index shows it.

TUPE_REPOSITORY=https://... python -m build      makes the links to files of the repository absolute
"""

import os
import re
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent


def readme(repository: str) -> str:
    text = (HERE / "README.md").read_text(encoding="utf-8")
    version = re.search('__version__ = "(.+)"', (HERE / "tupe" / "__init__.py").read_text(encoding="utf-8"))[1]

    def absolute(link):
        kind = "raw" if link[1].endswith((".png", ".svg")) else "blob"
        return f"]({repository}/{kind}/v{version}/{link[1]})"

    return re.sub(r"\]\((?!https?:|#)([^)]+)\)", absolute, text) if repository else text


repository = os.environ.get("TUPE_REPOSITORY", "").rstrip("/")
setup(long_description=readme(repository), long_description_content_type="text/markdown")
