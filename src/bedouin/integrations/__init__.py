"""Layers and models as other libraries have them: `hf` (transformers), `mamba_ssm` and `fla`, each
imported by its users alone, and installed as an extra: pip install ".[hf]" in a clone."""
