"""The experiments: one file each, run by `experiment.py`."""
