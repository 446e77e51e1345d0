"""The direct sweep and its adjoint in plain torch: few calls for each token.

Same results as reference.py and reverse.py of `kernels.direct`, which serve every mixer and
transform. A call of torch costs a CPU 2 to 5 microseconds however small its operands are, and newly
allocated memory costs several times as much as arithmetic on it. So what a token needs is written
with `out=` into memory that is allocated once for a chunk of tokens, of which views are taken once;
what no other token depends on is computed for a chunk at once; of the mixer only k numbers per
token are part of the recurrence (rows.py); and of a sequence of a single chunk the adjoint reads
what the forward sweep has computed (trace.py), so that only the decay is computed again.
"""

from bedouin.kernels.direct.buffered.forward import allocate_steps, buffered_sweep
from bedouin.kernels.direct.buffered.reverse import buffered_reverse
from bedouin.kernels.direct.buffered.rows import takes_buffers

__all__ = ["allocate_steps", "buffered_reverse", "buffered_sweep", "takes_buffers"]
