"""Device functions that several kernels share; only kernels import them."""
