"""The second engine: pre-training and fine-tuning in one loop of plain PyTorch (`loop.py`). Knows no fairseq."""
