"""Fully sharded data parallelism: parameters, gradients and optimizer states are spread over ranks."""
