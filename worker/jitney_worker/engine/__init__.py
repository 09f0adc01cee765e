"""DECIDES who computes what in each step: pure Python, one thread, no await, no tensor, no clock, no Redis."""
