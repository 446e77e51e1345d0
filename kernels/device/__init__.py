"""Device functions that several kernels share; only kernels import the modules.

elementary.py: exp2, reciprocal, sigmoid, softplus. activations.py: Delta from its raw value.
discretize.py: decays and input scales. raw.py: raw values of a token. reflections.py: the k x k
algebra of Householder products. norms.py: max norms.
"""
