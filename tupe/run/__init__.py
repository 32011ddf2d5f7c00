"""A folder that a command writes, and the process that writes it."""
