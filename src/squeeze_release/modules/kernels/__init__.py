"""CompensatedLayerNorm in eager, as one kernel.

shortest.py        read first: are these tensors like some seen before? then the kernel for them is known
fused.py           NVIDIA GPUs with Triton: the algebra, and where it applies; forward and backward
rows.py            rows of one shape: what calls need not ask again
triton_kernels.py  what runs on the GPU
launch.py          how a Triton kernel is launched without a search for it
usual.py           the usual call of all these in C++: usual.cpp, built beside the first that need it
native.py          CPUs, without gradients: native.c, built at installation
inputs.py          what kernels are told, and what must be so before they are
"""
