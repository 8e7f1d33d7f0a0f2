"""Random networks from all supported ops, with random masks: from an integer, or drawn by Hypothesis."""

from __future__ import annotations

from .attention import Attention, Cross, GroupedAttention, Multihead
from .families import Case, case_from, case_of
from .layers import Branches, Gated, HandRMSNorm, Residual, SqueezeExcite, TokenMix, Tokens
from .models import Head, Language

__all__ = [
    "Attention",
    "Branches",
    "Case",
    "Cross",
    "Gated",
    "GroupedAttention",
    "HandRMSNorm",
    "Head",
    "Language",
    "Multihead",
    "Residual",
    "SqueezeExcite",
    "TokenMix",
    "Tokens",
    "case_from",
    "case_of",
]
