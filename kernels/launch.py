"""Integer arithmetic of launches; Triton's own is made for kernels and slow on the host."""


def next_power_of_two(size: int) -> int:
    """The smallest power of two that is at least `size`, for size >= 1."""
    return 1 << (size - 1).bit_length()


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)
