"""A preparation from beginning to end: find the clips, leave out what is done, encode the rest on all processes.

Sources are hashed and their headers read before a model is loaded, so that a repeated command on finished clips takes
seconds and most refusals come at once; this process never imports the models' libraries unless it encodes itself. Each
worker process loads the models on a GPU of its own and takes the next clip when it is done with one. A clip's files
depend on its sources, the settings and the weights alone, so that any number of workers, and any number of
interruptions, end in the same files.
"""

import multiprocessing
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rtcwm.data.clips import open_clips
from rtcwm.errors import UserError
from rtcwm.prepare.folder import claim, finish, hash_sources, notes_if_done, open_folder
from rtcwm.prepare.jobs import Job, Models, Outcome
from rtcwm.prepare.report import Progress, Report
from rtcwm.prepare.settings import Settings, check_target, key_of
from rtcwm.prepare.sources import Refusal, Source, find, unread_keys
from rtcwm.prepare.video import shown_size
from rtcwm.prepare.weights import codec_identity, component, text_identity

if TYPE_CHECKING:
    from rtcwm.prepare.work import Encoders

START_METHOD = "spawn"  # a forked child cannot use a GPU that its parent has touched
READERS = 8  # threads that hash and read headers; the disk is the bound


def open_models(model: Path, vae: Path | None, text_encoder: Path | None, layer: int) -> Models:
    """Find the parts of a diffusers-format folder and name their weights; nothing is loaded."""
    folders = {
        "vae": component(model, "vae", vae),
        "text_encoder": component(model, "text_encoder", text_encoder),
        "tokenizer": component(model, "tokenizer", None),
        "processor": component(model, "processor", None),
    }
    text = text_identity(folders["text_encoder"], folders["tokenizer"], folders["processor"], layer)
    return Models(**folders, codec_identity=codec_identity(folders["vae"]), text_identity=text)


def run(
    out: Path,
    paths: Sequence[Path],
    root: Path | None,
    models: Models,
    settings: Settings,
    workers: int | None = None,
    device: str = "auto",
) -> tuple[Report, dict[str, Source]]:
    """Prepare all clips of the sources in `out`.

    Args:
        out: folder of clips.
        paths: folders and manifests; `root`: see :func:`rtcwm.prepare.sources.find`.
        workers: processes; one a GPU when absent.
        device: `cpu`, `cuda`, or `auto`.

    Returns:
        The report, written to `out` as well, and the sources of the clips that are there now, by id.

    Raises:
        UserError: nothing could be started.
    """
    sources, refused = find(list(paths), root)
    report, count = Report(refused=refused), len(sources) + len(refused)
    with open_folder(out):
        claim(out, {source.id for source in sources}, models, settings)
        jobs = plan(out, sources, models, settings, report)
        gpus = torch.cuda.device_count() if device != "cpu" else 0
        if device == "cuda" and not gpus:
            raise UserError(
                "--device cuda, but there is no GPU that PyTorch sees: use --device cpu, or mend the driver"
            )
        workers = max(1, min(workers or gpus or 1, len(jobs)))
        print(
            f"prepare: {count} clips found, {len(report.kept)} already there, "
            f"{len(report.refused)} refused so far, {len(jobs)} to prepare by {workers} process(es) on "
            f"{f'{gpus} GPU(s)' if gpus else 'the CPU'}"
        )
        if unread := unread_keys(sources):
            print(f"prepare: {unread}")
        try:
            encode_all(out, jobs, models, settings, workers, gpus, report)
        finally:
            finish_report(out, report, models, settings)
    done = {*report.prepared, *report.kept}
    return report, {source.id: source for source in sources if source.id in done}


def finish_report(out: Path, report: Report, models: Models, settings: Settings) -> None:
    """The manifest and the report; whatever is wrong with the folder as a whole stops being silent here."""
    try:
        finish(out, models.codec_identity)
        if report.prepared or report.kept:
            open_clips(out)
            claim(out, set(), models, settings)  # the earlier version of a refused clip may have been made otherwise
    except (UserError, OSError) as fault:
        report.stopped = report.stopped or str(fault)
    report.write(
        out, settings=settings.stored(), codec=dict(models.codec_identity), text_encoder=dict(models.text_identity)
    )


def plan(out: Path, sources: list[Source], models: Models, settings: Settings, report: Report) -> list[Job]:
    """Jobs of the clips that are not done; the others go into the report."""

    def look(source: Source) -> tuple[dict[str, str], tuple[int, int]] | UserError | OSError:
        try:
            size = settings.size or shown_size(source.target)
            check_target(size, source.target)
            return hash_sources(source), size
        except (UserError, OSError) as fault:
            return fault

    with ThreadPoolExecutor(READERS) as pool:
        seen = dict(zip((source.id for source in sources), pool.map(look, sources), strict=True))
    sizes = Counter(found[1] for found in seen.values() if isinstance(found, tuple))
    usual = max(sizes, key=lambda size: (sizes[size], size), default=None)
    jobs = []
    for source in sources:
        try:
            found = seen[source.id]
            if not isinstance(found, tuple):
                raise found
            hashes, size = found
            if size != usual:
                raise UserError(
                    f"{source.target} is {size[1]}x{size[0]}, but {sizes[usual]} of {sizes.total()} clips are "
                    f"{usual[1]}x{usual[0]}: prepare one size into one folder, or scale with --size"
                )
            key = key_of(settings, hashes, models.codec_identity, models.text_identity, size)
            notes = notes_if_done(out, source.id, key)
            if notes is None:
                jobs.append(Job(source, hashes, key, size, source.target.stat().st_size))
            else:
                report.kept.append(source.id)
                report.note(source.id, notes)
        except (UserError, OSError) as fault:
            refuse(report, out, source, str(fault))
    return jobs


def refuse(report: Report, out: Path, source: Source, reason: str) -> None:
    """Note a refusal; what was prepared of the clip before is not touched."""
    stays = "; its earlier version stays" if (out / source.id).is_dir() else ""
    report.refused.append(Refusal(source.id, source.origin, reason + stays))


def encode_all(
    out: Path, jobs: list[Job], models: Models, settings: Settings, workers: int, gpus: int, report: Report
) -> None:
    """Prepare the clips, filling the report; a full disk or a dead worker ends it early and is told there."""
    if not jobs:
        return
    progress = Progress({job.source.id: job.weight for job in jobs})
    sources = {job.source.id: job.source for job in jobs}
    given = out, jobs, models, settings, gpus
    try:
        for outcome in spread(*given, workers) if workers > 1 else alone(*given):
            progress.step(outcome.clip)
            if outcome.reason is not None:
                refuse(report, out, sources[outcome.clip], outcome.reason)
                report.traces |= {outcome.clip: outcome.trace} if outcome.trace else {}
            else:
                report.prepared.append(outcome.clip)
                report.note(outcome.clip, outcome.notes)
    except UserError as fault:  # a full disk, or models that cannot be loaded
        report.stopped = str(fault)
    except BrokenProcessPool:
        report.stopped = (
            "a worker process died, most likely for lack of host memory; start the same command again with fewer "
            "--workers"
        )
    except torch.OutOfMemoryError as fault:
        report.stopped = f"the GPU is full ({str(fault).splitlines()[0]}); free it, or use one with more memory"
    except KeyboardInterrupt:
        report.stopped, report.interrupted = "interrupted; the same command goes on from here", True
    if report.stopped:
        count_finished(out, jobs, report)
        report.stopped += f" ({len(report.prepared) + len(report.kept)} clips are whole and stay)"


def count_finished(out: Path, jobs: list[Job], report: Report) -> None:
    """Put into the report what workers finished after the preparation stopped."""
    told = {*report.prepared, *(refusal.clip for refusal in report.refused)}
    for job in jobs:
        notes = None if job.source.id in told else notes_if_done(out, job.source.id, job.key)
        if notes is not None:
            report.prepared.append(job.source.id)
            report.note(job.source.id, notes)


def device_of(index: int, gpus: int) -> torch.device:
    """Device of the worker of that number."""
    return torch.device("cuda", index % gpus) if gpus else torch.device("cpu")


def alone(out: Path, jobs: list[Job], models: Models, settings: Settings, gpus: int) -> Iterator[Outcome]:
    """Prepare clips in this process."""
    from rtcwm.prepare.work import Encoders, attempt

    encoders = Encoders(models, settings, device_of(0, gpus))
    for job in jobs:
        yield attempt(out, job, encoders)


WORKER: list["Encoders | Exception"] = []
"""The models of a worker process, or why they could not be loaded."""


def spread(
    out: Path, jobs: list[Job], models: Models, settings: Settings, gpus: int, workers: int
) -> Iterator[Outcome]:
    """Prepare clips on worker processes, yielding each as it is done."""
    context = multiprocessing.get_context(START_METHOD)
    threads = max(1, len(os.sched_getaffinity(0)) // workers)
    given = (context.Value("i", 0), models, settings, gpus, threads)
    with ProcessPoolExecutor(workers, context, start_worker, given) as pool:
        # Workers are born with Ctrl-C blocked, also while they import; here it waits until all are.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        futures = [pool.submit(work, out, job) for job in sorted(jobs, key=lambda job: -job.weight)]
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def start_worker(counter, models: Models, settings: Settings, gpus: int, threads: int) -> None:
    """Load the models of a worker, and tie its life to its parent's: a worker that outlived a killed parent would hold
    its GPU and write into a folder that is no longer locked."""
    threading.Thread(target=leave_with_parent, daemon=True).start()
    # Ctrl-C reaches all processes: the parent hands out no further clip, workers finish theirs.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from rtcwm.prepare.work import Encoders

    torch.set_num_threads(threads)
    with counter.get_lock():
        index, counter.value = counter.value, counter.value + 1
    try:
        WORKER.append(Encoders(models, settings, device_of(index, gpus)))
    except Exception as fault:  # raised by the first clip: a pool tells nothing of an initializer's fault
        WORKER.append(fault)


def leave_with_parent() -> None:
    wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


def work(out: Path, job: Job) -> Outcome:
    from rtcwm.prepare.work import attempt

    if isinstance(WORKER[0], Exception):
        raise WORKER[0]
    return attempt(out, job, WORKER[0])
