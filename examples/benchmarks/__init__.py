"""Time, memory and lower bounds of the layer, its parts and other layers; see bench.py."""
