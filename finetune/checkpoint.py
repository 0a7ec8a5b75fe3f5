"""Atomic checkpoints that load into any layout; exports of adapters and merged models.

Surface: `torch.distributed.checkpoint` (DCP). A checkpoint is written asynchronously in a draft folder and renamed when
the parts of all ranks are on disk. `checkpoint-<step>/` contains DCP's files and trainer.json. Only trained weights are
stored; frozen weights are read from the model again.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import os
import shutil
import threading
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import nn

from contracts.job_config import ConfigError, EndedError, JobConfig
from finetune import weights
from finetune.model import build_model, causal_lm, stored_type

SCHEMA_VERSION = 1
# For ranks that wait while others download, read, tokenise or write. NCCL's own limit of 10 minutes applies to steps
# and to the groups of the mesh. The death of a rank is detected through its connection, not by this timeout.
WAIT = timedelta(hours=1)
MOMENTS = ("exp_avg", "exp_avg_sq")
SAMPLE_BYTES = 1 << 20  # at each end of a weights file
FILE_BYTES = 2 << 30  # per exported file: memory of a rank while it writes
FULL_BYTES = 16 << 20  # free space below which a disk is full: a last piece that did not fit leaves up to this much


class SaveError(EndedError):
    """A checkpoint could not be written; earlier checkpoints are complete."""

    code = 74  # EX_IOERR


def training_state(named: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return trained weights and their AdamW moments, under names that do not depend on the layout."""
    state: dict[str, torch.Tensor] = {}
    for name, p in named.items():
        if p.requires_grad:
            state[f"model.{name}"] = p.detach()
            state |= {f"optim.{name}.{m}": optimizer.state[p][m] for m in MOMENTS}
    return state


def start_moments(named: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, step: int) -> None:
    """Create AdamW's state after `step` steps, with zero moments to load into."""
    for p in named.values():
        if p.requires_grad:
            optimizer.state[p] = {
                "step": torch.tensor(float(step), device=p.device),
                **{m: torch.zeros_like(p) for m in MOMENTS},
            }


class Checkpoints:
    """The checkpoints of one output folder; at most one is written at a time."""

    def __init__(self, folder: Path, keep: int | None) -> None:
        self.folder, self.keep = folder, keep
        self.rank = dist.get_rank()
        # A separate group: collectives of the writer thread must not mix with those of the training.
        self.group = dist.new_group(backend="gloo", timeout=WAIT)
        self.pending: Future[Any] | None = None
        self.error: BaseException | None = None
        self.published = threading.Event()
        if self.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            for leftover in folder.glob(".checkpoint-*"):
                shutil.rmtree(leftover, ignore_errors=True)
        dist.barrier(group=self.group)

    def save(self, step: int, state: Mapping[str, torch.Tensor], about: Mapping[str, Any]) -> None:
        """Start writing; return after the values are copied."""
        self.finish()
        draft, final = self.folder / f".checkpoint-{step}", self.folder / f"checkpoint-{step}"
        if final.exists():
            return
        # DCP copies GPU tensors to the host before it returns, but not host tensors: these are copied here, because the
        # next step changes them in place.
        copied = {name: t.clone() if t.device.type == "cpu" else t for name, t in state.items()}
        try:
            saving = dcp.async_save(copied, checkpoint_id=draft, process_group=self.group)
        except Exception as error:
            raise SaveError(f"checkpoint-{step}: {_root(error)}") from error
        self.pending = saving if isinstance(saving, Future) else saving.upload_completion
        if self.rank == 0:
            # Rank 0 coordinates: when its part is done, the parts of all ranks are.
            self.published.clear()
            self.pending.add_done_callback(lambda done: self._publish(done, draft, final, {**about, "step": step}))

    def _publish(self, done: Future[Any], draft: Path, final: Path, about: Mapping[str, Any]) -> None:
        try:
            if error := done.exception():
                self.error = self._with_room(error)
                shutil.rmtree(draft, ignore_errors=True)
                return
            with (draft / "trainer.json").open("w") as file:
                json.dump({"schema_version": SCHEMA_VERSION, **about}, file)
                file.flush()
                os.fsync(file.fileno())
            draft.rename(final)
            _sync_folder(self.folder)
            for old in list_checkpoints(self.folder)[: -self.keep] if self.keep else ():
                shutil.rmtree(old, ignore_errors=True)
        except OSError as error:
            self.error = self._with_room(error)
            shutil.rmtree(draft, ignore_errors=True)
        finally:
            self.published.set()

    def _with_room(self, error: BaseException) -> SaveError:
        """Return the error, with the cause if the disk is full, which torch does not report; the draft still exists."""
        room = shutil.disk_usage(self.folder).free
        full = "is full" if room < FULL_BYTES else f"has {room >> 20} MiB left"
        return SaveError(f"the disk of {self.folder} {full} ({_root(error)})")

    def failed(self) -> bool:
        """Return whether the current write is known to have failed, without waiting."""
        ended = self.pending is not None and self.pending.done()
        return self.error is not None or (ended and self.pending.exception() is not None)  # type: ignore[union-attr]

    def finish(self) -> None:
        """Wait for the current write on every rank. Raises SaveError if it failed."""
        problem: BaseException | None = None
        if self.pending is not None:
            problem = self.pending.exception()
            self.pending = None
            if self.rank == 0:
                self.published.wait()  # a future's callbacks may run after its waiters wake up
        problem = self.error or problem
        bad = torch.tensor([float(problem is not None)])
        dist.all_reduce(bad, group=self.group)
        if bad.item():
            raise SaveError(f"checkpoint not written: {_root(problem) if problem else 'another rank failed'}")

    def load(self, path: Path, state: Mapping[str, torch.Tensor]) -> None:
        """Read into the given tensors, independent of the layout that wrote the checkpoint."""
        try:
            dcp.load(dict(state), checkpoint_id=path, process_group=self.group)
        except Exception as error:
            raise ConfigError(f"resume_from_checkpoint: {path} does not fit this model: {_root(error)}") from error


def list_checkpoints(folder: Path) -> list[Path]:
    """Return complete checkpoints, oldest first."""
    found = [p for p in folder.glob("checkpoint-*") if p.name[11:].isdigit() and (p / "trainer.json").is_file()]
    return sorted(found, key=lambda p: int(p.name[11:]))


def find_resume(config: JobConfig) -> Path | None:
    """Return the checkpoint to resume from: "auto" and true take the newest, a path that one."""
    wanted = config.resume_from_checkpoint
    newest = next(reversed(list_checkpoints(Path(config.output_dir))), None)
    if wanted == "auto" or (wanted is True and newest is not None):
        return newest
    if wanted is True:
        raise ConfigError(f"resume_from_checkpoint=true: no checkpoint in {config.output_dir}")
    path = Path(str(wanted)) if wanted else None
    if path is not None and not (path / "trainer.json").is_file():
        raise ConfigError(f"resume_from_checkpoint={wanted!r}: not a checkpoint (no trainer.json)")
    if newest is not None and (path is None or path.resolve() != newest.resolve()):
        # Two runs in one folder would each resume from the other's newest checkpoint.
        raise ConfigError(f"resume_from_checkpoint={wanted!r}: {newest} is newer; go on from it, or set output_dir")
    return path


def base_of(config: JobConfig) -> str | None:
    """Return the weights that the model's name refers to: the hub commit (`hub.pin`), or a fingerprint of the folder.

    None for random weights, which depend on the seed. Rank 0 reads it for all.
    """
    found: list[str | None] = [None]
    name = config.model_name_or_path
    if dist.get_rank() == 0 and not name.startswith("random:"):
        folder = Path(name).expanduser()
        found = [f"folder {fingerprint(folder)}" if folder.is_dir() else f"commit {config.model_revision}"]
    dist.broadcast_object_list(found, src=0)
    return found[0]


def fingerprint(folder: Path) -> str:
    """Fingerprint the weights in a folder: name, size, beginning and end of each file, and config.json.

    The beginning holds the tensors' names and shapes. Further training changes all values, those at the end too.
    """
    seen = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            start, size = file.read(SAMPLE_BYTES), path.stat().st_size
            file.seek(max(0, size - SAMPLE_BYTES))
            seen.update(f"{path.name} {size}\n".encode() + start + file.read())
    config = folder / "config.json"
    seen.update(config.read_bytes() if config.is_file() else b"")
    return seen.hexdigest()[:16]


def check_identity(path: Path, was: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Reject a checkpoint of another run."""
    for name, value in now.items():
        if name != "base" and was.get(name) != value:
            raise ConfigError(f"resume_from_checkpoint: {path} has {name}={was.get(name)!r}, this run has {value!r}")
    before, today = str(was.get("base")), now.get("base")
    if today not in (None, before):
        again = f"set model_revision={before.removeprefix('commit ')}" if before.startswith("commit ") else "restore it"
        raise ConfigError(
            f"resume_from_checkpoint: {path} was trained on {now['model']} ({before}), which is {today} now; {again}, "
            "or set output_dir"
        )


def export(config: JobConfig, precision: str, path: Path, tokenizer: Any) -> dict[str, str]:
    """Export an adapter (or whole model) in Hugging Face format from a checkpoint; every rank writes some of the files.

    Each file is created separately from the stored weights of the trained model and the base, so no rank needs more
    memory than the tensors of one file.
    """
    folder = Path(config.output_dir)
    source = weights.source_of(config)
    stored = source.dtype or stored_type(config, precision)
    wanted = stored if config.dtype == "auto" else stored_type(dataclasses.replace(config, use_peft=True), precision)
    if not config.use_peft:
        _write_model(folder / "model", source.plain, wanted, lambda name: _load(path, name, source.plain, wanted))
        _save_tokenizer(folder / "model", tokenizer)
        return {"saved_model": str(folder / "model")}
    model = build_model(dataclasses.replace(config, load_in_4bit=False), precision)
    for p in model.parameters():
        if p.requires_grad:
            torch.utils.swap_tensors(p, nn.Parameter(torch.empty_like(p, device="cpu")))
    trained = {f"model.{n}": p.detach() for n, p in model.named_parameters() if p.requires_grad}
    _read(path, trained)
    made = {"adapter": str(folder / "adapter")}
    if config.model_name_or_path.startswith("random:"):
        # Random weights exist nowhere else: save them, so that the adapter has a base model.
        made["base"] = str(folder / "base")
        _write_model(folder / "base", source.plain, wanted, source.read)
        for one in model.peft_config.values():
            one.base_model_name_or_path = made["base"]
    if dist.get_rank() == 0:
        model.save_pretrained(folder / "adapter")
    _save_tokenizer(folder / "adapter", tokenizer)
    if config.export_merged:  # merge into the original weights: in 4 bits an adapter would mostly be lost by rounding
        made["merged"] = str(folder / "merged")
        _write_model(folder / "merged", source.plain, wanted, lambda name: _merged(model, name, source))
        _save_tokenizer(folder / "merged", tokenizer)
    return made


def _read(path: Path, state: dict[str, torch.Tensor]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # one process reads alone on purpose
        dcp.load(state, checkpoint_id=path, no_dist=True)


def _load(path: Path, name: str, plain: Any, dtype: torch.dtype) -> torch.Tensor:
    value = torch.empty_like(plain.get_parameter(name), device="cpu", dtype=dtype)
    _read(path, {f"model.{name}": value})
    return value


def _merged(model: Any, name: str, source: weights.Source) -> torch.Tensor:
    """Return one weight of the base with its adapter added, or the trained weight."""
    path, _, key = name.rpartition(".")
    module = causal_lm(model).get_submodule(path)
    if hasattr(module, "modules_to_save"):
        trained: torch.Tensor = module.modules_to_save["default"].get_parameter(key).detach()
        return trained
    value = source.read(name)
    while getattr(module, "parameter_name", key) != key:  # PEFT wraps a module with two adapted weights twice
        module = module.base_layer
    if hasattr(module, "parameter_name"):  # stacked experts, or a router: one matrix for the factors of all experts
        a, b = (getattr(module, f"lora_{x}")["default"].weight.detach().float() for x in "AB")
        count = module.num_experts
        added = torch.einsum("ore,eri->eoi", b.reshape(len(b), -1, count), a.reshape(count, -1, a.shape[-1]))
        return value.float() + module.scaling["default"] * added.reshape(value.shape)
    if hasattr(module, "get_delta_weight") and key == "weight":
        with torch.no_grad():
            return value.float() + module.get_delta_weight("default").float()
    return value


def _write_model(folder: Path, plain: Any, dtype: torch.dtype, read: Callable[[str], torch.Tensor]) -> None:
    """Write weights in files of at most FILE_BYTES, this rank's share of them, with their index and config.json.

    `plain` is the model without values; `read` returns one complete weight.
    """
    folder.mkdir(parents=True, exist_ok=True)
    owners: dict[str, str] = {}
    shapes: dict[str, torch.Tensor] = {}
    for name, p in plain.named_parameters():  # of tied weights only the first
        for part, like in weights.stored_as(plain, name, p.detach().to(dtype)).items():
            owners[part], shapes[part] = name, like
    split = split_torch_state_dict_into_shards(shapes, max_shard_size=FILE_BYTES)
    for number, (file, parts) in enumerate(split.filename_to_tensors.items()):
        if number % dist.get_world_size() != dist.get_rank():
            continue
        tensors: dict[str, torch.Tensor] = {}
        for name in dict.fromkeys(owners[part] for part in parts):
            found = weights.stored_as(plain, name, read(name).to(dtype))
            tensors |= {part: value.contiguous() for part, value in found.items() if part in parts}
        save_file(tensors, folder / file, metadata={"format": "pt"})
    if dist.get_rank() == 0:
        if split.is_sharded:
            index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
        shape = copy.deepcopy(plain.config)
        shape.use_cache, shape.dtype, shape.architectures = True, dtype, [type(plain).__name__]
        shape.save_pretrained(folder)
        plain.generation_config.save_pretrained(folder)


def _save_tokenizer(folder: Path, tokenizer: Any) -> None:
    if dist.get_rank() == 0:
        tokenizer.save_pretrained(folder)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _root(error: BaseException) -> str:
    """Return the first cause reported by the operating system or torch, in one line."""
    failures = getattr(error, "failures", None)  # DCP's CheckpointException: rank -> (error, traceback)
    if failures:
        rank, (inner, _) = next(iter(failures.items()))
        return f"rank {rank}: {type(inner).__name__}: {inner}".splitlines()[0]
    kind = "" if isinstance(error, SaveError) else f"{type(error).__name__}: "
    return f"{kind}{error}".splitlines()[0]
