"""Speed and memory, measured and counted."""
