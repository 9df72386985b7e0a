"""The draft tree: how the kept candidates hang together, and which of them a greedy target accepts.

Trees have a handful of nodes, so these walk numpy views of the tensors: at that size one torch call costs more than
the whole walk. Node 0 is the last verified token; links are first-child and next-sibling, -1 for none.
"""

from __future__ import annotations

import torch

FULL_MASK, QLEN_ONLY = 0, 1  # of SGLang's TreeMaskMode; the third, bit-packed, is for GPU kernels


def build_tree_kernel_efficient_cpu(
    parent_list,
    selected_index,
    verified_seq_len,
    tree_mask,
    positions,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    topk,
    depth,
    draft_token_num,
    tree_mask_mode,
):
    """Turn a beam into trees of n = draft_token_num nodes.

    parent_list [B, 1 + (depth-1)*topk]: for each group of topk candidates the candidate that they extend (group 0
    extends the root); selected_index [B, n-1] ascending: the kept candidates; verified_seq_len [B].
    Writes tree_mask (a row a node, true at itself and its ancestors; n columns, or after a prefix of verified_seq_len
    columns that is left alone), positions [B*n] (verified_seq_len + depth), and the links [B, n].
    """
    n, mode = draft_token_num, int(tree_mask_mode)
    if mode not in (FULL_MASK, QLEN_ONLY):
        raise NotImplementedError(f"the CPU stand-in for sgl_kernel writes no bit-packed tree mask (mode {mode})")
    mask = tree_mask.numpy()
    place, index = positions.numpy(), retrive_index.numpy()
    next_token, next_sibling = retrive_next_token.numpy(), retrive_next_sibling.numpy()
    at = 0
    all_kept, all_parents = selected_index.tolist(), parent_list.tolist()
    for b, seq_len in enumerate(verified_seq_len.tolist()):
        parent = parents_of(all_kept[b], all_parents[b], topk)
        first, sibling = link(parent)
        width = n if mode == QLEN_ONLY else seq_len + n
        view = mask[at : at + n * width].reshape(n, width)[:, width - n :]
        at += n * width
        view[:] = False
        view[:, 0] = True
        for node in range(n):
            above, levels = node, 0
            while above > 0 and levels < depth:
                view[node, above] = True
                levels += 1
                above = parent[above]
            place[b * n + node] = seq_len + levels
        index[b] = range(b * n, b * n + n)
        next_token[b], next_sibling[b] = first, sibling


def parents_of(kept, parents, topk):
    """The parent node of each node, -1 for the root and for a candidate whose own parent was not kept."""
    node_of = {}
    for node, candidate in enumerate(kept, start=1):
        node_of.setdefault(candidate, node)
    found = [-1]
    for candidate in kept:
        group = candidate // topk
        found.append(0 if group == 0 else node_of.get(parents[group], -1))
    return found


def link(parent):
    """First-child and next-sibling links, children in ascending order."""
    first, sibling = [-1] * len(parent), [-1] * len(parent)
    for node in range(len(parent) - 1, 0, -1):
        above = parent[node]
        if above >= 0:
            sibling[node], first[above] = first[above], node
    return first, sibling


def verify_tree_greedy_cpu(
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    target_predict,
):
    """Walk each tree from its root along the drafts that the target would have chosen.

    candidates [B, n]; target_predict [B, n], the target's choice after each node. Writes accept_index [B, depth+1]
    (flat indices of the accepted nodes, root first, the rest left at -1), accept_token_num [B] (drafts accepted,
    the root not counted) and predicts [B*n] (the choice after each accepted node).
    """
    most = accept_index.shape[1]
    chosen = target_predict.reshape(-1).tolist()
    drafted, index = candidates.tolist(), retrive_index.tolist()
    next_token, next_sibling = retrive_next_token.tolist(), retrive_next_sibling.tolist()
    out_predicts, out_index, out_num = predicts.numpy(), accept_index.numpy(), accept_token_num.numpy()
    for b in range(len(drafted)):
        node, accepted = 0, [index[b][0]]
        while len(accepted) < most:
            child = next_token[b][node]
            while child != -1 and drafted[b][child] != chosen[accepted[-1]]:
                child = next_sibling[b][child]
            if child == -1:
                break
            accepted.append(index[b][child])
            node = child
        for flat in accepted:
            out_predicts[flat] = chosen[flat]
        out_index[b, : len(accepted)] = accepted
        out_num[b] = len(accepted) - 1


def reconstruct_indices_from_tree_mask(
    tree_mask,
    verified_seq_len,
    positions,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    batch_size,
    draft_token_num,
):
    """NGRAM: recover positions and links from which drafts see which.

    tree_mask: B*n*n booleans, row by row; a node's parent is the last earlier node that it sees. Writes positions
    [B*n] and the links [B*n]. (NGRAM counts a node that sees no earlier one as a root: no parent, no siblings.)
    """
    n = draft_token_num
    seen = tree_mask.view(batch_size, n, n).bool().tril(-1).numpy()
    lengths = verified_seq_len.numpy().reshape(batch_size, 1)
    positions.numpy().reshape(batch_size, n)[:] = seen.sum(-1) + lengths
    retrive_index.view(-1).copy_(torch.arange(batch_size * n))
    next_token = retrive_next_token.view(batch_size, n).numpy()
    next_sibling = retrive_next_sibling.view(batch_size, n).numpy()
    for b in range(batch_size):
        parent = [int(row.nonzero()[0][-1]) if row.any() else -1 for row in seen[b]]
        next_token[b], next_sibling[b] = link(parent)
