"""Layers and models with the interfaces of other libraries, each in a module of its own.

`hf` (transformers), `mamba_ssm` (mamba-ssm) and `fla` (flash-linear-attention). Each is imported
only by those who use it, and installed as an extra: pip install ".[hf]" in a clone.
"""
