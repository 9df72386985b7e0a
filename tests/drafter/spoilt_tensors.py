"""Drafter folders whose tensors are spoilt: other types, shapes and names, foreign maps, numbers that are none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.drafter.mutation import UNREADABLE, WEIGHTS, Mutation, header, signed, tensors

PARTS = (
    "fc.weight",
    "norm.weight",
    "lm_head.weight",
    *(f"midlayer.self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"midlayer.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    *(f"midlayer.{name}.weight" for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")),
)


def wrong_dtype() -> Iterator[Mutation]:
    for name in PARTS:
        for kind in (np.int32, np.uint8):

            def cast(found: dict, name: str = name, kind: type = kind) -> None:
                found[name] = (found[name] * 100).astype(kind)

            yield Mutation("dtype", f"{name} {kind.__name__}", tensors(cast), ("dtypes",))
    for kind in (np.float32, np.float64, np.int8, np.uint8, np.int16):

        def cast_map(found: dict, kind: type = kind) -> None:
            found["d2t"] = found["d2t"].astype(kind)

        yield Mutation("dtype", f"d2t {kind.__name__}", tensors(cast_map), ("d2t-tensor",))
    for kind in (np.float32, np.int64):

        def cast_mask(found: dict, kind: type = kind) -> None:
            found["t2d"] = found["t2d"].astype(kind)

        yield Mutation("dtype", f"t2d {kind.__name__}", tensors(cast_mask), ("t2d",))
    yield Mutation("dtype", "a name that is none", header(lambda h: h["fc.weight"].update(dtype="F17")), UNREADABLE)
    yield Mutation("dtype", "half as wide", header(lambda h: h["fc.weight"].update(dtype="F16")), UNREADABLE)
    yield Mutation("dtype", "d2t int32", tensors(lambda t: t.update(d2t=t["d2t"].astype(np.int32))), ())
    yield Mutation("dtype", "t2d uint8", tensors(lambda t: t.update(t2d=t["t2d"].astype(np.uint8))), ())


def wrong_shape() -> Iterator[Mutation]:
    shapes = ("tensor-shapes", "head-rows")
    for name in PARTS:
        yield Mutation("shape", f"{name} a row less", tensors(lambda t, n=name: t.update({n: t[n][:-1]})), shapes)
        yield Mutation("shape", f"{name} flat", tensors(lambda t, n=name: t.update({n: t[n][None]})), shapes)
        if name.count("norm") == 0:
            turned = tensors(lambda t, n=name: t.update({n: t[n].T if t[n].shape[0] != t[n].shape[1] else t[n][1:]}))
            yield Mutation("shape", f"{name} turned", turned, shapes)
    yield Mutation("shape", "d2t a row less", tensors(lambda t: t.update(d2t=t["d2t"][:-1])), ("d2t-tensor",))
    yield Mutation("shape", "d2t a column", tensors(lambda t: t.update(d2t=t["d2t"][:, None])), ("d2t-tensor",))
    yield Mutation("shape", "t2d a token less", tensors(lambda t: t.update(t2d=t["t2d"][:-1])), ("t2d",))
    yield Mutation(
        "shape", "t2d of another target", tensors(lambda t: t.update(t2d=np.append(t["t2d"], False))), ("t2d",)
    )


def missing() -> Iterator[Mutation]:
    for name in PARTS:
        yield Mutation("missing", name, tensors(lambda t, n=name: t.pop(n)), ("tensors-missing",))
        renamed = tensors(lambda t, n=name: t.update({f"model.model.{n}": t.pop(n)}))
        yield Mutation("missing", f"{name} by another name", renamed, ("tensors-missing",))
    yield Mutation("missing", "d2t", tensors(lambda t: t.pop("d2t")), ("d2t-tensor",))
    yield Mutation("missing", "both maps", tensors(lambda t: (t.pop("d2t"), t.pop("t2d"))), ("d2t-tensor",))
    yield Mutation("missing", "everything", tensors(lambda t: t.clear()), ("tensors-missing",))
    yield Mutation("missing", "the file", lambda folder: (folder / WEIGHTS).unlink(), UNREADABLE)
    yield Mutation("missing", "config.json", lambda folder: (folder / "config.json").unlink(), UNREADABLE)
    yield Mutation("missing", "t2d", tensors(lambda t: t.pop("t2d")), ())


def extra() -> Iterator[Mutation]:
    parts = ("fc.bias", "input_norm.weight", "fc_norm.0.weight", "aux_norm_low.weight", "lm_head.bias", "norm.bias")
    attention = ("midlayer.self_attn.q_proj.bias", "midlayer.self_attn.q_norm.weight", "layers.1.mlp.up_proj.weight")
    for name in (*parts, *attention, "verifier_lm_head.weight", "verifier_norm.weight", "anything.at.all"):
        add = tensors(lambda t, n=name: t.update({n: np.ones(4, np.float32)}))
        yield Mutation("extra", name, add, ("tensors-unexpected",))
    for name in ("fc.weight", "midlayer.mlp.up_proj.weight"):
        again = name.replace("midlayer", "layers.0") if "midlayer" in name else f"model.{name}"
        twice = tensors(lambda t, n=name, a=again: t.update({a: np.zeros_like(t[n])}))
        yield Mutation("extra", f"{name} by two names", twice, ("tensors-twice",))
    second = tensors(lambda t: t.update({"old.d2t": t["d2t"]}))
    yield Mutation("extra", "a second d2t", second, ("d2t-tensor",))

    def another_file(folder: Path) -> None:
        save_file({"fc.weight": load_file(folder / WEIGHTS)["fc.weight"] + 1}, folder / "other.safetensors")

    def beside_an_index(folder: Path) -> None:
        names = dict.fromkeys(load_file(folder / WEIGHTS), WEIGHTS)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
        another_file(folder)

    yield Mutation("extra", "a second file", another_file, ("tensors-twice",))
    yield Mutation("extra", "a file that is not in the index", beside_an_index, ("files",))


def scramble(found: dict[str, np.ndarray], seed: int) -> None:
    """Another order of the same target ids: in range, without a repeat, with the same t2d."""
    d2t = found["d2t"]
    rows = np.arange(len(d2t))
    found["d2t"] = np.random.default_rng(seed).permutation(d2t + rows) - rows


def another_vocabulary(found: dict[str, np.ndarray], seed: int, mask: bool) -> None:
    """The map of another drafter of the same sizes."""
    size, rows = len(found["t2d"]), len(found["d2t"])
    ids = np.sort(np.random.default_rng(seed).choice(size, rows, replace=False))
    found["d2t"] = ids - np.arange(rows)
    if mask:
        found["t2d"] = np.isin(np.arange(size), ids)


def swapped_maps() -> Iterator[Mutation]:
    for seed in range(3):
        foreign = tensors(lambda t, s=seed: another_vocabulary(t, s, False))
        yield Mutation("swapped maps", f"another d2t ({seed})", foreign, ("t2d",))
        both = signed(tensors(lambda t, s=seed: another_vocabulary(t, s, True)))
        yield Mutation("swapped maps", f"another d2t and t2d ({seed}), with a manifest", both, ("vocab-hash",))
        order = tensors(lambda t, s=seed: scramble(t, s))
        yield Mutation("swapped maps", f"in another order ({seed})", order, ("d2t-order",))
        yield Mutation("swapped maps", f"in another order ({seed}), with a manifest", signed(order), ("manifest",))
    exchanged = tensors(lambda t: t.update(d2t=t["t2d"], t2d=t["d2t"]))
    yield Mutation("swapped maps", "each under the other's name", exchanged, ("d2t-tensor", "t2d"))
    inverse = tensors(lambda t: t.update(t2d=~t["t2d"]))
    yield Mutation("swapped maps", "t2d inverted", inverse, ("t2d",))
    yield Mutation("swapped maps", "t2d all true", tensors(lambda t: t["t2d"].fill(True)), ("t2d",))
    yield Mutation("swapped maps", "t2d all false", tensors(lambda t: t["t2d"].fill(False)), ("t2d",))


def to_absolute(found: dict[str, np.ndarray]) -> None:
    found["d2t"] = found["d2t"] + np.arange(len(found["d2t"]))


def absolute_for_offset() -> Iterator[Mutation]:
    wrong = ("d2t-reading", "d2t-range", "d2t-unique", "d2t-placeholder")
    yield Mutation("absolute", "with t2d", tensors(to_absolute), wrong)
    yield Mutation("absolute", "without t2d", tensors(lambda t: (to_absolute(t), t.pop("t2d"))), wrong)
    descending = tensors(lambda t: (to_absolute(t), t.update(d2t=t["d2t"][::-1])))
    yield Mutation("absolute", "descending", descending, wrong)
    shuffled = tensors(lambda t: (scramble(t, 5), to_absolute(t)))
    yield Mutation("absolute", "in any order", shuffled, wrong)
    as_int32 = tensors(lambda t: (to_absolute(t), t.update(d2t=t["d2t"].astype(np.int32))))
    yield Mutation("absolute", "int32", as_int32, wrong)
    yield Mutation("absolute", "twice over", tensors(lambda t: (to_absolute(t), to_absolute(t))), (*wrong, "t2d"))
    placeholder = tensors(lambda t: t.update(d2t=np.arange(len(t["d2t"]))))
    yield Mutation("absolute", "0, 1, 2 …", placeholder, ("d2t-placeholder",))


def not_finite() -> Iterator[Mutation]:
    for name in PARTS:
        for value in (np.nan, -np.inf) if "weight" in name and "norm" not in name else (np.nan,):

            def spoil(found: dict, name: str = name, value: float = value) -> None:
                found[name] = found[name].copy()
                found[name][len(found[name]) // 2] = value

            yield Mutation("NaN", f"{name} {value}", tensors(spoil), ("finite",))
    one = tensors(lambda t: t["lm_head.weight"].reshape(-1).__setitem__(-1, np.nan))
    yield Mutation("NaN", "one number of lm_head", one, ("finite",))
    for name in ("fc.weight", "norm.weight", "lm_head.weight"):
        yield Mutation("zeros", name, tensors(lambda t, n=name: t[n].fill(0)), ("zero-rows",))
    yield Mutation("zeros", "a row of lm_head", tensors(lambda t: t["lm_head.weight"][3].fill(0)), ("zero-rows",))
    yield Mutation("zeros", "d2t", tensors(lambda t: t["d2t"].fill(0)), ("d2t-placeholder",))


def duplicates() -> Iterator[Mutation]:
    wrong = ("d2t-unique", "d2t-reading", "d2t-range")
    for row in (1, 2, 5, -1):
        same = tensors(lambda t, r=row: t["d2t"].__setitem__(r, t["d2t"][r - 1] - 1))
        yield Mutation("duplicates", f"row {row} as the one before", same, wrong)
    first = tensors(lambda t: t.update(d2t=t["d2t"][0] - np.arange(len(t["d2t"]))))
    yield Mutation("duplicates", "every row the first", first, wrong)
    no_mask = tensors(lambda t: (t["d2t"].__setitem__(3, t["d2t"][2] - 1), t.pop("t2d")))
    yield Mutation("duplicates", "without t2d", no_mask, wrong)


def out_of_range() -> Iterator[Mutation]:
    wrong = ("d2t-range",)
    for row, value in ((0, -1), (2, -100), (0, 10**6), (-1, 2**40), (4, 2**63 - 1), (4, -(2**63))):
        far = tensors(lambda t, r=row, v=value: t["d2t"].__setitem__(r, v))
        yield Mutation("out of range", f"row {row} offset {value}", far, wrong)
    past = tensors(lambda t: t["d2t"].__setitem__(-1, len(t["t2d"]) - len(t["d2t"]) + 1))
    yield Mutation("out of range", "one past the last token", past, wrong)
