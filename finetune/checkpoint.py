"""Atomic checkpoints that load into any layout; exports of adapters and merged models.

Surface: `torch.distributed.checkpoint` (DCP). A checkpoint is written in a draft folder and renamed when the parts of
all ranks are on disk. `checkpoint-<step>/` contains DCP's files and trainer.json. Only trained weights are
stored; frozen weights are read from the model again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import nn

from contracts.job_config import ConfigError, EndedError, JobConfig
from finetune import hub, weights
from finetune.model import build_model, causal_lm, stored_type

T = TypeVar("T")
STATE, STATE_OF_TRL = "trainer.json", "trainer_state.json"  # transformers names its file TRAINER_STATE_NAME
# For ranks that wait while others download, read, tokenise or write. NCCL's own limit of 10 minutes applies to steps
# and to the groups of the mesh. The death of a rank is detected through its connection, not by this timeout.
WAIT = timedelta(hours=1)
MOMENTS = ("exp_avg", "exp_avg_sq")
FULL_BYTES = 16 << 20  # free space below which a disk is full: a last piece that did not fit leaves up to this much


class SaveError(EndedError):
    """A disk is full or fails; earlier checkpoints are complete."""

    code = 74  # EX_IOERR


def training_state(
    parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, step: int = 0
) -> dict[str, torch.Tensor]:
    """Return trained weights and their AdamW moments, under names that do not depend on the layout.

    Moments that do not exist yet are created as they are after `step` steps, to load into.
    """
    state: dict[str, torch.Tensor] = {}
    for name, p in parameters.items():
        if p.requires_grad:
            if not (moments := optimizer.state[p]):
                moments |= {"step": torch.tensor(float(step), device=p.device)}
                moments |= {m: torch.zeros_like(p) for m in MOMENTS}
            state |= {f"model.{name}": p.detach(), **{f"optim.{name}.{m}": moments[m] for m in MOMENTS}}
    return state


class Checkpoints:
    """The checkpoints of one output folder."""

    def __init__(self, folder: Path, keep: int | None) -> None:
        self.folder, self.keep = folder, keep
        self.group = dist.new_group(backend="gloo", timeout=WAIT)
        if dist.get_rank() == 0:
            for leftover in folder.glob(".checkpoint-*"):
                shutil.rmtree(leftover, ignore_errors=True)
        dist.barrier(group=self.group)

    def save(self, step: int, state: Mapping[str, torch.Tensor], about: Mapping[str, Any]) -> None:
        """Write a checkpoint, all ranks together. Raises SaveError on every rank if one cannot write its part."""
        draft, final = self.folder / f".checkpoint-{step}", self.folder / f"checkpoint-{step}"
        if final.exists():
            return
        reason = ""
        try:
            dcp.save(dict(state), checkpoint_id=draft, process_group=self.group)
            if dist.get_rank() == 0:
                self._publish(draft, final, {**about, "step": step})
        except (OSError, dcp.CheckpointException) as error:  # of this rank's file system; of any rank's part
            reason = describe_disk(self.folder, error)
        failed = torch.tensor([float(bool(reason))])
        dist.all_reduce(failed, group=self.group)
        if failed.item():
            if dist.get_rank() == 0:
                shutil.rmtree(draft, ignore_errors=True)
            raise SaveError(f"checkpoint-{step} not written: {reason or 'another rank failed'}")

    def _publish(self, draft: Path, final: Path, about: Mapping[str, Any]) -> None:
        """Rename a draft that is whole, and remove the oldest checkpoints."""
        with (draft / STATE).open("w") as file:
            json.dump(about, file)
            file.flush()
            os.fsync(file.fileno())
        draft.rename(final)
        handle = os.open(self.folder, os.O_RDONLY)
        os.fsync(handle)  # so that the new name is on the disk before older checkpoints are removed
        os.close(handle)
        for old in list_checkpoints(self.folder)[: -self.keep] if self.keep else ():
            shutil.rmtree(old, ignore_errors=True)

    def load(self, path: Path, state: Mapping[str, torch.Tensor]) -> None:
        """Read into the given tensors, independent of the layout that wrote the checkpoint."""
        try:
            dcp.load(dict(state), checkpoint_id=path, process_group=self.group)
        except (Exception, dcp.CheckpointException) as error:  # which is no Exception
            raise ConfigError(f"resume_from_checkpoint: {path} does not fit this model: {_root(error)}") from error


def describe_disk(folder: Path, error: BaseException) -> str:
    """The error, with the cause if the disk is full, which torch does not report; the draft still exists."""
    return f"{f'the disk of {folder} is full' if is_full(folder) else folder} ({_root(error)})"


def is_full(folder: Path) -> bool:
    """Whether the disk of a folder is full, which torch and safetensors do not say."""
    with contextlib.suppress(OSError):  # a mount that is gone
        return shutil.disk_usage(folder).free < FULL_BYTES
    return False


def on_rank_zero(work: Callable[[], T]) -> T:
    """Return on every rank what `work` returns on rank 0. If it ends the job there, it ends it on every rank."""
    outcome: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            outcome = [work()]
        except EndedError as error:
            outcome = [error]
        except OSError as error:
            if error.errno not in hub.DISK_ERRORS:
                raise
            outcome = [SaveError(str(error))]
    dist.broadcast_object_list(outcome, src=0)
    if isinstance(outcome[0], EndedError):
        raise outcome[0]
    return cast(T, outcome[0])


def list_checkpoints(folder: Path) -> list[Path]:
    """Return complete checkpoints of both trainers, oldest first."""
    checkpoints = [path for path in folder.glob("checkpoint-*") if path.name[11:].isdigit() and _is_complete(path)]
    return sorted(checkpoints, key=lambda path: int(path.name[11:]))


def _is_complete(path: Path) -> bool:
    return (path / STATE).is_file() or (path / STATE_OF_TRL).is_file()  # each trainer writes its own last


def identify_run(config: JobConfig, trainer: str = "topoflight") -> dict[str, Any]:
    """Return what a checkpoint and the run that loads it must have in common."""
    lora = {"lora_r": config.lora_r, "lora_target_modules": list(config.lora_target_modules)} if config.use_peft else {}
    return {"trainer": trainer, "model": config.model_name_or_path, "model_revision": config.model_revision,
            "use_peft": config.use_peft, "seed": config.seed, **lora}  # fmt: skip


def find_resume(config: JobConfig, trainer: str = "topoflight") -> tuple[Path | None, dict[str, Any]]:
    """Return the checkpoint to resume from, and its trainer.json: "auto" and true take the newest, a path that one.

    Raises ConfigError for one of another run. A checkpoint of a user's own TRL script has no trainer.json.
    """
    setting = config.resume_from_checkpoint
    newest = next(reversed(list_checkpoints(Path(config.output_dir))), None)
    path = newest if setting in ("auto", True) else Path(str(setting)) if setting else None
    if (path or setting is True) and not (path and _is_complete(path)):
        wrong = f"no checkpoint in {path or config.output_dir} (no {STATE} or {STATE_OF_TRL})"
        raise ConfigError(f"resume_from_checkpoint={setting!r}: {wrong}")
    if newest is not None and (path is None or path.resolve() != newest.resolve()):
        # Two runs in one folder would each resume from the other's newest checkpoint.
        raise ConfigError(f"resume_from_checkpoint={setting!r}: {newest} is newer; resume from it, or set output_dir")
    if path is None:
        return None, {}
    about = json.loads((path / STATE).read_text()) if (path / STATE).is_file() else {"identity": {"trainer": "trl"}}
    for name, value in identify_run(config, trainer).items():
        was = about["identity"].get(name, value)
        if len({os.path.realpath(Path(str(one)).expanduser()) for one in (was, value)}) > 1:  # a link is the same model
            wrong = f"{path} has {name}={was!r}, this run has {value!r}: use the same value, or another output_dir"
            raise ConfigError(f"resume_from_checkpoint: {wrong}")
    return path, about


def export(config: JobConfig, precision: str, path: Path, tokenizer: Any) -> dict[str, str]:
    """Export an adapter (or whole model) in Hugging Face format from a checkpoint.

    The whole model is then in the memory of the host, in the type that it is written in.
    """
    folder, source = Path(config.output_dir), weights.open_source(config)
    dtype = source.dtype or stored_type(config, precision)
    if config.dtype != "auto":
        dtype = stored_type(dataclasses.replace(config, use_peft=True), precision)
    # in 4 bits a merged adapter would mostly be lost by rounding
    dtype_name: Any = str(dtype).removeprefix("torch.")
    unquantized = dataclasses.replace(config, load_in_4bit=False, dtype=dtype_name)
    model = build_model(unquantized, precision)
    if not config.use_peft:
        model.to(dtype)
    weights.fill(source, config.seed, model, torch.device("cpu"))
    trained = {f"model.{name}": p.detach() for name, p in model.named_parameters() if p.requires_grad}
    dcp.load(trained, checkpoint_id=path, no_dist=True)

    def write(kind: str, net: Any) -> str:
        lm = causal_lm(net)
        lm.config.use_cache, lm.generation_config = True, source.plain.generation_config
        try:
            net.save_pretrained(folder / kind)
        except SafetensorError as error:  # it writes into a file, and has no errno
            shutil.rmtree(folder / kind, ignore_errors=True)  # a part of the weights, on a disk that is full
            raise SaveError(f"{folder / kind}: {error}") from error
        tokenizer.save_pretrained(folder / kind)
        return str(folder / kind)

    if not config.use_peft:
        return {"saved_model": write("model", model)}
    paths = {}
    if config.model_name_or_path.startswith("random:"):
        # Random weights exist nowhere else: save them, so that the adapter has a base model.
        base = source.plain.to(dtype)
        weights.fill(source, config.seed, base, torch.device("cpu"))
        paths["base"] = write("base", base)
        for adapter in model.peft_config.values():
            adapter.base_model_name_or_path = paths["base"]
    paths["adapter"] = write("adapter", model)
    if config.export_merged:
        paths["merged"] = write("merged", model.merge_and_unload().to(dtype))
    return paths


def _root(error: BaseException) -> str:
    """Return the first cause reported by the operating system or torch, in one line."""
    failures = getattr(error, "failures", None)  # DCP's CheckpointException: rank -> (error, traceback)
    if failures:
        rank, (inner, _) = next(iter(failures.items()))
        return f"rank {rank}: {type(inner).__name__}: {inner}".splitlines()[0]
    return f"{type(error).__name__}: {error}".splitlines()[0]
