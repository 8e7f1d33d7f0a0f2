"""What can go, and for what stays, why: `rules` run forward over the graph and backward.

analysis.py    read first: labels and constants forward, liveness backward
biases.py      would a layer without a bias use one if it had it?
readers.py     who computes with a channel
blocks.py      whole modules that no longer depend on their input
training.py    branches that run in training only
"""

from .analysis import RULE_SETS, Analysis, analyse, rule_of, widths

__all__ = ["RULE_SETS", "Analysis", "analyse", "rule_of", "widths"]
