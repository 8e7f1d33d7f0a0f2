"""squeeze-release: make pruned networks really smaller, without changing what they compute."""

from .errors import (
    ExportError,
    InputError,
    MaskError,
    ModelError,
    SqueezeError,
    StoreError,
    VerificationError,
    WeightError,
)
from .modules import CompensatedGroupNorm, CompensatedLayerNorm, CompensatedRMSNorm
from .register import register_attention
from .report import Report
from .squeeze import Squeezed, squeeze
from .store import load, save

__version__ = "0.1.0.dev0"

__all__ = [
    "CompensatedGroupNorm",
    "CompensatedLayerNorm",
    "CompensatedRMSNorm",
    "ExportError",
    "InputError",
    "MaskError",
    "ModelError",
    "Report",
    "SqueezeError",
    "Squeezed",
    "StoreError",
    "VerificationError",
    "WeightError",
    "load",
    "register_attention",
    "save",
    "squeeze",
]
