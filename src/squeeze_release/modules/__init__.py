"""The modules that may stand in for the user's own: everything else in a squeezed model keeps its class.

CompensatedLayerNorm, ~RMS..  a norm over the kept channels, exact for the full width
IndexedLinear, IndexedConv    gather their inputs first, so that the writer may stay wider than the reader
Shift, Constant, Passthrough  a block that adds a constant, one that is a constant, one that does nothing
NarrowMultiheadAttention      MultiheadAttention whose heads are narrower than embed_dim / num_heads
"""

from .indexed import INDEXED, IndexedConv1d, IndexedConv2d, IndexedConv3d, IndexedLinear, can_index, with_index
from .layer_norm import CompensatedLayerNorm
from .multihead import NarrowMultiheadAttention, narrow_attention
from .rms_norm import CompensatedRMSNorm
from .standins import Constant, Passthrough, Shift

__all__ = [
    "INDEXED",
    "CompensatedLayerNorm",
    "CompensatedRMSNorm",
    "Constant",
    "IndexedConv1d",
    "IndexedConv2d",
    "IndexedConv3d",
    "IndexedLinear",
    "NarrowMultiheadAttention",
    "Passthrough",
    "Shift",
    "can_index",
    "narrow_attention",
    "with_index",
]
