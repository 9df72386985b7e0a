"""Lets a torchvision built for CUDA import beside a CPU torch; a .pth installs the finder at interpreter start.

torchvision's compiled ops cannot load there, and its registrations then fail on operators that were never defined.
Just before they run, the finder declares the two that are missing. Nothing here calls them, and torch is not imported.
"""

import sys


class MissingOps:
    """A meta-path finder that finds nothing: it acts when torchvision is about to register its fake kernels."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "torchvision._meta_registrations":
            sys.meta_path.remove(MissingOps)
            if not sys.modules["torchvision.extension"]._has_ops():
                declare()


def declare():
    """Declare torchvision::nms and ::qnms, as torchvision's own library would: schema only, no kernel."""
    import torch

    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, MissingOps)
