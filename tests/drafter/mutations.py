"""More than two hundred ways to spoil a drafter folder, each with the checks that may name it.

Every mutation works on a folder with Llama-style names (`midlayer.…`), of any size, so that a test with an engine can
use the same ones on a trained drafter. `names` is empty where the mutation is harmless.
"""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from drafter.report import file_sha256

WEIGHTS = "model.safetensors"
CANARY = "executed"  # a file that a pickle would make, were it loaded
UNREADABLE = ("readable",)
PARTS = (
    "fc.weight",
    "norm.weight",
    "lm_head.weight",
    *(f"midlayer.self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"midlayer.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    *(f"midlayer.{name}.weight" for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")),
)


@dataclass(frozen=True)
class Mutation:
    """One spoilt folder: `apply` spoils it in place, and at least one of `names` must find it."""

    kind: str
    name: str
    apply: Callable[[Path], None]
    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kind}: {self.name}"


def tensors(change: Callable[[dict[str, np.ndarray]], None]) -> Callable[[Path], None]:
    """A change to the tensors of a folder, which are written back."""

    def apply(folder: Path) -> None:
        found = load_file(folder / WEIGHTS)
        change(found)
        save_file({name: np.ascontiguousarray(tensor) for name, tensor in found.items()}, folder / WEIGHTS)

    return apply


def raw(change: Callable[[bytes], bytes], name: str = WEIGHTS) -> Callable[[Path], None]:
    """A change to a file's bytes."""

    def apply(folder: Path) -> None:
        (folder / name).write_bytes(change((folder / name).read_bytes()))

    return apply


def header(change: Callable[[dict], None]) -> Callable[[Path], None]:
    """A change to the header of the weights; the data stay as they are."""

    def edit(data: bytes) -> bytes:
        length = int.from_bytes(data[:8], "little")
        found = json.loads(data[8 : 8 + length])
        change(found)
        text = json.dumps(found).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text + data[8 + length :]

    return raw(edit)


def with_manifest(folder: Path) -> None:
    """An eyas.json as its maker would have written it now."""
    from drafter.checkpoint.vocab import DraftVocab

    found = load_file(folder / WEIGHTS)
    ids = np.sort(found["d2t"].astype(np.int64) + np.arange(len(found["d2t"])))
    hashes = {name: file_sha256(folder / name) for name in ("config.json", WEIGHTS)}
    written = {"format": 1, "sha256": hashes, "vocab_hash": DraftVocab(ids, len(found["t2d"])).hash}
    (folder / "eyas.json").write_text(json.dumps(written))


def signed(apply: Callable[[Path], None]) -> Callable[[Path], None]:
    """The mutation of a folder that has a manifest."""

    def whole(folder: Path) -> None:
        with_manifest(folder)
        apply(folder)

    return whole


def mutations() -> Iterator[Mutation]:
    """All of them."""
    yield from truncated()
    yield from wrong_dtype()
    yield from wrong_shape()
    yield from missing()
    yield from extra()
    yield from swapped_maps()
    yield from absolute_for_offset()
    yield from not_finite()
    yield from duplicates()
    yield from out_of_range()
    yield from header_bombs()
    yield from links_out()
    yield from pickles()
    yield from configs()


def truncated() -> Iterator[Mutation]:
    for cut in (0, 1, 7, 8, 9, 40, 200):
        yield Mutation("truncated", f"{cut} bytes", raw(lambda data, cut=cut: data[:cut]), UNREADABLE)
    for share in (0.25, 0.5, 0.75, 0.99):
        half = raw(lambda data, share=share: data[: int(len(data) * share)])
        yield Mutation("truncated", f"{share:.0%}", half, UNREADABLE)
    for lost in (1, 8, 64):
        yield Mutation("truncated", f"without the last {lost}", raw(lambda data, lost=lost: data[:-lost]), UNREADABLE)
    yield Mutation("truncated", "config", raw(lambda data: data[:-3], "config.json"), UNREADABLE)
    yield Mutation("truncated", "with more behind it", raw(lambda data: data + b"\0" * 64), UNREADABLE)


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


def split(folder: Path) -> None:
    """The weights in two files with an index, which is the same drafter."""
    found = load_file(folder / WEIGHTS)
    names = sorted(found)
    files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, some in files.items():
        save_file({name: found[name] for name in some}, folder / file)
    (folder / WEIGHTS).unlink()
    index = {name: file for file, some in files.items() for name in some}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


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


def header_bombs() -> Iterator[Mutation]:
    deep = b"[" * 200_000
    many = json.dumps(
        {f"t{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(300_000)}
    ).encode()
    for name, text in (
        ("nested deep", deep),
        ("very many tensors", many),
        ("not JSON", b"\xff" * 64),
        ("a list", b"[]"),
        ("a number too long to read", b'{"a": ' + b"9" * 10_000 + b"}"),
    ):
        bomb = raw(lambda data, text=text: len(text).to_bytes(8, "little") + text)
        yield Mutation("header", name, bomb, UNREADABLE)
    for length in (2**63 - 1, 2**64 - 1, 2**31, 0):
        lie = raw(lambda data, length=length: length.to_bytes(8, "little") + data[8:])
        yield Mutation("header", f"a length of {length}", lie, UNREADABLE)
    for name, change in (
        ("a shape of 2**62", lambda h: h["fc.weight"].update(shape=[2**62, 2**62])),
        ("a thousand dimensions", lambda h: h["fc.weight"].update(shape=[2] * 1000)),
        ("a negative size", lambda h: h["fc.weight"].update(shape=[-1, -1])),
        ("offsets into each other", lambda h: h["fc.weight"].update(data_offsets=h["lm_head.weight"]["data_offsets"])),
        ("offsets past the end", lambda h: h["fc.weight"].update(data_offsets=[0, 2**50])),
        ("offsets backwards", lambda h: h["fc.weight"].update(data_offsets=h["fc.weight"]["data_offsets"][::-1])),
        ("a hole", lambda h: h.pop("fc.weight")),
        ("no dtype", lambda h: h["fc.weight"].pop("dtype")),
        ("a shape of words", lambda h: h["fc.weight"].update(shape="many")),
        ("a tensor that is a list", lambda h: h.update({"fc.weight": [1, 2]})),
    ):
        yield Mutation("header", name, header(change), UNREADABLE)

    def repeated(data: bytes) -> bytes:
        length = int.from_bytes(data[:8], "little")
        text = data[8 : 8 + length].rstrip()
        text = text[:-1] + b', "fc.weight": ' + json.dumps(json.loads(text)["fc.weight"]).encode() + b"}"
        return len(text).to_bytes(8, "little") + text + data[8 + length :]

    yield Mutation("header", "a name twice", raw(repeated), UNREADABLE)
    talk = header(lambda h: h.update(__metadata__={"note": "x" * 100_000}))
    yield Mutation("header", "long metadata", talk, ())


def links_out() -> Iterator[Mutation]:
    def moved(name: str, absolute: bool) -> Callable[[Path], None]:
        def apply(folder: Path) -> None:
            outside = folder.parent / f"{folder.name}-outside"
            outside.mkdir()
            shutil.move(folder / name, outside / name)
            (folder / name).symlink_to(outside / name if absolute else Path("..") / outside.name / name)

        return apply

    for name in (WEIGHTS, "config.json"):
        for absolute in (True, False):
            yield Mutation(
                "links", f"{name}, {'absolute' if absolute else 'relative'}", moved(name, absolute), ("links",)
            )

    def to(name: str, target: str) -> Callable[[Path], None]:
        def apply(folder: Path) -> None:
            (folder / name).unlink()
            (folder / name).symlink_to(target)

        return apply

    yield Mutation("links", "to nowhere", to(WEIGHTS, "/nowhere/at/all"), UNREADABLE)
    yield Mutation("links", "to itself", to(WEIGHTS, WEIGHTS), UNREADABLE)
    yield Mutation("links", "to a device", to(WEIGHTS, "/dev/zero"), UNREADABLE)
    yield Mutation("links", "to a system file", to("config.json", "/etc/passwd"), UNREADABLE)

    def by_index(folder: Path) -> None:
        index = {"weight_map": {"fc.weight": "../../other.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    yield Mutation("links", "by an index", by_index, UNREADABLE)


class Bomb:
    """What a pickle does when it is loaded."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple:
        return (Path.touch, (self.file,))


def pickles() -> Iterator[Mutation]:
    for protocol in range(2, 6):

        def bomb(folder: Path, protocol: int = protocol) -> None:
            (folder / WEIGHTS).write_bytes(pickle.dumps(Bomb(folder / CANARY), protocol))

        yield Mutation("pickle", f"protocol {protocol}", bomb, UNREADABLE)

    def zipped(folder: Path) -> None:
        import zipfile

        with zipfile.ZipFile(folder / "archive", "w") as archive:
            archive.writestr("archive/data.pkl", pickle.dumps(Bomb(folder / CANARY)))
        (folder / "archive").replace(folder / WEIGHTS)

    def padded(folder: Path) -> None:
        body = pickle.dumps(Bomb(folder / CANARY))
        (folder / WEIGHTS).write_bytes(len(body).to_bytes(8, "little") + body)

    def alone(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(folder / CANARY)))

    yield Mutation("pickle", "as torch zips it", zipped, UNREADABLE)
    yield Mutation("pickle", "behind a length", padded, UNREADABLE)
    yield Mutation("pickle", "by its own name", alone, UNREADABLE)


def configs() -> Iterator[Mutation]:
    def change(**keys: object) -> Callable[[Path], None]:
        def apply(folder: Path) -> None:
            config = json.loads((folder / "config.json").read_text()) | keys
            (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))

        return apply

    layers = "eagle_aux_hidden_state_layer_ids"
    for name, keys, names in (
        ("another class", {"architectures": ["LlamaForCausalLM"]}, ("architecture",)),
        ("no class", {"architectures": ...}, ("architecture",)),
        ("a list as class", {"architectures": [["x"]]}, ("architecture",)),
        ("a size as text", {"hidden_size": "8"}, ("config-sizes",)),
        ("no vocabulary", {"vocab_size": ...}, ("config-sizes",)),
        ("a huge vocabulary", {"vocab_size": 2**60}, ("config-sizes",)),
        ("a smaller head", {"draft_vocab_size": 3}, ("head-rows",)),
        ("two layers", {"num_hidden_layers": 2}, ("tensors-missing",)),
        ("ids at the top level", {"eagle_config": ..., layers: [0, 1, 2]}, ("aux-layers-nested",)),
        ("ids in text", {"eagle_config": {layers: "0,1,2"}}, ("aux-layers",)),
        ("four ids", {"eagle_config": {layers: [0, 1, 2, 3]}}, ("tensor-shapes",)),
        ("ids that descend", {"eagle_config": {layers: [2, 1, 0]}}, ("aux-layers-nested",)),
        ("norm_before_residual", {"norm_before_residual": True}, ("unserved-options",)),
        ("norm_output", {"norm_output": True}, ("unserved-options",)),
        ("a window", {"sliding_window": 2048}, ("unserved-options",)),
        ("norm_before_fc", {"norm_before_fc": True}, ("tensors-missing",)),
        ("tied", {"tie_word_embeddings": True}, ("tied-head",)),
        ("code", {"auto_map": {"AutoModel": "evil.Model"}}, ("remote-code",)),
    ):
        yield Mutation("config", name, change(**keys), names)
    yield Mutation("files", "in two files", split, ())
    prefixed = tensors(lambda t: [t.update({n.replace("midlayer", "layers.0"): t.pop(n)}) for n in list(t)])
    yield Mutation("files", "by the newer names", prefixed, ())
