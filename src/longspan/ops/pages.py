"""Memory that is used again instead of fetched anew: fresh pages cost a CPU more than many an operation."""

import functools

import torch


@functools.cache
def reuse_pages() -> None:
    """Let the C library keep freed blocks of up to 32 MB for the next tensor, in this process, from now on.

    glibc serves large blocks by new pages, which the kernel must clear one by one, until a block of that size has been
    freed once; then it keeps such blocks. So one is taken and freed, untouched. Elsewhere this does nothing.
    """
    torch.empty(32 * 2**20 - 2**16, dtype=torch.uint8)
