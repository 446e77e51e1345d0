"""The sweep without feedback (open loop), in the form in which k numbers couple the channels.

Then the coefficients of all tokens are known before the sweep, and a token of the exact solve is

    p = (lambda * h) C,  e = N (U p + c),  x~ = x + U^T e,  y = p + sigma * x~,
    h = lambda * h + (s * x~) B^T,         N = T (I - S T)^-1,  c = U ((sigma - 1) * x),

and with H the cotangent of h_t from later tokens and g that of y_t the adjoint is

    f = N^T U ((s * H) B + sigma * g),  v = g + U^T f,  H = lambda * (H + v C^T).

triton_prepare.py computes the coefficients of all tokens in parallel. triton_walk.py walks through
the tokens in either direction, one program a sample, and triton_chunks.py for few samples, several
programs a sample; walks.py chooses. triton_tokens.py computes in parallel the statistics and, from
the backward of the scan, the gradients.
"""
