"""The CPU's own kernels in C++ behind a plain C interface; built by the compiler that is there, at first use."""
