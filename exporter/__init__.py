"""Makes packages: models in PyTorch, their training, their checkpoints, and the export to ONNX."""

import os

# Read by OpenMP when torch is loaded: threads that wait shall sleep, not spin. Where the cores are
# shared with anything else, spinning made training forty times slower; on idle cores it gains
# little. Whoever sets the variable decides.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
