"""squeeze-release: make pruned networks really smaller, without changing what they compute."""

from . import prune
from .bench import Bench, bench
from .cycle import Bars, Epoch, cycle
from .cycle import Config as CycleConfig
from .cycle import Result as CycleResult
from .errors import (
    ExportError,
    InputError,
    MaskError,
    ModelError,
    RunStopped,
    SqueezeError,
    StoreError,
    VerificationError,
    WeightError,
)
from .export import Exported, export
from .follow.register import register_attention
from .inspection import Inspection, inspect
from .modules import CompensatedGroupNorm, CompensatedLayerNorm, CompensatedRMSNorm, CompensatedStdNorm
from .release import release
from .report import Report
from .squeeze import Squeezed, squeeze
from .store import load, save

__version__ = "0.1.0.dev0"

__all__ = [
    "Bars",
    "Bench",
    "CompensatedGroupNorm",
    "CompensatedLayerNorm",
    "CompensatedRMSNorm",
    "CompensatedStdNorm",
    "CycleConfig",
    "CycleResult",
    "Epoch",
    "ExportError",
    "Exported",
    "InputError",
    "Inspection",
    "MaskError",
    "ModelError",
    "Report",
    "RunStopped",
    "SqueezeError",
    "Squeezed",
    "StoreError",
    "VerificationError",
    "WeightError",
    "bench",
    "cycle",
    "export",
    "inspect",
    "load",
    "prune",
    "register_attention",
    "release",
    "save",
    "squeeze",
]
