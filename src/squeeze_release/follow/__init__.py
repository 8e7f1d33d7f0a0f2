"""Does the user's own code follow the new widths?

fitting.py      read first: plan, try on a copy without weights, compare, and keep more where it does not fit
attributes.py   which attributes of the user's modules hold widths, and what they become
register.py     users name those of their own classes
scales.py       a softmax scale that the code takes from a width
refuse.py       what stays where the code does not follow
bookkeeping.py  what a model notes about its widths and the forward does not read
"""

from .fitting import Fit, Memory, fit

__all__ = ["Fit", "Memory", "fit"]
