"""What the training scripts share; importable from the scripts in this folder only."""
