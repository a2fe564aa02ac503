"""Host memory that is free for a process, by control groups as the kernel lays them out."""

from pathlib import Path

import psutil
import pytest

from rtcwm.engine.host import GIB, check_host_room, free_bytes
from rtcwm.errors import UserError


def group(folder: Path, limit: str, used: int, cache: int, version: int) -> None:
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in zip(names, (limit, used), strict=True):
        (folder / name).write_text(f"{text}\n")
    kind = "" if version == 2 else "total_"
    lines = ("anon 5", f"{kind}inactive_file {cache // 2}", f"{kind}active_file {cache - cache // 2}", f"{kind}file 9")
    (folder / "memory.stat").write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("version", [1, 2])
def test_the_tightest_group_counts(tmp_path, version):
    process, mounts = tmp_path / "cgroup", tmp_path / "mounts"
    top = mounts if version == 2 else mounts / "memory"
    process.write_text("0::/job/step\n" if version == 2 else "9:name=systemd:/\n4:cpu,memory:/job/step\n0::/\n")
    top.mkdir(parents=True)
    machine = psutil.virtual_memory().total
    assert GIB / 10 < free_bytes(process, mounts) <= machine, "no limit: what the machine has"
    group(top / "job/step", "max" if version == 2 else str(2**63 - 4096), 100, 20, version)
    assert GIB / 10 < free_bytes(process, mounts) <= machine
    group(top / "job", "1000", 300, 50, version)
    assert free_bytes(process, mounts) == 1000 - 300 + 50, "a group around it, whose cache gives way"
    group(top / "job/step", "500", 100, 20, version)
    assert free_bytes(process, mounts) == 500 - 100 + 20
    group(top / "job/step", "500", 600, 20, version)
    assert free_bytes(process, mounts) == 0
    # A container that sees its own group as the topmost, under a path that is not there.
    process.write_text(process.read_text().replace("/job/step", "/elsewhere"))
    group(top, "700", 100, 0, version)
    assert free_bytes(process, mounts) == 600


def test_no_control_groups(tmp_path):
    assert free_bytes(tmp_path / "none", tmp_path) > GIB / 10


def test_what_does_not_fit_is_refused():
    free = check_host_room(1, "a byte", "")
    with pytest.raises(
        UserError, match="a pebibyte takes 1048576.0 GiB of host memory, and .* GiB are free.*: buy less"
    ):
        check_host_room(2**50, "a pebibyte", "buy less")
    assert free > GIB / 10
    assert check_host_room(0, "nothing", "") > 0
