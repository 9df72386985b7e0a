"""The name under which SGLang imports the NGRAM op."""

from sgl_kernel.tree import reconstruct_indices_from_tree_mask

__all__ = ["reconstruct_indices_from_tree_mask"]
