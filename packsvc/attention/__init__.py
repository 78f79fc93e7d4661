"""Attention: boundaries -> causal attention inside each segment.

`varlen` is the function, `kernels` the CUDA ones it may call, `registration` makes it transformers'
`packsvc_varlen`.
"""

from packsvc.attention.registration import NAME, register
from packsvc.attention.varlen import varlen_attention

__all__ = ["NAME", "register", "varlen_attention"]
