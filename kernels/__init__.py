"""Operations of a Bedouin layer, each with a plain PyTorch reference in its folder.

`device`       device functions that several kernels share
`scan`         diagonal selective scan over time
`householder`  channel mixing in compact WY form
`iteration`    Picard and Jacobi: one step of all tokens at once
`direct`       the local equation of one token, the exact sweep over all tokens, its reverse sweep
`output`       the gate's view of the past, the gated and normalized output
"""
