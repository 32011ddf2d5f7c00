"""The laboratory: experiments on the claims of the TUPE paper. Not part of the wheel; started by
`python -m reproduction` in a checkout."""
