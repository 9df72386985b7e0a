"""What training runs on."""

from __future__ import annotations

import torch


def bf16_is_fast() -> bool:
    """Whether this processor multiplies bf16 at least as fast as fp32, which torch's own kernels need AVX-512 for.

    Without it torch's bf16 products are 8 to 70 times slower than its fp32 ones (AMD EPYC with AVX2, shapes of
    SmolLM2's drafter), so fp32 is then both faster and more exact.
    """
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
