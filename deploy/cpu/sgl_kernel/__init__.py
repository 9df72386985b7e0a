"""A stand-in for the CPU build of sgl_kernel, which no package index carries, in PyTorch and a little C++.

It supplies the ops that an unmodified SGLang 0.5.23 reaches on a CPU without AMX kernels: attention over the paged
cache, and the bookkeeping of EAGLE and NGRAM. It exists for correctness: its speed says nothing about a GPU.
"""

from __future__ import annotations

import torch

if torch.cuda.is_available():
    raise ImportError(
        "sgl_kernel is the CPU stand-in of eyas-cpu-engine, but this machine has a CUDA device: run "
        "`pip uninstall eyas-cpu-engine` and install SGLang's own kernels (`pip install sglang-kernel`)"
    )

from sgl_kernel import attention, sampling, speculative
from sgl_kernel.slots import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_draft_decode_metadata_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    rotate_input_ids_cpu,
)
from sgl_kernel.tree import build_tree_kernel_efficient_cpu, verify_tree_greedy_cpu

__version__ = "0.1.0"

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "speculative",
    "verify_tree_greedy_cpu",
]

# A FRAGMENT lives as long as its object does.
_library = torch.library.Library("sgl_kernel", "FRAGMENT")
for _function, _schema in {**attention.SCHEMAS, **sampling.SCHEMAS}.items():
    _library.define(_function.__name__ + _schema)
    _library.impl(_function.__name__, _function, "CPU")
