"""Grids of settings and seeds, the experiments behind the results, and their tables and figures."""
