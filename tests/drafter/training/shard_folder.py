"""Shard folders for tests, written plainly: one shard of float32 documents of the tiny Llama."""

import hashlib
import json
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file

from drafter.data.shards import Document
from drafter.data.target import target_identity
from tests.tiny.pair import TinyPair
from tests.tiny.targets import load


def write_shards(folder: Path, documents: list[Document], pair: TinyPair, **changes: object) -> Path:
    """`changes` overwrite keys of the manifest; a dict is merged."""
    folder.mkdir(parents=True)
    tensors = {
        "input_ids": np.concatenate([d.input_ids for d in documents]).astype(np.int32),
        "loss_mask": np.concatenate([d.loss_mask for d in documents]),
        "aux_hidden": np.concatenate([d.aux_hidden for d in documents]),
        "final_hidden": np.concatenate([d.final_hidden for d in documents]),
        "doc_offsets": np.cumsum([0, *(len(d.input_ids) for d in documents)]).astype(np.int64),
    }
    file = folder / "shard-00000.safetensors"
    save_file({name: np.ascontiguousarray(x) for name, x in tensors.items()}, file)
    tokens = len(tensors["input_ids"])
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    manifest = {
        "format": 1,
        "target": {"name": pair.name} | target_identity(pair.target),
        "layer_ids": list(pair.layer_ids),
        "convention": pair.convention,
        "hidden_size": pair.hidden_size,
        "n_aux": 3,
        "dtype": "float32",
        "final_hidden": "after_norm",
        "documents": len(documents),
        "tokens": tokens,
        "shards": [{"file": file.name, "sha256": sha256, "tokens": tokens, "documents": len(documents)}],
    }
    for key, value in changes.items():
        manifest[key] = manifest[key] | value if isinstance(value, dict) else value
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def captured(pair: TinyPair, texts: list[list[int]], spans: list[tuple[int, int]]) -> list[Document]:
    """What the tiny target computes along texts; `spans` are the answers, [start, stop)."""
    target = load(pair.reference)
    documents = []
    for n, (text, (start, stop)) in enumerate(zip(texts, spans, strict=True)):
        with torch.no_grad():
            out = target(torch.tensor([text]), output_hidden_states=True, use_cache=False)
        mask = np.zeros(len(text), dtype=bool)
        mask[start:stop] = True
        documents.append(
            Document(
                input_ids=np.array(text, np.int32),
                loss_mask=mask,
                aux_hidden=torch.cat([out.hidden_states[i] for i in pair.inputs_to], dim=-1)[0].numpy(),
                final_hidden=out.hidden_states[-1][0].numpy(),  # transformers gives it after the final norm
                name=f"document {n}",
            )
        )
    return documents
