"""A simulated accelerator: CPU kernels, memory by the rules of CUDA's allocator.

It is a part of the checkout, for tests and measurements, and not of the wheel.
"""

from mimose.bench.sim.device import use

__all__ = ["use"]
