"""A worker's run, step by step: written by the worker, read by `jitney trace` and `jitney simulate`."""
