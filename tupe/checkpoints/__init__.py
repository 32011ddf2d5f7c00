"""Checkpoint files: averaging, converting, exporting, and exchanging the position encoding."""
