"""A simulated accelerator: CPU kernels, memory by the rules of CUDA's allocator.

`use` registers a torch device called ``sim``, and the module ``torch.sim``, which is
like ``torch.cuda``: see `mimose.sim.device`. Device memory is host memory. Kernels
are the CPU's and run at once, so results are the CPU's. Memory is simulated: every byte
that CUDA's caching allocator would allocate, reserve, or refuse.

For rehearsals, tests and measurements. The sources in ``native`` are compiled on first
use. This is the only door: `use`, and what ``torch.sim`` has.
"""

from mimose.sim.build import SimUnavailableError, why_not
from mimose.sim.load import use

__all__ = ["SimUnavailableError", "use", "why_not"]
