"""Code shared by the training scripts; importable from scripts beside this folder."""
