"""The folder of a run, ``--out``: what it was started with, and what others load from it."""

import json
import os
from dataclasses import asdict
from pathlib import Path

from rtcwm.engine.checkpoint import replace_file
from rtcwm.errors import UserError
from rtcwm.lock import Locked, lock
from rtcwm.model.adapter_files import file_shape, save_adapter
from rtcwm.model.lora import Adapter

MAY_CHANGE = (
    "out", "save_every", "val_every", "max_skips", "attn", "compile", "adaln_dir", "joint_scores", "base_config",
    "adapter_config", "student_config", "critic_config", "clips", "base", "init_lora", "student_lora", "teacher_lora",
    "critic_lora",
)  # fmt: skip
"""Settings that a resumed run may change: they alter neither the data nor what is optimised. Files may move, since the
identity holds what is in them; of the adapter engines' files it holds all but the accumulation, which may change with
the number of ranks."""


RUN_FILES = ("state", "train_log.jsonl", "tensorboard")
"""What a run that has begun leaves besides its adapters."""

LOCKS: list = []
"""Open lock files of this process; the system lets go of them when it ends, however it ends."""


class RunFolder:
    """Paths of a run, and the checks that keep two runs out of one folder. Used on rank 0 alone."""

    def __init__(self, path: str):
        self.path = Path(path)

    def _lock(self) -> None:
        """Keeps other processes out of the folder for the life of this one.

        Raises:
            UserError: one is in it.
        """
        try:
            LOCKS.append(lock(self.path / ".lock"))
        except Locked as other:
            if other.holder == str(os.getpid()):
                return
            raise UserError(
                f"process {other.holder or '(unknown)'} is working in --out {self.path}: wait for it, end it (ranks "
                "may outlive a killed launcher), or choose another folder"
            ) from other

    def claim(self, settings: object, identity: dict) -> bool:
        """Records the run's settings, or holds them against those recorded.

        Args:
            settings: the program's dataclass; identity: what else decides the run (base, clips, adapter config).

        Returns:
            True when the folder already holds this run.

        Raises:
            UserError: it holds a run with other settings (each is named with both values), or other files.
        """
        wanted = json.loads(json.dumps({"settings": asdict(settings), "identity": identity}))
        file = self.path / "args.json"
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"--out {self.path} is a file; name a folder")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock()
        except OSError as error:
            raise UserError(f"cannot make or write --out {self.path}: {error}") from error
        begun = [p.name for p in self.path.iterdir() if p.name in RUN_FILES or p.suffix == ".safetensors"]
        if not file.is_file() or not begun:
            if begun:
                raise UserError(f"--out {self.path} holds {sorted(begun)} but no args.json; choose another folder")
            replace_file(file, lambda path: path.write_text(json.dumps(wanted, indent=1) + "\n"))
            return False
        try:
            found = json.loads(file.read_text())
        except json.JSONDecodeError as error:
            raise UserError(f"{file} is not readable ({error}); choose another --out") from error
        different = []
        for part in ("settings", "identity"):
            for key in sorted(set(wanted[part]) | set(found.get(part, {}))):
                old, new = found.get(part, {}).get(key), wanted[part].get(key)
                if old != new and not (part == "settings" and key in MAY_CHANGE):
                    different.append(f"  {key.replace('_', '-')}: {old} there, {new} now")
        if different:
            raise UserError(
                f"--out {self.path} holds a run with other settings:\n" + "\n".join(different) +
                "\nStart the command with the settings that are there to continue it, or choose another --out"
            )  # fmt: skip
        return True

    def write_json(self, name: str, value: object) -> None:
        replace_file(self.path / name, lambda path: path.write_text(json.dumps(value, indent=1) + "\n"))

    def write_adapter(self, name: str, adapter: Adapter, config: dict, metadata: dict[str, str]) -> Path:
        """An adapter file for users, complete or absent: written aside, read back against the base, then renamed."""
        target = self.path / name
        replace_file(
            target,
            write=lambda path: save_adapter(path, adapter, metadata),
            check=lambda path: file_shape(path, config),
        )
        return target
