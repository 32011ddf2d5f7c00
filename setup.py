"""Metadata of the `tupe` plugin. scripts/requirements/ pins a working set of versions; scripts/setup.sh installs it."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"$', (HERE / "tupe" / "__init__.py").read_text(), re.MULTILINE).group(1)

EXTRAS = {
    "dev": ["pytest", "ruff", "hypothesis"],
    "plot": ["matplotlib"],
    "slurm": ["hydra-submitit-launcher"],
    "corpus": ["subword-nmt", "mwparserfromhell", "defusedxml", "zstandard", "datasketch"],
    "cluster": ["distributed"],
    "hf": ["transformers", "safetensors"],
}

setup(
    name="tupe",
    version=VERSION,
    description="TUPE and its rivals: position encodings in BERT-like encoders, as a fairseq plugin",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="MIT",
    packages=[*find_packages(include=["tupe*"]), "hydra_plugins.tupe_local"],
    package_data={"tupe": ["experiments/published.json", "checkpoints/hf/*.py"]},
    python_requires=">=3.10,<3.13",
    # fairseq is left out on purpose: two distributions carry it (`fairseq`, `fairseq-fixed`), see scripts/setup.sh.
    install_requires=["torch>=2.4", "numpy", "scipy", "scikit-learn", "sentencepiece", "sacremoses", "spacy", "tqdm"],
    extras_require={**EXTRAS, "all": sorted({name for names in EXTRAS.values() for name in names})},
    classifiers=[
        "License :: OSI Approved :: MIT License",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
