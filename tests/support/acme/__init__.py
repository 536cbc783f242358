"""What a maker of accelerators installs beside torch: torch imports it by itself, and knows the kind of device from then on."""

from __future__ import annotations

from pathlib import Path

import torch

LIBRARY = Path(__file__).parent / "libacme.so"


class Module:
    """torch.acme"""

    _state = torch.zeros(1, dtype=torch.uint8)

    @staticmethod
    def is_available():
        return True

    @staticmethod
    def device_count():
        return 2

    @staticmethod
    def current_device():
        return torch.accelerator.current_device_index()

    @staticmethod
    def get_device_name(index):
        return f"ACME 9000 ({index})"

    @staticmethod
    def _is_in_bad_fork():
        return False

    @staticmethod
    def manual_seed_all(seed):
        Module._state = torch.tensor([seed % 251], dtype=torch.uint8)

    @staticmethod
    def get_rng_state(device="acme"):
        return Module._state.clone()

    @staticmethod
    def set_rng_state(state, device="acme"):
        Module._state = state.clone()


def register() -> None:
    """The entry point `torch.backends`."""
    torch.utils.rename_privateuse1_backend("acme")
    torch.ops.load_library(LIBRARY)
    torch._register_device_module("acme", Module)
    torch.utils.generate_methods_for_privateuse1_backend()
