"""The table of checks that the engine does not make, before a GPU is touched. `--force NAME` is the only way past one.

Names are stable: profiles, scripts and people use them.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from drafter.checkpoint import fit, mapping, origin, structure, values
from drafter.checkpoint.findings import Check, Finding, in_the_way, run_checks
from drafter.checkpoint.folder import DrafterError, DrafterFolder, open_folder
from drafter.checkpoint.subject import Subject

CONFIG = ("architecture", "config-sizes", "aux-layers")
MAP = (*CONFIG, "d2t-tensor")
READABLE = "readable"  # the folder can be opened at all: nothing can be forced past that

# What a folder must be by itself.
OF_THE_FOLDER: tuple[Check[Subject], ...] = (
    Check("architecture", structure.architecture),
    Check("config-sizes", structure.config_sizes, ("architecture",)),
    Check("aux-layers", structure.aux_layers, ("architecture",)),
    Check("aux-layers-nested", structure.aux_layers_nested, ("architecture", "aux-layers")),
    Check("tied-head", structure.tied_head, ("architecture", "config-sizes")),
    Check("unserved-options", structure.unserved_options),
    Check("remote-code", structure.remote_code),
    Check("links", structure.links),
    Check("files", structure.files),
    Check("manifest", origin.manifest),
    Check("tensors-missing", structure.tensors_missing, CONFIG),
    Check("tensors-twice", structure.tensors_twice, CONFIG),
    Check("tensors-unexpected", structure.tensors_unexpected, CONFIG),
    Check("head-rows", structure.head_rows, CONFIG),
    Check("tensor-shapes", structure.tensor_shapes, CONFIG),
    Check("dtypes", structure.dtypes, CONFIG),
    Check("fc-is-used", structure.fc_is_used, CONFIG),
    Check("d2t-tensor", mapping.d2t_tensor, CONFIG),
    Check("d2t-placeholder", mapping.d2t_placeholder, MAP),
    Check("d2t-reading", mapping.d2t_reading, (*MAP, "d2t-placeholder")),
    Check("d2t-range", mapping.d2t_range, (*MAP, "d2t-reading")),
    Check("d2t-unique", mapping.d2t_unique, (*MAP, "d2t-reading", "d2t-placeholder")),
    Check("d2t-order", mapping.d2t_order, (*MAP, "d2t-range", "d2t-unique")),
    Check("vocab-hash", origin.vocab_hash, (*MAP, "d2t-range", "d2t-unique")),
    Check("t2d", mapping.t2d, (*MAP, "d2t-reading", "d2t-placeholder", "d2t-range", "d2t-unique")),
)
# The numbers in it: every weight is read.
OF_THE_VALUES: tuple[Check[Subject], ...] = (
    Check("finite", values.finite, (*CONFIG, "tensor-shapes")),
    Check("zero-rows", values.zero_rows, (*CONFIG, "tensor-shapes")),
)
OF_THE_TARGET: tuple[Check[Subject], ...] = (
    Check("vocab-size", fit.vocab_size, CONFIG),
    Check("fc-width", fit.fc_width, CONFIG),
    Check("layers-in-target", fit.layers_in_target, CONFIG),
    Check("rope", fit.rope),
    Check("made-for-target", fit.made_for_target),
    Check("special-tokens", mapping.special_tokens, (*MAP, "d2t-reading", "d2t-range", "vocab-size")),
)
OF_THE_PROFILE: tuple[Check[Subject], ...] = (
    Check("draft-attention-backend", fit.draft_attention_backend, ("architecture",)),
    Check("draft-quantization", fit.draft_quantization),
    Check("rejection-sampling", fit.rejection_sampling, CONFIG),
    Check("token-map", fit.token_map),
    Check("pinned-hash", fit.pinned_hash),
    Check("pinned-layers", fit.pinned_layers, ("aux-layers",)),
)
OF_BOTH: tuple[Check[Subject], ...] = (Check("context-length", fit.context_length, ("config-sizes",)),)
NAMES = tuple(
    check.name for checks in (OF_THE_FOLDER, OF_THE_VALUES, OF_THE_TARGET, OF_THE_PROFILE, OF_BOTH) for check in checks
)


def preflight(subject: Subject, forced: Collection[str] = ()) -> list[Finding]:
    """Every finding about a drafter; the checks of a target or a profile that is not given are left out.

    `forced` changes no finding, but what its errors leave unchecked is said.
    """
    checks = OF_THE_FOLDER + OF_THE_VALUES
    checks += OF_THE_TARGET if subject.target else ()
    checks += OF_THE_PROFILE if subject.deployment else ()
    return run_checks(checks + OF_BOTH, subject, forced)


def read_folder(path: Path) -> DrafterFolder:
    """A drafter folder that can be meant, by itself; its numbers are not looked at. Raises DrafterError."""
    folder = open_folder(path)
    refuse(run_checks(OF_THE_FOLDER, Subject(folder)))
    return folder


def check_names(forced: Collection[str]) -> None:
    """Raises ValueError for a name that is no check's."""
    for name in forced:
        if name == READABLE:
            raise ValueError(f"{READABLE!r} cannot be forced: there is nothing to hand to the engine.")
        if name not in NAMES:
            raise ValueError(f"{name!r} is no check: choose from {', '.join(NAMES)}.")


def refuse(findings: list[Finding], forced: Collection[str] = ()) -> None:
    """Raises DrafterError for the first error that nobody forced past, and says how many more there are."""
    stopped = in_the_way(findings, forced)
    if stopped:
        first, others = stopped[0], list(dict.fromkeys(each.check for each in stopped[1:]))
        more = f" Also: {', '.join(others)}." if others else ""
        raise DrafterError(f"{first.sentence} (Check {first.check}.){more}")
