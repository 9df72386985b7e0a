"""Checks of a drafter folder by itself: its config, its files, and its tensors against the config.

Each says what SGLang 0.5.23 would do (`models/llama_eagle3.py`, `models/kimi_k25_eagle3.py`, `model_loader/`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from drafter.checkpoint import shapes
from drafter.checkpoint.findings import Finding, error, info, warning
from drafter.checkpoint.folder import ARCHITECTURES, DrafterFolder, TensorInfo
from drafter.checkpoint.subject import Subject

# Without num_hidden_layers SGLang would build the 32 layers of its config class, all but the first of them random.
REQUIRED_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers")
OPTIONAL_SIZES = (
    "draft_vocab_size",
    "max_position_embeddings",
    "target_hidden_size",
    "num_aux_hidden_states",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)
MOST_LAYERS = 64  # of a drafter; more is a typing error, and would be a long list of missing tensors
LAYERS_KEY = "eagle_aux_hidden_state_layer_ids"
FROM_TRAINING = "take it from the run that trained the drafter"
FLOATS = ("F32", "BF16", "F16")
SPECULATORS_KEYS = ("speculators_model_type", "transformer_layer_config")
PARTS = re.compile(r"^(model\.)?(midlayer|layers|fc|norm|lm_head|input_norm|fc_norm|aux_norm_\w+)\b")
UNUSED = re.compile(r"rotary_emb\.inv_freq$|^(model\.)?embed_tokens\.weight$")


def architecture(subject: Subject) -> Iterator[Finding]:
    """The class must be one that SGLang drafts EAGLE3 with."""
    if subject.folder.architecture not in ARCHITECTURES:
        foreign = any(key in subject.config for key in SPECULATORS_KEYS)
        yield error(
            f"{subject.config_file}: 'architectures' is {subject.config.get('architectures')!r:.80}"
            + (" (a speculators checkpoint)" if foreign else ""),
            f"[{ARCHITECTURES[0]!r}] or [{ARCHITECTURES[1]!r}], which the algorithm EAGLE3 takes",
            "convert it with `python -m drafter convert --to sglang`"
            if foreign
            else "name an EAGLE-3 drafter in SGLang's format",
        )


def config_sizes(subject: Subject) -> Iterator[Finding]:
    """Every size must be a whole number above 0, and those that SGLang insists on must be there."""
    config, file = subject.config, subject.config_file
    for key in REQUIRED_SIZES + OPTIONAL_SIZES:
        found = config.get(key)
        if (found is None and key in REQUIRED_SIZES) or (found is not None and (type(found) is not int or found < 1)):
            yield error(f"{file}: {key!r} is {_shown(config, key)}", "a whole number above 0", FROM_TRAINING)
        elif found is not None and found >= 2**31:
            yield error(f"{file}: {key!r} is {found:,}", "the size of something", FROM_TRAINING)
    layers = config.get("num_hidden_layers")
    if type(layers) is int and layers > 1 and (subject.folder.architecture == shapes.MLA or layers > MOST_LAYERS):
        yield error(f"{file}: 'num_hidden_layers' is {layers}", "1, as an EAGLE-3 drafter has", FROM_TRAINING)
    if subject.folder.architecture == shapes.LLAMA:
        if "draft_vocab_size" not in config:
            yield error(
                f"{file}: 'draft_vocab_size' is missing and SGLang stops without it",
                "the rows of lm_head",
                "write it, or null to share the target's head",
            )
        if config.get("target_hidden_size", 0) is None:
            yield error(
                f"{file}: 'target_hidden_size' is null, which SGLang cannot size fc by",
                "the target's hidden_size",
                "leave the key out, or give it",
            )


def tied_head(subject: Subject) -> Iterator[Finding]:
    """A tied head is the target's whole embedding."""
    config, tied = subject.config, subject.config.get("tie_word_embeddings")
    if tied is not None and type(tied) is not bool:
        yield error(
            f"{subject.config_file}: 'tie_word_embeddings' is {tied!r:.40}, which SGLang takes as {bool(tied)}",
            "true or false",
            "set it to false if lm_head is the drafter's own",
        )
    elif tied and config.get("draft_vocab_size") not in (None, config["vocab_size"]):
        yield error(
            f"{subject.config_file}: 'tie_word_embeddings' makes the target's embedding of {config['vocab_size']:,} "
            f"rows the head, but 'draft_vocab_size' is {config['draft_vocab_size']:,}",
            "one of the two",
            "set tie_word_embeddings to false if lm_head is the drafter's own",
        )


def aux_layers(subject: Subject) -> Iterator[Finding]:
    """The captured layers must be named where SGLang looks for them; any fault there means its default layers."""
    config, file = subject.config, subject.config_file
    nested = config.get("eagle_config")
    if nested is not None and not isinstance(nested, dict):
        yield error(
            f"{file}: 'eagle_config' is {nested!r:.80}, with which SGLang would capture its default layers",
            f"an object with {LAYERS_KEY!r}",
            "write the layers that the drafter was trained on there",
        )
        return
    found = {f"eagle_config.{LAYERS_KEY}": shapes.layer_ids(config)}
    if subject.folder.architecture == shapes.MLA:
        found[LAYERS_KEY] = config.get(LAYERS_KEY)  # sizes fc where the nested one is missing
    sound = True
    for where, ids in found.items():
        if ids is not None and not (
            isinstance(ids, list) and ids and all(type(layer) is int and layer >= 0 for layer in ids)
        ):
            sound = False
            yield error(f"{file}: {where!r} is {ids!r:.80}", "a list of layer numbers of 0 or more", FROM_TRAINING)
        elif ids is not None and len(set(ids)) != len(ids):
            sound = False
            yield error(
                f"{file}: {where!r} is {ids!r:.80}, which names a layer twice, and SGLang captures each once",
                "different layers",
                FROM_TRAINING,
            )
    if sound and _is_size(config.get("num_aux_hidden_states", 1)):
        captured, sized = len(shapes.layer_ids(config) or ()) or shapes.DEFAULT_AUX, shapes.aux_count(config)
        if captured != sized and shapes.nested(config).get("use_aux_hidden_state", True):
            yield error(
                f"{file}: SGLang would capture {captured} layers and size fc for {sized}",
                "as many layers as fc takes",
                f"name the drafter's layers in 'eagle_config.{LAYERS_KEY}'",
            )


def aux_layers_nested(subject: Subject) -> Iterator[Finding]:
    """Ids at the top level alone, or none at all, leave the capture to SGLang's default."""
    ids = shapes.layer_ids(subject.config)
    if ids is None:
        top = subject.config.get(LAYERS_KEY)
        found = f"names {top!r:.80} at the top level alone" if top is not None else "names no layers"
        severity = error if top is not None else warning
        yield severity(
            f"{subject.config_file} {found}: SGLang captures its default, 2, half and three from the end",
            f"'eagle_config.{LAYERS_KEY}'",
            "write the layers that the drafter was trained on there",
        )
    elif ids != sorted(ids):
        yield warning(
            f"{subject.config_file}: the layers {ids} do not ascend, and SGLang always concatenates them ascending",
            "the order that fc was trained on to be ascending",
            "sort the ids, and the columns of fc.weight with them if they were trained in another order",
        )


def fc_is_used(subject: Subject) -> Iterator[Finding]:
    """SGLang tells captured states from the drafter's own by their width alone, and skips fc where both are as wide."""
    if shapes.aux_count(subject.config) * shapes.target_hidden(subject.config) == subject.config["hidden_size"]:
        yield error(
            f"{subject.config_file}: the captured states are as wide as the drafter, and SGLang skips fc for those",
            f"more than one layer in 'eagle_config.{LAYERS_KEY}'",
            "train a drafter on three layers",
        )


def unserved_options(subject: Subject) -> Iterator[Finding]:
    """Ways to build a drafter that SGLang does not have, and keys that mean different things to different trainers."""
    config, file = subject.config, subject.config_file
    if config.get("norm_before_residual"):
        yield error(
            f"{file}: 'norm_before_residual' is true, which SGLang does not have",
            "a residual that is not normed",
            "serve it with an engine that has it, or train without",
        )
    window = config.get("sliding_window")
    if window and config.get("use_sliding_window", True) is not False:
        yield warning(
            f"{file}: 'sliding_window' is {window!r:.20}, and SGLang drafts with full attention",
            "a drafter trained with full attention",
            "expect a lower acceptance length beyond so many tokens, or pass --speculative-draft-window-size",
        )
    if config.get("norm_output"):
        yield warning(
            f"{file}: 'norm_output' is set: to SGLang and speculators it feeds the normed state back, to SpecForge it "
            "only norms before lm_head",
            "the key to mean what SGLang takes it for",
            "remove it if SpecForge wrote it",
        )


def remote_code(subject: Subject) -> Iterator[Finding]:
    """Nothing in a drafter folder is to be executed."""
    if "auto_map" in subject.config:
        trusts = subject.deployment is not None and subject.deployment.trust_remote_code
        yield error(
            f"{subject.config_file} has an 'auto_map'"
            + (", and the profile's trust_remote_code would run its code" if trusts else ", which names code to run"),
            "a drafter without code",
            "remove the key: SGLang's own classes serve EAGLE-3 drafters",
        )


def links(subject: Subject) -> Iterator[Finding]:
    """A link out of the folder can change under a drafter whose hash was checked; a hub cache's own are its layout."""
    folder = subject.folder.path.resolve()
    inside = [folder]
    if folder.parent.name == "snapshots":
        inside.append(folder.parent.parent / "blobs")
    for name in ("config.json", *dict.fromkeys(tensor.file for tensor in subject.folder.tensors.values())):
        real = (folder / name).resolve()
        if not any(real.is_relative_to(place) for place in inside):
            yield error(
                f"{subject.folder.path / name} is a link to {real}, outside of the folder",
                "the drafter's files inside its folder",
                "copy the file there",
            )


def files(subject: Subject) -> Iterator[Finding]:
    """Files that lie there and are not read."""
    for name in subject.folder.unloaded:
        yield warning(
            f"{subject.folder.path / name} is never loaded, since the index (or model.safetensors) comes first",
            "every .safetensors file to be loaded",
            "remove it, or mend the index",
        )


def tensors_missing(subject: Subject) -> Iterator[Finding]:
    """A tensor that SGLang finds under no name stays random: acceptance length 1.00, without a word."""
    found, expected = _by_canonical_name(subject.folder), shapes.expected_shapes(subject.config)
    missing = [name for name in expected if name not in found]
    if missing:
        tensors, architecture = subject.folder.tensors, subject.folder.architecture
        bare = {shapes.canonical_name(name.removeprefix("model."), architecture): name for name in tensors}
        skipped = next((bare[name] for name in missing if name in bare), None)
        hint = f" (it has {skipped}, a name that SGLang skips)" if skipped else ""
        yield error(
            f"drafter {subject.folder.path} lacks {_listed(missing)}{hint}: SGLang would leave them random and serve "
            "at acceptance length 1.00 without a word",
            "every tensor that its config asks for",
            "export the drafter again",
        )


def tensors_twice(subject: Subject) -> Iterator[Finding]:
    """Where a tensor comes twice, the last one read is served."""
    counted = Counter(shapes.canonical_name(name, subject.folder.architecture) for name in subject.folder.tensors)
    for name in dict.fromkeys([*subject.folder.repeated, *(name for name, times in counted.items() if times > 1)]):
        yield error(
            f"drafter {subject.folder.path} has {name} twice (in two files, or by two names), and SGLang keeps the "
            "last that it reads",
            "each tensor once",
            "export the drafter again",
        )


def tensors_unexpected(subject: Subject) -> Iterator[Finding]:
    """SGLang drops what it does not know: no loss where it is none of the model, a silent one where it is."""
    folder, expected = subject.folder, shapes.expected_shapes(subject.config)
    unknown = [
        name
        for name in folder.tensors
        if shapes.canonical_name(name, folder.architecture) not in expected
        and not UNUSED.search(name)
        and not _is_map(name)
        and not (name.startswith("lm_head.") and shapes.shares_head(subject.config))
    ]
    parts = [name for name in unknown if PARTS.match(name)]
    if parts:
        yield error(
            f"drafter {folder.path} has {_listed(parts)}, which its config does not ask for and SGLang drops",
            "weights and config of the same model",
            "set the option that they belong to (norm_before_fc, fc_norm, bias, num_hidden_layers), or remove them if "
            "training did not use them",
        )
    others = [name for name in unknown if name not in parts]
    if others:
        yield warning(
            f"drafter {folder.path} has {_listed(others)}, which SGLang passes over",
            "no other tensors",
            "remove them if the drafter was not trained with them",
        )


def head_rows(subject: Subject) -> Iterator[Finding]:
    """lm_head has a row for each draft token."""
    wanted = shapes.expected_shapes(subject.config).get("lm_head.weight")
    found = _by_canonical_name(subject.folder).get("lm_head.weight")
    if wanted and found and found[1].shape[:1] != wanted[:1]:
        rows = f"{found[1].shape[0]:,}" if found[1].shape else "no"
        yield error(
            f"drafter {subject.folder.path}: lm_head.weight has {rows} rows but draft_vocab_size is {wanted[0]:,}",
            "the two to agree",
            "make config.json and the weights agree",
        )


def tensor_shapes(subject: Subject) -> Iterator[Finding]:
    """Every tensor has the shape that the config implies."""
    found = _by_canonical_name(subject.folder)
    for name, shape in shapes.expected_shapes(subject.config).items():
        if name not in found or _is_packed(subject.config, found[name][1]):
            continue
        written, tensor = found[name]
        if name == "lm_head.weight" and tensor.shape[:1] != shape[:1]:
            continue  # head_rows says it
        if not _fits(tensor.shape, shape):
            wanted = ", ".join("any" if size is None else str(size) for size in shape)
            yield error(
                f"drafter {subject.folder.path}: {written} is {list(tensor.shape)}, config.json asks for [{wanted}]",
                "the two to agree",
                "make config.json and the weights agree",
            )


def dtypes(subject: Subject) -> Iterator[Finding]:
    """SGLang copies any number into the model's dtype: whole numbers that were meant as packed weights too."""
    found, kinds = _by_canonical_name(subject.folder), Counter[str]()
    for name in shapes.expected_shapes(subject.config):
        if name in found and not subject.config.get("quantization_config"):
            written, tensor = found[name]
            kinds[tensor.dtype] += 1
            if tensor.dtype not in FLOATS:
                yield error(
                    f"drafter {subject.folder.path}: {written} is {tensor.dtype}, which SGLang would copy number by "
                    "number",
                    "BF16, F16 or F32",
                    "export it as bf16, or name its quantization_config",
                )
    if len(kinds) > 1 and not set(kinds) - set(FLOATS):
        shown = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        yield info(f"the weights are of several types ({shown})", "one", "nothing: SGLang casts them to its own")


def _by_canonical_name(folder: DrafterFolder) -> dict[str, tuple[str, TensorInfo]]:
    return {shapes.canonical_name(name, folder.architecture): (name, tensor) for name, tensor in folder.tensors.items()}


def _is_packed(config: dict[str, Any], tensor: TensorInfo) -> bool:
    """Several values to a byte, or a byte to several."""
    return bool(config.get("quantization_config")) and not tensor.dtype.startswith(("F", "BF"))


def _is_map(name: str) -> bool:
    return f".{name}".endswith((".d2t", ".t2d"))


def _is_size(found: Any) -> bool:
    return found is None or (type(found) is int and found > 0)


def _fits(found: tuple[int, ...], wanted: shapes.Shape) -> bool:
    return len(found) == len(wanted) and all(
        want is None or have == want for have, want in zip(found, wanted, strict=True)
    )


def _shown(config: dict[str, Any], key: str) -> str:
    return f"{config[key]!r:.80}" if key in config else "missing"


def _listed(names: list[str], most: int = 12) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(f"{name:.80}" for name in names[:most]) + more
