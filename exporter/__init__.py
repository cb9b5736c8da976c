"""Makes packages: models in PyTorch, their training, their checkpoints, and the export to ONNX."""

import os

# Read by OpenMP when torch is loaded: threads that wait shall soon sleep. Time of the same training
# steps with no spinning / 3,000 spins / 10,000 spins (GNU OpenMP's own number is 300,000): 1.4 / 1
# / 0.95 on two idle cores, 0.8 / 1 / 2.1 beside two busy programs. Whoever sets the policy decides.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")
