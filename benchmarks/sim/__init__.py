"""A simulated accelerator: CPU kernels, memory by the rules of CUDA's allocator.

`use` makes a device called ``sim`` of torch's, and ``torch.sim`` what ``torch.cuda`` is
for CUDA: see `benchmarks.sim.device`. Device memory is host memory, kernels are the
CPU's and run at once, so that results are the CPU's; what is simulated is what they
hold: every byte that CUDA's caching allocator would hold, reserve, or refuse.

It is a part of the checkout, for tests and measurements, and not of the wheel. The
sources in ``native`` are compiled on first use.
"""

from benchmarks.sim.build import SimUnavailableError, why_not
from benchmarks.sim.load import use

__all__ = ["SimUnavailableError", "use", "why_not"]
