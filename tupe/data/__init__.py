"""Prepared data -> blocks, masks, batches and examples of tasks, for whatever trains on them. All of it follows from
(seed, epoch, index): nothing depends on the number of processes or data workers."""
