"""A profile, its drafter, and what is known of both models and of the machine: what a plan is made from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from drafter.checkpoint import shapes
from drafter.roofline import data, gpu_of
from server.config import Profile
from server.drafters import ActiveDrafter
from server.known import Known, find, quantization, text_config
from server.memory import Budget, budget


@dataclass(frozen=True)
class Deployment:
    """`target` and `draft` are None where nothing is known of them; `context` and `requests` are what to plan for."""

    profile: Profile
    drafter: ActiveDrafter
    target: Known | None
    draft: Known | None
    context: int
    requests: int

    @property
    def compute(self) -> int | None:
        """CUDA's compute capability, times ten: 90 for Hopper, 100 for B200, 120 for RTX PRO 6000."""
        return None if self.profile.machine is None else int(gpu_of(self.profile.machine)["compute"])

    @property
    def gpus(self) -> int | None:
        """GPUs of one node."""
        return None if self.profile.machine is None else int(data()["machines"][self.profile.machine]["gpus"])

    @property
    def mla(self) -> bool:
        """Whether the target attends through a latent."""
        return self.target is not None and bool(self.target.text.get("kv_lora_rank"))

    @property
    def mha_drafter(self) -> bool:
        return self.draft is not None and self.draft.config["architectures"][0] == shapes.LLAMA

    @property
    def weight_format(self) -> str | None:
        """The target's own quant_method, None where it is plain or not known."""
        block = quantization(self.target.config) if self.target else None
        return None if block is None else str(block.get("quant_method"))

    @cached_property
    def budget(self) -> Budget | None:
        """Memory of one GPU; None where the target is not known."""
        engine = self.profile.engine
        if self.target is None or "hidden_size" not in text_config(self.target.config):
            return None
        gpu = gpu_of(self.profile.machine)["memory_gb"] * 1e9 if self.profile.machine else None
        return budget(
            self.target.config,
            self.draft.config if self.draft else None,
            tp=engine.tp,
            gpu_bytes=gpu,
            mem_fraction=engine.mem_fraction,
            cache_dtype=engine.kv_cache_dtype,
            context=self.context,
            requests=self.requests,
            limit_tokens=engine.max_total_tokens,
        )


def deployment(
    profile: Profile, drafter: ActiveDrafter, context: int | None = None, requests: int | None = None
) -> Deployment:
    """What is known of a profile and its drafter. Raises ValueError for a config.json that cannot be read."""
    engine = profile.engine
    draft = find(drafter.path) if drafter.algorithm == "EAGLE3" and drafter.path else None
    return Deployment(
        profile,
        drafter,
        find(profile.model_path),
        draft,
        context or engine.context_length,
        requests or engine.max_running_requests,
    )
