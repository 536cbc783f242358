"""What is to be had besides goes in; the command that installs its packages comes out.

They are named themselves: what is called runner on the public index is another project.
"""

from __future__ import annotations

#: as the extras of pyproject.toml, which a test holds
EXTRAS = {
    "metrics": ("torchmetrics>=1.4",),
    "safetensors": ("safetensors",),
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
    "huggingface": ("datasets>=4", "tokenizers"),
    "ray": ("ray>=2.40",),
    "search": ("optuna>=4.9", "cmaes"),
    "slurm": ("hydra-submitit-launcher",),
    "text": ("tokenizers",),
    "timm": ("timm",),
    "transformers": ("transformers>=4.50", "safetensors"),
}


def install(extra: str) -> str:
    """A line for a shell."""
    return " ".join(("pip install", *(f'"{name}"' if ">" in name else name for name in EXTRAS[extra])))
