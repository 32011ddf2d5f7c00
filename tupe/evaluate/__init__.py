"""What a model can do and has learned, without training it further: figures, predictions."""
