"""Kernels for the CPU, in C++ behind a plain C interface: matrix products, paged attention, the whole decoder step."""
