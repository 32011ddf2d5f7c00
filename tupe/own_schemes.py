"""The place of a user's own encodings in a folder that is handed over: there, this file holds their code."""

FILES: list[str] = []  # names of the files that the code comes from
