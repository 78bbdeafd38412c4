"""C++ kernels for the CPU behind a plain C interface: no headers of torch, nothing to build at installation."""
