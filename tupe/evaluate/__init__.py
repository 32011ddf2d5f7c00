"""What a model can do and has learned, without training it further: probes, synthetic tasks, figures, predictions."""
