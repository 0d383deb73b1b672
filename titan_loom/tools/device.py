"""What is known about devices: memory in use, and the peak rates that MFU is measured against."""

import os
import resource

import torch

# Dense bf16 matrix rates in FLOP/s, by the vendors' datasheets. The first name found in the device's name counts, so
# the more specific one comes first.
_PEAK_FLOPS = [
    ("H100 NVL", 835e12),
    ("H100 PCIe", 756e12),
    ("H100", 989e12),
    ("H200", 989e12),
    ("H800", 989e12),
    ("B200", 2250e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("A40", 149.7e12),
    ("A10G", 70e12),
    ("A10", 125e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("RTX 5090", 209.5e12),
    ("RTX 4090", 165.2e12),
    ("RTX 4080", 97.5e12),
    ("RTX 3090", 71e12),
    ("MI300X", 1307.4e12),
    ("MI250X", 191.5e12),
]


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 peak of `device` in FLOP/s; None when it is not known, as for every CPU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for known, peak in _PEAK_FLOPS if known in name), None)


def peak_memory(device: torch.device) -> tuple[float, float]:
    """Most memory in use so far, in GiB and in percent of what there is: reserved on CUDA, resident on a CPU."""
    if device.type == "cuda":
        used = torch.cuda.max_memory_reserved(device)
    else:
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return used / 2**30, 100 * used / total_memory(device)


def total_memory(device: torch.device) -> int:
    """Bytes of memory of `device`; of the machine for a CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
