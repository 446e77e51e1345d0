"""The core of a layer: all between its projections from and to d_model, as one operation.

It consists of W^x, the direct sweep with its exact adjoint, and the output stage with the feedback
of the gate. Separately they cost the host several times as many calls and launches.
"""

from bedouin.kernels.core.registered import CoreRun, core_operation, flatten
from bedouin.kernels.core.types import CoreOptions, CoreTensors

__all__ = ["CoreOptions", "CoreRun", "CoreTensors", "core_operation", "flatten"]
