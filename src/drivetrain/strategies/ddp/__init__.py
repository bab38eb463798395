"""Data parallelism with a whole copy of the model on every rank (torch's DistributedDataParallel)."""
