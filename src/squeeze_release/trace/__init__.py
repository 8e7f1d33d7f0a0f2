"""One call of a model as a graph of aten ops.

graph.py       read first: model + call -> nodes, parameters by name, and the module that made each call
decisions.py   branches that the code takes on a tensor it has made itself
norms.py       every layer norm and RMS norm module is one node
einsum.py      every einsum of two tensors is permutes and a matmul
caches.py      what models keep from one call to the next is left out
sizes.py       does the model take inputs of another size, and what does it do with them?
"""

from .graph import ModuleCall, Trace, as_calls, named_arguments, rehearse, trace

__all__ = ["ModuleCall", "Trace", "as_calls", "named_arguments", "rehearse", "trace"]
