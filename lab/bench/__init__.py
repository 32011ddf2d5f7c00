"""Speed and memory, measured and counted: one instrument, and the commands `python -m lab bench`."""
