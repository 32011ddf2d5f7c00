"""`python -m reproduction run | page`: the second protocol (docs/second-protocol.md)."""

from .second import main

main()
