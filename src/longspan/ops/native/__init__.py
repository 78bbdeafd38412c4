"""C++ kernels for the CPU behind a plain C interface, without headers of torch or a build at installation."""
