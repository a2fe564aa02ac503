"""The obvious iteration of distribution matching: kept to measure against. Plain torch, nothing parked, teacher and
critic in passes of their own."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rtcwm.bench.plain import PlainModel, noise_to, optimizer_of, update
from rtcwm.model.layout import REFERENCE_TIME
from rtcwm.model.lora import Adapter
from rtcwm.model.masks import Rule, groups
from rtcwm.model.packing import Window

NORMALISER_FLOOR = 1e-3


@dataclass
class PlainDistillation:
    """Three adapters on one base, and the optimizers of two.

    Args:
        released: the teacher's window is bidirectional in stock order; else it is a span under the causal rule.
    """

    model: PlainModel
    student: Adapter
    teacher: Adapter | None
    critic: Adapter
    released: bool
    rule: Rule
    optimizer: dict
    clipping: float

    def __post_init__(self) -> None:
        self.student_optimizer = optimizer_of(self.student, self.optimizer)
        self.critic_optimizer = optimizer_of(self.critic, self.optimizer)

    def velocity(
        self, adapter: Adapter | None, window: Window, noises: tuple[Tensor, Tensor, Tensor], sigma: float
    ) -> Tensor:
        """Velocity [B, 24, T, h, w] of a clean window noised to one level; ``noises`` of target, proxy, Picture 1."""
        reference = min(sigma, 1 - REFERENCE_TIME) if self.released else 1 - REFERENCE_TIME
        noisy = replace(
            window,
            video=noise_to(window.video, noises[0], sigma),
            proxy=noise_to(window.proxy, noises[1], reference),
            picture1=noise_to(window.picture1, noises[2], reference),
        )
        layout = window.layout(stream=not self.released)
        calls = None if self.released else groups(layout, self.rule)
        time = torch.tensor(1 - sigma, device=window.video.device)
        times = time if self.released else time.expand(layout.chunks)
        text_time = "video" if self.released else "pinned"
        return self.model.velocity(adapter, noisy, layout, times, calls, text_time)

    @torch.no_grad()
    def scores(self, window: Window, noises: tuple[Tensor, Tensor, Tensor], sigma: float) -> tuple[Tensor, Tensor]:
        """Clean predictions of teacher and critic."""
        noisy = noise_to(window.video, noises[0], sigma)
        real = noisy + sigma * self.velocity(self.teacher, window, noises, sigma)
        return real, noisy + sigma * self.velocity(self.critic, window, noises, sigma)

    def student_loss(self, clean: Tensor, scores: Sequence[tuple[Tensor, Tensor]], live: int) -> Tensor:
        """Distribution matching on the window's last ``live`` latents, which carry a graph."""
        with torch.no_grad():
            differences = []
            for real, fake in scores:
                size = (clean - real).abs().mean(dim=(1, 2, 3, 4), keepdim=True).clamp(min=NORMALISER_FLOOR)
                differences.append((fake - real) / size)
            target = clean - torch.stack(differences).mean(dim=0)
        return 0.5 * (clean - target)[:, :, -live:].square().mean()

    def update_student(self, loss: Tensor, lr: float) -> float:
        return update(self.student, self.student_optimizer, loss, lr, self.clipping)

    def update_critic(
        self, window: Window, noises: tuple[Tensor, Tensor, Tensor], sigma: float, lr: float
    ) -> tuple[Tensor, float]:
        """One step of flow matching; returns its loss and the norm of its gradient."""
        predicted = self.velocity(self.critic, window, noises, sigma)
        loss = (predicted - (window.video - noises[0])).square().mean()
        return loss.detach(), update(self.critic, self.critic_optimizer, loss, lr, self.clipping)
