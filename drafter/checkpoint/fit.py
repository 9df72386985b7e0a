"""Checks of a drafter against its target and against the profile that would serve it."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import Any

from drafter.checkpoint import shapes
from drafter.checkpoint.findings import Finding, error, info, warning
from drafter.checkpoint.manifest import MANIFEST
from drafter.checkpoint.origin import manifest_of
from drafter.checkpoint.structure import LAYERS_KEY
from drafter.checkpoint.subject import Subject

# Attention backends of SGLang 0.5.23 for latent attention alone (`layers/attention/attention_registry.py`); on
# Blackwell a DeepSeek or Kimi target gets the first by default, and the drafter inherits it.
MLA_BACKENDS = ("trtllm_mla", "cutlass_mla", "cutedsl_mla", "flashmla", "tokenspeed_mla")
LARGEST = 1e300  # above it no rope has a theta, and a whole number may be no float
NEEDS_FULL_VOCABULARY = ("--speculative-use-rejection-sampling", "--speculative-use-block-verification")


def vocab_size(subject: Subject) -> Iterator[Finding]:
    """A drafter speaks the target's token ids."""
    assert subject.target
    wanted, found = subject.target.size("vocab_size"), subject.config["vocab_size"]
    if found != wanted:
        yield error(
            f"{subject.config_file}: 'vocab_size' is {found:,}, the target has {wanted:,}",
            "the target's",
            "name the target that the drafter was made for",
        )


def fc_width(subject: Subject) -> Iterator[Finding]:
    """fc takes so many layers of the target's width; the first forward pass would fail otherwise."""
    assert subject.target
    wanted, found = subject.target.size("hidden_size"), shapes.target_hidden(subject.config)
    if found != wanted:
        yield error(
            f"{subject.config_file}: fc is sized for {shapes.aux_count(subject.config)} states of {found:,}, the "
            f"target's are {wanted:,} wide",
            "layers times the target's hidden_size",
            "name the target that the drafter was made for, or set target_hidden_size",
        )


def layers_in_target(subject: Subject) -> Iterator[Finding]:
    """The captured layers must exist in the target; what the ids mean is said, since conventions differ."""
    assert subject.target
    count = subject.target.size("num_hidden_layers")
    if count is None or not shapes.nested(subject.config).get("use_aux_hidden_state", True):
        return
    ids = subject.folder.layer_ids
    as_inputs = subject.target.takes_inputs and ids is not None and ids[0] != 1
    default = [2, count // 2, count - 3]
    inputs = default if ids is None else [layer + (not as_inputs) for layer in ids]
    beyond = [layer for layer in inputs if not 0 <= layer < count]
    shown = f"the ids {ids}" if ids is not None else "no ids, so SGLang's default,"
    if beyond:
        yield error(
            f"{subject.config_file}: {shown} capture the inputs of layers {inputs}, and the target has {count} (0 to "
            f"{count - 1})",
            f"ids of 0 to {count - 1 - (not as_inputs)} here",
            "name the target that the drafter was made for, or the layers that it was trained on",
        )
        return
    convention = "input_to_layer" if ids is None or as_inputs else "output_of_layer"
    yield info(
        f"{shown} capture the outputs of layers {[layer - 1 for layer in inputs]} of {count} ({convention})",
        "the layers that the drafter was trained on",
        "nothing where they are; a shift by one costs about 0.1 of acceptance length, and only an A/B shows it",
    )
    capture = manifest_of(subject).get("capture")
    trained = capture.get("convention") if isinstance(capture, dict) else None
    if trained is not None and ids is not None and trained != convention:
        yield error(
            f"{subject.folder.path / MANIFEST} says that the ids {ids} were captured as {trained}, this target "
            f"takes them as {convention}",
            "one convention",
            f"write eagle_config.{LAYERS_KEY} in the target's own convention",
        )


def context_length(subject: Subject) -> Iterator[Finding]:
    """SGLang builds the drafter with the target's context, and refuses where the drafter's config allows less."""
    longest, deployment, target = subject.config.get("max_position_embeddings"), subject.deployment, subject.target
    if longest is None:
        return
    if deployment:
        if longest < deployment.context_length:
            yield error(
                f"drafter {subject.folder.path} allows {longest:,} tokens of context, the profile asks for "
                f"{deployment.context_length:,}, and the engine would refuse to start",
                "no less than the profile's",
                f"set context_length = {longest} or less",
            )
    elif target and longest < (target.size("max_position_embeddings") or 0):
        yield warning(
            f"{subject.config_file}: 'max_position_embeddings' is {longest:,}, the target's is "
            f"{target.size('max_position_embeddings'):,}",
            "no less than the context that is served",
            f"serve with a context_length of {longest:,} or less",
        )


def rope(subject: Subject) -> Iterator[Finding]:
    """A drafter turns its positions as it was trained to; most were trained to do it as their target does."""
    assert subject.target
    found, wanted = rotary(subject.config), rotary(subject.target.config)
    if not 0 < found[0] < inf:
        yield error(
            f"{subject.config_file}: rope_theta is {found[0]:g}", "a number above 0", "take it from the training run"
        )
    elif found != wanted:
        yield warning(
            f"{subject.config_file}: rope is {rope_shown(found)}, the target's is {rope_shown(wanted)}",
            "the rope that the drafter was trained with",
            "keep a trained drafter's own; a new drafter takes the target's",
        )


def made_for_target(subject: Subject) -> Iterator[Finding]:
    """The drafter's manifest names its target by hash; another tokenizer means other tokens by the same ids."""
    assert subject.target
    named = manifest_of(subject).get("target")
    if not isinstance(named, dict):
        yield info(
            f"drafter {subject.folder.path} does not say by hash which target it was made for",
            "an eyas.json, as a drafter made here has",
            "compare the two tokenizers once",
        )
        return
    for key, have, say, what in (
        ("tokenizer_sha256", subject.target.tokenizer_sha256, error, "tokenizer"),
        ("config_sha256", subject.target.config_sha256, warning, "config"),
    ):
        if named.get(key) is not None and have is not None and named[key] != have:
            yield say(
                f"{subject.folder.path / MANIFEST} names a target with the {what} {str(named[key])[:12]}, this "
                f"target's is {have[:12]}",
                "the target that the drafter was made for",
                "name that target, or compare the two files",
            )


def draft_attention_backend(subject: Subject) -> Iterator[Finding]:
    """An MHA drafter cannot take the backend that it inherits from a target with latent attention on Blackwell."""
    deployment = subject.deployment
    assert deployment
    if deployment.device != "cuda" or subject.folder.architecture != shapes.LLAMA:
        return
    chosen = deployment.draft_attention_backend
    if chosen in MLA_BACKENDS or (chosen is None and deployment.attention_backend in MLA_BACKENDS):
        say, what = error, f"would run on {chosen or deployment.attention_backend}, which takes latent attention alone"
    elif chosen is None and subject.target is not None and subject.target.mla and not deployment.attention_backend:
        say, what = error, "inherits trtllm_mla from its MLA target on Blackwell, and the engine dies"
    elif chosen is None and subject.target is None:
        say, what = warning, "has no attention_backend: behind an MLA target it inherits trtllm_mla on Blackwell"
    else:
        return
    yield say(
        f"drafter {deployment.name} has MHA attention and {what}",
        "a backend of its own",
        'set attention_backend = "flashinfer" in its table',
    )


def draft_quantization(subject: Subject) -> Iterator[Finding]:
    """Without a word of its own, the drafter is quantised as the target is."""
    deployment = subject.deployment
    assert deployment
    if deployment.quantization and not deployment.draft_quantization and not subject.config.get("quantization_config"):
        yield warning(
            f"drafter {deployment.name} inherits quantization {deployment.quantization!r} from the target",
            "its own",
            'set quantization = "unquant" in its table for a bf16 drafter',
        )


def rejection_sampling(subject: Subject) -> Iterator[Finding]:
    """Rejection sampling needs a probability for every token of the target."""
    assert subject.deployment
    rows = subject.config.get("draft_vocab_size")
    asked = [flag for flag in NEEDS_FULL_VOCABULARY if _given(flag, subject.deployment.extra_args)]
    if asked and rows not in (None, subject.config["vocab_size"]):
        yield error(
            f"extra_args has {asked[0]}, which SGLang refuses with a draft vocabulary of {rows:,}",
            f"all {subject.config['vocab_size']:,} tokens, or no such flag",
            "remove the flag from extra_args",
        )


def token_map(subject: Subject) -> Iterator[Finding]:
    """`--speculative-token-map` is EAGLE-2's; under EAGLE3 SGLang warns and ignores it."""
    assert subject.deployment
    if _given("--speculative-token-map", subject.deployment.extra_args):
        yield error(
            "extra_args has --speculative-token-map, which SGLang ignores under EAGLE3",
            "the drafter's own d2t",
            "remove the flag, and move the drafter with `python -m drafter remap` if its vocabulary is to change",
        )


def pinned_hash(subject: Subject) -> Iterator[Finding]:
    """The profile names the drafter's hash."""
    deployment = subject.deployment
    assert deployment
    if deployment.sha256 and deployment.sha256 != subject.folder.sha256:
        yield error(
            f"drafter {subject.folder.path} has sha256 {subject.folder.sha256}: it was changed",
            deployment.sha256,
            "name the new hash in the profile if you trust it",
        )


def pinned_layers(subject: Subject) -> Iterator[Finding]:
    """The profile restates the drafter's layers; only the folder's own count for the engine."""
    deployment = subject.deployment
    assert deployment
    if deployment.layer_ids is not None and deployment.layer_ids != subject.folder.layer_ids:
        yield error(
            f"drafter {subject.folder.path} captures layers {subject.folder.layer_ids}",
            f"{deployment.layer_ids}, as the profile says",
            "write them in the folder's eagle_config, which alone counts for the engine",
        )


def rotary(config: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """(theta, scaling without its theta) from either place that config.json keeps them in."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    scaling = dict(scaling) if isinstance(scaling, dict) else {"rope_type": repr(scaling)}
    theta = config.get("rope_theta", scaling.pop("rope_theta", None))
    scaling.pop("rope_theta", None)
    kind = scaling.pop("type", scaling.pop("rope_type", "default"))
    scaling.pop("rope_type", None)
    return (
        (float(theta) if abs(theta) < LARGEST else inf) if isinstance(theta, int | float) else 10000.0,
        {} if kind == "default" else {"type": kind, **scaling},
    )


def rope_shown(found: tuple[float, dict[str, Any]]) -> str:
    """What `rotary` gave, in words."""
    theta, scaling = found
    return f"theta {theta:g}" + (f" with {scaling}" if scaling else " without scaling")


def _given(flag: str, arguments: tuple[str, ...]) -> bool:
    """argparse takes any unambiguous beginning of a flag for the flag itself."""
    words = (argument.split("=", 1)[0] for argument in arguments)
    return any(flag.startswith(word) and len(word) > len("--speculative-") for word in words)
