"""For editable installs by old tools; the metadata is in pyproject.toml."""

from setuptools import setup

setup()
