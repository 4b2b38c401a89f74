"""What production code calls: the best kernel for a problem, as a function on arrays."""

from autotune.kernel.best import best_kernel
from autotune.kernel.kernel import Kernel
from autotune.kernel.multiply import matmul

__all__ = ["Kernel", "best_kernel", "matmul"]
