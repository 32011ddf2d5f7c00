"""The laboratory beside the package: `python -m lab COMMAND`, in a clone of the repository. README.md has a tour."""
