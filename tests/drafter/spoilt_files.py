"""Drafter folders whose files are spoilt: cut, with lying headers, links, pickles, other configs."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from safetensors.numpy import load_file, save_file

from tests.drafter.mutation import UNREADABLE, WEIGHTS, Mutation, header, raw, tensors

CANARY = "executed"  # a file that a pickle would make, were it loaded


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
