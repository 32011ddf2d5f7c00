"""The fixtures of the package's tests."""

from conftest import *  # noqa: F403

del pytest_addoption  # noqa: F821  (it belongs to one place)
