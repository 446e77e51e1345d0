"""The direct sweep of several heads in Triton: kernels that need no other program's results."""
