"""A simulated accelerator: CPU kernels, memory by the rules of CUDA's allocator.

`use` registers a torch device called ``sim``, and the module ``torch.sim``, which is
like ``torch.cuda``: see `benchmarks.sim.device`. Device memory is host memory. Kernels
are the CPU's and run at once, so results are the CPU's. Memory is simulated: every byte
that CUDA's caching allocator would allocate, reserve, or refuse.

It is a part of the checkout, for tests and measurements, not of the wheel. The sources
in ``native`` are compiled on first use.
"""

from benchmarks.sim.build import SimUnavailableError, why_not
from benchmarks.sim.load import use

__all__ = ["SimUnavailableError", "use", "why_not"]
