"""Time, memory and floors of the layer, its solvers, its parts and its peers: see ../bench.py."""
