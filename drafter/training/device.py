"""What training runs on."""

from __future__ import annotations

import torch


def bf16_is_fast(device: torch.device | None = None) -> bool:
    """Whether bf16 is multiplied at least as fast as fp32 there: by every GPU in use, by a processor with AVX-512.

    Without that torch's bf16 products are 8 to 70 times slower than its fp32 ones (AMD EPYC with AVX2, shapes of
    SmolLM2's drafter), so fp32 is then both faster and more exact.
    """
    if device is not None and device.type != "cpu":
        return True
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
