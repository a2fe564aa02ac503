"""`rtcwm stream` from its flags to a finished film."""

import json
import signal
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from rtcwm.engine import memory
from rtcwm.engine.checkpoint import replace_file
from rtcwm.engine.device import machine
from rtcwm.errors import INTERRUPTED, UserError
from rtcwm.model.cache import STEADY
from rtcwm.model.layout import CHUNK_SECONDS, CLIP_FRAMES, PIXELS_PER_LATENT
from rtcwm.stream.command import Settings
from rtcwm.stream.film import GrowingFilm
from rtcwm.stream.live import LiveStream
from rtcwm.stream.origin import ClipOrigin
from rtcwm.stream.plan import Plan, prepare
from rtcwm.stream.proxies import ClipProxies, RootProxies


@dataclass(frozen=True)
class Lap:
    """Seconds of one chunk. `proxy`: reading and encoding it, without the wait for its files, which is `waited`.
    Decoded and written are the frames that came, of this chunk or of the one before."""

    chunk: int
    proxy: float
    denoise: float
    decode: float
    write: float
    waited: float

    @property
    def seconds(self) -> float:
        """What the chunk took, without waiting."""
        return self.proxy + self.denoise + self.decode + self.write


class Stop:
    """Whether a signal asked the stream to end."""

    def __init__(self) -> None:
        self.asked = False

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM end the stream after its chunk; a second one ends the process at once."""

        def on_signal(number: int, _frame: object) -> None:
            if self.asked:
                raise SystemExit(128 + number)
            self.asked = True

        former = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)


def stream(settings: Settings) -> int:
    """Makes the film, prints the seconds of its chunks and writes the report; the exit code.

    Raises:
        UserError: what does not fit, before a weight is read; or the disk refused.
    """
    plan, stop = prepare(settings), Stop()
    proxies = open_proxies(settings, plan, stop)
    height, width = (PIXELS_PER_LATENT * side for side in plan.origin.size)
    film = GrowingFilm(settings.out, height, width, settings.overwrite)
    try:
        length = f"{proxies.chunks} chunks" if proxies.chunks else "as long as proxies come"
        print("\n".join([*plan.lines(), f"film: {settings.out}, {width}x{height}, {length}"]), flush=True)
        memory.reset_peaks(plan.device)
        with plan.load() as live, stop.heard():
            late = live.late * CHUNK_SECONDS
            print(f"frames follow their proxies by {late:.3f} s; a chunk plays {CHUNK_SECONDS:.3f} s", flush=True)
            laps, last = run(plan, live, proxies, film, stop)
    except BaseException:
        film.close()
        raise
    note = film.finish()
    if not film.frames:
        raise UserError(f"no whole chunk of proxies came: {proxies.note or 'the stream was stopped'}")
    for line in (proxies.note, note, *summary(settings, laps, last, film, stop)):
        if line:
            print(line, flush=True)
    if settings.report:
        result = report(settings, plan, laps, last, film, stop)
        replace_file(settings.report, lambda path: path.write_text(json.dumps(result, indent=1) + "\n"))
    return INTERRUPTED if stop.asked else 0


def open_proxies(settings: Settings, plan: Plan, stop: Stop) -> ClipProxies | RootProxies:
    """Where the stream's proxies come from."""
    if isinstance(plan.origin, ClipOrigin):
        return ClipProxies(plan.origin.clip, plan.origin.start, settings.chunks)
    geometry = plan.origin.geometry
    size = (PIXELS_PER_LATENT * geometry.proxy_height, PIXELS_PER_LATENT * geometry.proxy_width)
    follow = settings.follow_seconds if settings.follow else None
    return RootProxies(settings.conditions, size, settings.chunks, follow, lambda: stop.asked)


def run(
    plan: Plan, live: LiveStream, proxies: ClipProxies | RootProxies, film: GrowingFilm, stop: Stop
) -> tuple[list[Lap], Lap]:
    """Chunk by chunk until the proxies end or a signal asks; the seconds of every chunk, and of what came after it."""
    laps: list[Lap] = []
    began, waited = time.perf_counter(), proxies.waited
    for proxy in proxies:
        reading, waited = time.perf_counter() - began, proxies.waited - waited
        frames, took = live.next(proxy), live.took
        wrote = timed_write(film, frames)
        laps.append(Lap(len(laps), reading - waited + took.proxy, took.denoise, took.decode, wrote, waited))
        print(line(laps, memory.peak_gib(plan.device)), flush=True)
        if stop.asked:
            break
        began, waited = time.perf_counter(), proxies.waited
    frames, took = live.finish(), live.took
    return laps, Lap(len(laps), 0.0, 0.0, took.decode, timed_write(film, frames), 0.0)


def timed_write(film: GrowingFilm, frames) -> float:
    """Seconds that the frames took to be on disk."""
    began = time.perf_counter()
    film.write(frames)
    return time.perf_counter() - began


def line(laps: list[Lap], peak: float) -> str:
    """The last chunk in words; `peak` memory in GiB."""
    lap = laps[-1]
    mean = steady(laps)
    told = f"steady {mean:.3f} s" if mean else f"steady from chunk {STEADY} on"
    waited = f", waited {lap.waited:.1f} s" if lap.waited > 0.05 else ""
    return (
        f"chunk {lap.chunk}: {lap.seconds:.3f} s (proxy {lap.proxy:.3f}, denoise {lap.denoise:.3f}, decode "
        f"{lap.decode:.3f}, write {lap.write:.3f}{waited}), {CHUNK_SECONDS / lap.seconds:.2f} x real time; {told}; "
        f"peak {peak:.2f} GiB"
    )


def steady(laps: list[Lap]) -> float | None:
    """Mean seconds of the chunks whose window was full and slid, None while there are none."""
    seconds = [lap.seconds for lap in laps if lap.chunk >= STEADY]
    return statistics.mean(seconds) if seconds else None


def summary(settings: Settings, laps: list[Lap], last: Lap, film: GrowingFilm, stop: Stop) -> list[str]:
    """What is printed at the end."""
    took = sum(lap.seconds for lap in laps) + last.seconds
    plays = film.frames / CLIP_FRAMES * CHUNK_SECONDS
    mean = steady(laps)
    pace = f"; steady {mean:.3f} s a chunk, {CHUNK_SECONDS / mean:.2f} x real time" if mean else ""
    stopped = "stopped after a chunk, as asked; " if stop.asked else ""
    return [
        f"{stopped}{settings.out}: {len(laps)} chunks, {film.frames} frames, {plays:.1f} s, made in {took:.1f} s "
        f"({plays / took:.2f} x real time){pace}"
    ]


def report(settings: Settings, plan: Plan, laps: list[Lap], last: Lap, film: GrowingFilm, stop: Stop) -> dict:
    """What the JSON file holds."""
    mean = steady(laps)
    return {
        "machine": machine(plan.device),
        "out": str(settings.out),
        "base": {"description": plan.source.description, "fingerprint": plan.source.fingerprint},
        "adapter": plan.adapter,
        "kind": plan.kind,
        "sampling": asdict(plan.sampling),
        "start": plan.origin.line(),
        "seed": settings.seed,
        "attention": plan.kernel.why,
        "height": film.height,
        "width": film.width,
        "frames": film.frames,
        "stopped": stop.asked,
        "chunk_plays": CHUNK_SECONDS,
        "chunks": [asdict(lap) | {"seconds": lap.seconds} for lap in laps],
        "last_frames": {"decode": last.decode, "write": last.write},
        "steady": {"from_chunk": STEADY, "seconds_a_chunk": mean, "speed": CHUNK_SECONDS / mean} if mean else None,
        "peak": memory.peaks(plan.device).row(),
    }
