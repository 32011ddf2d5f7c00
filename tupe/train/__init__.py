"""The second engine: pre-training and fine-tuning through transformers' Trainer. Knows no fairseq."""
