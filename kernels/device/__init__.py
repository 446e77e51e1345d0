"""Device functions that several kernels share; only kernels import the modules.

elementary.py: exp2, reciprocal, sigmoid, norms, raw values of a token, Delta, decays and input
scales. reflections.py: the k x k algebra of Householder products.
"""
