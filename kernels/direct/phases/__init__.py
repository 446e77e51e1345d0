"""The exact sweep in four phases (Triton), for heads whose W^y one program holds.

P prepares what a token's raw values alone determine, S sweeps over the tokens, R is the reverse
sweep and computes only what the next earlier token depends on, G the remaining gradients of all
chunks of tokens at once.
"""
