"""Code shared by the training scripts; importable only from the scripts in examples/."""
