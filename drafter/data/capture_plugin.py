"""The SGLang plugin that writes what a drafter would be fed: the target's auxiliary and final hidden states.

It does nothing unless EYAS_CAPTURE_DIR is set, since SGLang loads it in every process of an environment that has Eyas.
SGLang swallows what a plugin raises, so one that does not fit this SGLang ends the process with the reason.
"""

from __future__ import annotations

import importlib
import inspect
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from drafter.data.spool import FORMAT, RID_PREFIX, Handshake, convention_of, part_file, spool_of, write_handshake
from drafter.settings import read_settings

if TYPE_CHECKING:
    import torch


class Hook(NamedTuple):
    """A function of SGLang, and the parameters that it must take, by name."""

    module: str
    path: str
    parameters: str

    @property
    def target(self) -> str:
        return f"{self.module}.{self.path}"


LOGITS = Hook(
    "sglang.srt.layers.logits_processor",
    "LogitsProcessor.forward",
    "self input_ids hidden_states lm_head logits_metadata aux_hidden_states hidden_states_before_norm",
)
SETTER = Hook(
    "sglang.srt.model_executor.model_runner_components.attention_backend_setup",
    "configure_aux_hidden_state_capture",
    "model eagle_use_aux_hidden_state eagle_aux_hidden_state_layer_ids dflash_use_aux_hidden_state "
    "dflash_target_layer_ids is_dspark",
)
# Forwards in which prompts are read. The others (decode, verify, idle) repeat or guess rows.
PREFILL_MODES = ("EXTEND", "MIXED")
TYPES = {"torch.bfloat16": "bfloat16", "torch.float32": "float32"}


class Changed(RuntimeError):
    """This SGLang, or this deployment of it, is not one that the plugin can capture from."""


class Recorder:
    """Writes the rows of one process's target. Only the process of tensor-parallel rank 0 has one that writes."""

    def __init__(self, folder: Path, version: str) -> None:
        self._folder = folder
        self._version = version
        self._processor: Any = None
        self._layer_ids: list[int] = []
        self._inputs_to: list[int] = []
        self._shaken = False

    def adopt(self, model: torch.nn.Module, layer_ids: list[int] | None, processor_class: type) -> None:
        """Take `model` for the target, after SGLang has told it which layers to keep.

        The drafter, whose forwards pass the same hook, is never told, and so never adopted. Raises Changed.
        """
        modules = list(model.modules())
        kept = [list(vars(each)["layers_to_capture"]) for each in modules if vars(each).get("layers_to_capture")]
        processors = [each for each in modules if isinstance(each, processor_class)]
        if len(kept) != 1 or len(processors) != 1:
            raise Changed(
                f"{type(model).__name__} has {len(kept)} lists of layers to capture and {len(processors)} logits "
                "processors, expected one of each"
            )
        if layer_ids is None:
            raise Changed("no layer ids were given, so what they mean is not known: name them in the drafter's config")
        if convention_of(layer_ids, kept[0]) is None:
            raise Changed(f"layer ids {layer_ids} were resolved to the inputs of layers {kept[0]}")
        self._layer_ids, self._inputs_to, self._processor = layer_ids, kept[0], processors[0]

    def record(self, processor: Any, final_TH: Any, aux_TA: Any, batch: Any) -> None:
        """Write the rows of each request of one forward of the target. Raises Changed, never OSError.

        T rows, H hidden size, A = n_aux * H. The ids are the batch's: a multimodal target is called with embeddings
        alone. On a CPU nothing is copied: the file is written before the buffers can be used again.
        """
        if processor is not self._processor or batch.forward_mode.name not in PREFILL_MODES or aux_TA is None:
            return
        import torch

        if not isinstance(aux_TA, torch.Tensor):
            aux_TA = torch.cat(list(aux_TA), dim=-1)
        input_ids, lengths = batch.input_ids, batch.extend_seq_lens_cpu
        rows, width = sum(lengths), final_TH.shape[-1]
        if min(len(input_ids), len(final_TH), len(aux_TA)) < rows or aux_TA.shape[-1] != len(self._layer_ids) * width:
            raise Changed(
                f"a forward of {rows} rows came with {len(input_ids)} ids, final states {list(final_TH.shape)} and "
                f"auxiliary states {list(aux_TA.shape)}"
            )
        if aux_TA.dtype != final_TH.dtype or str(final_TH.dtype) not in TYPES:
            raise Changed(f"states are {aux_TA.dtype} and {final_TH.dtype}, expected both bfloat16 or both float32")
        self._shake_hands(width, TYPES[str(final_TH.dtype)])
        at = 0
        for rid, length, start in zip(batch.rids, lengths, batch.extend_prefix_lens_cpu, strict=True):
            if rid.startswith(RID_PREFIX):
                self._write(
                    part_file(self._folder, rid, start),
                    {
                        "input_ids": input_ids[at : at + length].to("cpu", torch.int32),
                        "aux_hidden": aux_TA[at : at + length].cpu().contiguous(),
                        "final_hidden": final_TH[at : at + length].cpu().contiguous(),
                    },
                )
            at += length

    def _shake_hands(self, hidden_size: int, dtype: str) -> None:
        if self._shaken:
            return
        convention = convention_of(self._layer_ids, self._inputs_to)
        assert convention
        spool_of(self._folder).mkdir(parents=True, exist_ok=True)
        write_handshake(
            self._folder,
            Handshake(
                FORMAT,
                platform.node(),
                os.getpid(),
                self._version,
                self._layer_ids,
                self._inputs_to,
                convention,
                hidden_size,
                dtype,
                tp_rank=0,
            ),
        )
        self._shaken = True

    def _write(self, file: Path, tensors: dict[str, torch.Tensor]) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        beside = file.with_name(file.name + ".tmp")
        try:
            save_file(tensors, beside)
            beside.replace(file)
        except (OSError, SafetensorError) as error:
            # The engine may serve others: they must not pay for a full disk. The client sees that rows are missing.
            beside.unlink(missing_ok=True)
            print(f"eyas capture: {file} could not be written ({error})", file=sys.stderr, flush=True)


def check(hook: Hook) -> None:
    """Raises Changed unless the function exists and takes these parameters."""
    try:
        owner: Any = importlib.import_module(hook.module)
    except ImportError as error:
        raise Changed(f"{hook.module} cannot be imported ({error})") from error
    for name in hook.path.split("."):
        owner = vars(owner).get(name)
        if owner is None:
            raise Changed(f"{hook.module} has no {hook.path}")
    taken = " ".join(inspect.signature(owner).parameters)
    if taken != hook.parameters:
        raise Changed(f"{hook.target} takes ({taken}), expected ({hook.parameters})")


def install(folder: Path) -> None:
    """Hook SGLang so that this process records into `folder`. Raises Changed."""
    check(LOGITS)
    check(SETTER)
    from sglang.srt.layers.logits_processor import LogitsProcessor
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.runtime_context import get_parallel
    from sglang.version import __version__

    recorder = Recorder(folder, __version__)

    def around_setter(original: Callable[..., None], **arguments: Any) -> None:
        original(**arguments)
        if not arguments["eagle_use_aux_hidden_state"]:
            return
        parallel = get_parallel()
        if parallel.attn_dp_size > 1:
            leave(Changed("attention data parallelism gives each rank other requests, and only rank 0 writes"))
        if parallel.tp_rank == 0:
            try:
                recorder.adopt(
                    arguments["model"], arguments["eagle_aux_hidden_state_layer_ids"], processor_class=LogitsProcessor
                )
            except Changed as reason:
                leave(reason)

    def around_forward(
        original: Callable[..., Any],
        processor: Any,
        input_ids: Any,
        hidden_states: Any,
        lm_head: Any,
        logits_metadata: Any,
        aux_hidden_states: Any = None,
        *others: Any,
        **named: Any,
    ) -> Any:
        try:
            recorder.record(processor, hidden_states, aux_hidden_states, logits_metadata)
        except Changed as reason:
            leave(reason)
        return original(
            processor, input_ids, hidden_states, lm_head, logits_metadata, aux_hidden_states, *others, **named
        )

    HookRegistry.register(SETTER.target, around_setter, HookType.AROUND)
    HookRegistry.register(LOGITS.target, around_forward, HookType.AROUND)


def leave(reason: Changed) -> None:
    """End the process. SystemExit, since SGLang catches every Exception of a plugin."""
    sys.exit(f"eyas capture does not fit this engine: {reason}: install sglang==0.5.23, or start it without --capture")


def register() -> None:
    """The entry point in sglang.srt.plugins: SGLang calls it once in every process of the engine."""
    folder = read_settings().capture_dir
    if folder is None:
        return
    try:
        install(folder)
    except Changed as reason:
        leave(reason)
