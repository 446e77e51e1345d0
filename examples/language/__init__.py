"""Text and evaluation of `train_lm.py`."""
