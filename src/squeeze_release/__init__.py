"""squeeze-release: make pruned networks really smaller, without changing what they compute."""

from .errors import ExportError, InputError, MaskError, ModelError, SqueezeError, VerificationError, WeightError
from .modules import CompensatedGroupNorm, CompensatedLayerNorm, CompensatedRMSNorm
from .register import register_attention
from .release import release
from .report import Report
from .squeeze import Squeezed, squeeze

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
    "VerificationError",
    "WeightError",
    "register_attention",
    "release",
    "squeeze",
]
