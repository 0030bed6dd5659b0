"""`anabatic export`, `merge`, `checkpoint export` and `push`: model folders for other programs, and for a hub."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from anabatic.config.sections.common import require_setting
from anabatic.core.paths import HUB_ID_PATTERN

Gguf = Literal["none", "f32", "f16", "bf16", "q8_0"]
SERVERS = ("ollama", "vllm", "mindie")


@dataclass(kw_only=True)
class ExportJob:
    """Write a model, adapters merged, as a folder that transformers and vLLM load, with what other servers need."""

    model: str = ""
    """Model or adapter: a Hugging Face folder, a run folder, or OWNER/NAME of a hub."""
    adapter: list[str] = field(default_factory=list)
    """Adapters to merge into the weights first, one after the other: FOLDER, or FOLDER@0.5 for half of its effect."""
    out: str = ""
    """Folder to write."""
    overwrite: bool = False
    """Replace `out` if it is a model folder; it must not exist otherwise."""
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Number format of the weights; auto: that of the base model's files."""
    shard_gib: float = 4.0
    """Largest weight file in GiB; a tensor is never divided."""
    name: str | None = None
    """Name under which it is served; default: the last part of `out`."""
    format: Literal["safetensors", "gguf", "ollama", "vllm", "mindie"] = "safetensors"
    """safetensors: the folder, with a recipe for each server; gguf: also a GGUF file of 16 bits, unless `gguf` says
    more; the name of a server: a recipe for that one alone, for Ollama with the GGUF file."""
    gguf: Gguf = "none"
    """Also write NAME-FORMAT.gguf with llama.cpp's own converter."""
    llama_cpp: str | None = None
    """Folder of llama.cpp, or its convert_hf_to_gguf.py; default: the one on PATH."""
    recipes: list[Literal["ollama", "vllm", "mindie"]] = field(default_factory=lambda: list(SERVERS))  # type: ignore[arg-type]
    """Servers to write a recipe for: Modelfile (Ollama), serving/vllm-ascend.sh, serving/mindie-config.json."""
    devices: int = 1
    """Devices that the recipes divide the model over."""
    context: int | None = None
    """Longest context in tokens that the recipes allow; default: the model's, at most 32,768."""

    def __post_init__(self) -> None:
        require_setting(bool(self.model.strip()), "model is not given", "anabatic export MODEL -o FOLDER")
        require_setting(bool(self.out.strip()), "out is not given", "give -o FOLDER")
        if self.format in ("gguf", "ollama") and self.gguf == "none":
            self.gguf = "f16"
        if self.format in SERVERS:
            self.recipes = [self.format]  # type: ignore[list-item]
        require_setting(0 < self.shard_gib <= 1024, f"shard_gib is {self.shard_gib}", "use more than 0; 4 is common")
        require_setting(1 <= self.devices <= 1024, f"devices is {self.devices}", "use 1 or more")
        require_setting(
            self.context is None or self.context >= 16, f"context is {self.context}", "use 16 tokens or more"
        )
        is_valid_name = self.name is None or re.fullmatch(r"[\w][\w.-]*", self.name, re.ASCII) is not None
        require_setting(is_valid_name, f'name is "{self.name}"', "use letters, digits, dots, _ and -")
        twice = len(set(self.recipes)) < len(self.recipes)
        require_setting(not twice, f"recipes are {', '.join(self.recipes)}", "name each once")
        lone = self.gguf == "none" and self.llama_cpp is not None
        require_setting(
            not lone, "llama_cpp is given and no GGUF file is asked for", "add --gguf f16 (or bf16, f32, q8_0)"
        )


@dataclass(kw_only=True)
class CheckpointExportJob:
    """Write the model of a checkpoint as the run would write final_model: a Hugging Face folder, or an adapter's."""

    checkpoint: str = ""
    """Folder of a checkpoint, or a run folder, whose newest whole one is taken."""
    out: str = ""
    """Folder to write; it must not exist yet."""
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Number format of the weights; auto: as they were trained."""

    def __post_init__(self) -> None:
        require_setting(
            bool(self.checkpoint.strip()), "checkpoint is not given", "name a run folder or a checkpoint in it"
        )
        require_setting(bool(self.out.strip()), "out is not given", "give --out FOLDER")


@dataclass(kw_only=True)
class MergeJob:
    """Write the model that adapters make of their base model, as an ordinary Hugging Face folder."""

    model: str = ""
    """Adapter folder, or a run folder that holds one; with `adapter` also the base model."""
    adapter: list[str] = field(default_factory=list)
    """Adapters to merge into the weights first, one after the other: FOLDER, or FOLDER@0.5 for half of its effect."""
    out: str = ""
    """Folder to write; it must not exist yet."""

    def __post_init__(self) -> None:
        require_setting(bool(self.model), "model is not given", "give --model FOLDER, for example runs/lora")
        require_setting(bool(self.out.strip()), "out is not given", "give --out FOLDER")


@dataclass(kw_only=True)
class PushJob:
    """Upload a model or an adapter to Hugging Face or ModelScope, with a model card made from its run."""

    model: str = ""
    """Run folder, whose best or final model is taken, or the folder of a model or an adapter."""
    to: str = ""
    """[hf:|ms:]OWNER/NAME, created if it does not exist; without a prefix on the hub of ANABATIC_HUB, else Hugging
    Face."""
    private: bool = True
    """A new repository is private; false: public."""
    revision: str | None = None
    """Branch; created on Hugging Face if it does not exist. Default: the main one."""
    license: str | None = None
    """License of the model as an identifier of SPDX, such as apache-2.0, for the card; ModelScope requires one."""
    base_model: str | None = None
    """OWNER/NAME of the model that was trained on, where the run names a folder of this machine."""
    message: str | None = None
    """Message of the commit."""
    dry_run: bool = False
    """Print the card and the files, and upload nothing."""

    def __post_init__(self) -> None:
        usage = "anabatic push runs/mine --to OWNER/NAME"
        require_setting(bool(self.model.strip()), "model is not given", usage)
        require_setting(bool(self.to.strip()), "to is not given", usage)
        is_target = HUB_ID_PATTERN.fullmatch(self.repo_name) and self.hub_scheme in ("", "hf", "ms")
        usage = "use OWNER/NAME, hf:OWNER/NAME or ms:OWNER/NAME; letters, digits, dots, _ and -"
        require_setting(bool(is_target), f'to is "{self.to}"', usage)
        is_base = self.base_model is None or HUB_ID_PATTERN.fullmatch(self.base_model)
        require_setting(bool(is_base), f'base_model is "{self.base_model}"', "use OWNER/NAME, as the hub has it")
        is_license = self.license is None or re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.+-]*", self.license)
        require_setting(bool(is_license), f'license is "{self.license}"', "use an identifier such as apache-2.0")
        is_branch = self.revision is None or re.fullmatch(r"[A-Za-z0-9][\w./-]*", self.revision, re.ASCII)
        require_setting(bool(is_branch), f'revision is "{self.revision}"', "use the name of a branch, such as main")

    @property
    def hub_scheme(self) -> str:
        """What stands before the colon of `to`; empty: it names no hub."""
        return self.to.rpartition(":")[0]

    @property
    def repo_name(self) -> str:
        """`OWNER/NAME`."""
        return self.to.rpartition(":")[2]
