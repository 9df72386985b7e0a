"""What training runs on."""

from __future__ import annotations

import ctypes
import sys

import torch

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h


def bf16_is_fast(device: torch.device | None = None) -> bool:
    """Whether bf16 is multiplied at least as fast as fp32 there: by every GPU in use, by a processor with AVX-512.

    Without that torch's bf16 products are 8 to 70 times slower than its fp32 ones (AMD EPYC with AVX2, shapes of
    SmolLM2's drafter), so fp32 is then both faster and more exact.
    """
    if device is not None and device.type != "cpu":
        return True
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def keep_memory() -> None:
    """Have glibc keep what is freed: a step's tensors are as large as the last one's, and need not be mapped anew."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        try:
            libc.mallopt(M_MMAP_THRESHOLD, 1 << 30)
            libc.mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)
        except AttributeError:
            return  # another C library, without these
