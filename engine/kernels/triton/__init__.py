"""Kernels for NVIDIA GPUs in Triton; with TRITON_INTERPRET=1 they run on the CPU, slowly, for tests."""
