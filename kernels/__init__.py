"""Operations of a Bedouin layer, each with a plain PyTorch reference in its folder.

* `operands`: what travels from a layer to its kernels: tensors and parameterization
* `feedback`: the feedback W^y norm(y_{t-1}) in plain torch
* `device`: device functions that several kernels share
* `convolution`: short causal convolution with SiLU and unit length of heads
* `delta_rule`: gated delta rule: the memory of DeltaNet and DeltaProduct
* `scan`: diagonal selective scan over time
* `householder`: channel mixing in compact WY form
* `iteration`: Picard: one step of all tokens at once
* `direct`: the local equation of one token, the exact sweep over all tokens, its reverse sweep
* `track`: the recurrence of a tracker with its output
* `output`: the gate's feedback, the gated and normalized output of layers and memories
"""
