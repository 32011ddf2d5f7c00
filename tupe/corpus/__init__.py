"""Raw text -> the data folder that pre-training reads."""
