"""Requirements of the check on its machine: those of the engine and the exporter, no more."""

from __future__ import annotations

REQUIREMENTS = (
    # the engine
    "onnxruntime-gpu>=1.31.1",
    "llguidance>=1.9",
    "numpy>=2.1",
    "pillow>=12",
    "pydantic>=2.11",
    "tokenizers>=0.22",
    # the exporter
    "onnx>=1.21",
    "onnxscript>=0.7",
    "packaging>=25",
    "rich>=14",
    "safetensors>=0.6",
    "scikit-learn>=1.7",
    "torch>=2.10",
    # for the comparison
    "transformers>=5",
)
