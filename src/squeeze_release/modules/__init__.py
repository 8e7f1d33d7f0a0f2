"""The modules that may stand in for the user's own: everything else in a squeezed model keeps its class.

CompensatedLayerNorm, ~RMS, ~Group, ~Std  a norm over the kept channels, exact for the full width
IndexedLinear, IndexedConv    gather their inputs first, so that the writer may stay wider than the reader
PlacedLinear, PlacedConv      compute some of their outputs and place them among constants (compaction="index")
Shift, Constant, Passthrough  a block that adds a constant, one that is a constant, one that does nothing
NarrowMultiheadAttention      MultiheadAttention whose heads are narrower than embed_dim / num_heads
"""

from .group_norm import CompensatedGroupNorm
from .indexed import (
    INDEXED,
    PLACED,
    IndexedConv1d,
    IndexedConv2d,
    IndexedConv3d,
    IndexedLinear,
    PlacedConv1d,
    PlacedConv2d,
    PlacedConv3d,
    PlacedLinear,
    can_index,
    with_index,
    with_place,
)
from .layer_norm import CompensatedLayerNorm
from .multihead import NarrowMultiheadAttention, narrow_attention
from .rms_norm import CompensatedRMSNorm
from .standins import Constant, Passthrough, Shift
from .std_norm import CompensatedStdNorm

__all__ = [
    "INDEXED",
    "PLACED",
    "CompensatedGroupNorm",
    "CompensatedLayerNorm",
    "CompensatedRMSNorm",
    "CompensatedStdNorm",
    "Constant",
    "IndexedConv1d",
    "IndexedConv2d",
    "IndexedConv3d",
    "IndexedLinear",
    "NarrowMultiheadAttention",
    "Passthrough",
    "PlacedConv1d",
    "PlacedConv2d",
    "PlacedConv3d",
    "PlacedLinear",
    "Shift",
    "can_index",
    "narrow_attention",
    "with_index",
    "with_place",
]
