"""Device functions that several kernels share; only kernels import the modules.

elementary.py: exp2, reciprocal, sigmoid, Delta, decays and input scales, norms. raw.py: raw values
of a token. reflections.py: the k x k algebra of Householder products.
"""
