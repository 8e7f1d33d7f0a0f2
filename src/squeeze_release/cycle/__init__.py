"""The cycle: prune, squeeze, release, fine-tune, and again, until the network can take no more.

config.py      what a run does, where it is, what came out
loop.py        read first: the steps and the order in which they come
subject.py     the network under way: masks, sizes, metrics
run.py         a run in progress: how it is trained
directory.py   its files, and how a run that was killed goes on
devices.py     several devices, through Hugging Face Accelerate
progress.py    bars, TensorBoard
"""

from .config import Config, Epoch, Point, Result
from .loop import cycle
from .progress import Bars, TensorBoard

__all__ = ["Bars", "Config", "Epoch", "Point", "Result", "TensorBoard", "cycle"]
