"""The training loop: steps that depend on (seed, step) alone, checkpoints, exact resume, a held-out curve."""

import copy
import json
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from torch import nn

from treegraft.errors import RequestError
from treegraft_plugins.hf.loading import without_progress_bars
from treegraft_plugins.hf.training.corpus import Report
from treegraft_plugins.options import number, whole

STATE = "training.pt"
CURVE = "curve.jsonl"


@attrs.frozen(kw_only=True)
class Schedule:
    """How long to train, and how often to look.

    Args:
        steps: optimiser steps in all.
        learning_rate: of the matrices, under Muon; everything else learns at a fifth of it, under AdamW.
        warm_up: steps of a linear warm-up; the second half of all decays linearly to 2 %.
        measure_every: steps between held-out measurements.
        save_every: steps between checkpoints.
        seed: of initialisation, windows and anchors.
    """

    steps: int = attrs.field(default=2000, validator=whole(1))
    learning_rate: float = attrs.field(default=0.02, validator=number(1e-6))
    warm_up: int = attrs.field(default=20, validator=whole(1))
    measure_every: int = attrs.field(default=200, validator=whole(1))
    save_every: int = attrs.field(default=200, validator=whole(1))
    seed: int = attrs.field(default=0, validator=whole(0))

    def factor(self, step: int) -> float:
        """Of the learning rate."""
        progress = step / self.steps
        decay = 1.0 if progress < 0.5 else max(0.02, 2 * (1 - progress))
        return min(1.0, (step + 1) / self.warm_up) * decay

    def rng(self, step: int) -> np.random.Generator:
        """The randomness of one step, whatever came before: what makes resuming exact."""
        return np.random.default_rng((self.seed, step))


class Muon(torch.optim.Optimizer):
    """Momentum orthogonalised by Newton-Schulz in float32 (torch's own runs it in bfloat16, slow on a CPU).

    Source: Jordan et al. 2024.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                momentum = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                momentum.mul_(0.95).add_(weight.grad)
                update = _orthogonal(weight.grad.add(momentum, alpha=0.95))
                weight.add_(update, alpha=-group["lr"] * max(1, weight.shape[0] / weight.shape[1]) ** 0.5)


def _orthogonal(update: torch.Tensor) -> torch.Tensor:
    """The nearest matrix with orthonormal rows or columns, roughly."""
    tall = update.shape[0] > update.shape[1]
    x = update.T if tall else update
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if tall else x


@attrs.define(eq=False)
class Trainer:
    """Trains one drafter's network.

    Args:
        model: in float32; saved with its own `save_pretrained`.
        loss: of a step, from its randomness.
        measure: held-out figures by name.
        schedule: how long, and how often to look.
        settings: what the training data and the loss depend on; a checkpoint made with others is refused.
        out: the folder for the checkpoint, the curve and the finished model.
        report: where lines of progress go.
    """

    model: nn.Module
    loss: Callable[[np.random.Generator], torch.Tensor]
    measure: Callable[[], Mapping[str, float]]
    schedule: Schedule
    settings: Mapping[str, Any]
    out: Path
    report: Report
    _step: int = attrs.field(default=0, init=False)
    _average: float | None = attrs.field(default=None, init=False)
    _optimizers: list[torch.optim.Optimizer] = attrs.field(factory=list, init=False)
    _rates: list[float] = attrs.field(factory=list, init=False)

    def __attrs_post_init__(self) -> None:
        matrices = [parameter for parameter in self.model.parameters() if parameter.ndim == 2]
        others = [parameter for parameter in self.model.parameters() if parameter.ndim != 2]
        rate = self.schedule.learning_rate
        self._optimizers = [Muon(matrices, lr=rate)] if matrices else []
        if others:
            self._optimizers.append(torch.optim.AdamW(others, lr=rate / 5, betas=(0.9, 0.95), weight_decay=0.0))
        self._rates = [optimizer.param_groups[0]["lr"] for optimizer in self._optimizers]

    def run(self) -> None:
        """Train from wherever the folder's checkpoint left off to the last step, and save the model."""
        self._resume()
        schedule, begin, first = self.schedule, time.monotonic(), self._step
        self.model.train()
        while self._step < schedule.steps:
            self._advance()
            if self._step % schedule.measure_every == 0 or self._step == schedule.steps:
                self._look(schedule.steps - self._step, (time.monotonic() - begin) / (self._step - first))
            if self._step % schedule.save_every == 0 or self._step == schedule.steps:
                self._save()

    def _advance(self) -> None:
        for optimizer, rate in zip(self._optimizers, self._rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * self.schedule.factor(self._step)
        loss = self.loss(self.schedule.rng(self._step))
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self._step += 1
        value = loss.item()
        self._average = value if self._average is None else 0.98 * self._average + 0.02 * value

    def _look(self, num_left: int, seconds_per_step: float) -> None:
        """Measure, report, and add a line to the curve."""
        self.model.eval()
        figures = {"loss": self._average, **self.measure()}
        self.model.train()
        with (self.out / CURVE).open("a") as file:
            file.write(json.dumps({"step": self._step, **figures}) + "\n")
        shown = ", ".join(f"{name} {value:.3f}" for name, value in figures.items())
        left = f"{num_left * seconds_per_step / 60:.0f} min left"
        self.report(f"step {self._step}/{self.schedule.steps}: {shown}, {seconds_per_step:.2f} s a step, {left}")

    def _save(self) -> None:
        """The model in bfloat16, as a drafter loads it, and in float32 with all that resuming needs."""
        with without_progress_bars():
            copy.deepcopy(self.model).to(torch.bfloat16).save_pretrained(self.out)
        state = {
            "step": self._step,
            "average": self._average,
            "settings": self._described(),
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
        }
        unfinished = self.out / (STATE + ".part")
        torch.save(state, unfinished)
        unfinished.replace(self.out / STATE)

    def _resume(self) -> None:
        file = self.out / STATE
        if not file.exists():
            (self.out / CURVE).unlink(missing_ok=True)
            return
        state = torch.load(file, weights_only=True)
        before, now = json.loads(state["settings"]), json.loads(self._described())
        changed = [key for key in now if before.get(key) != now[key]]
        if changed == ["steps"] and 2 * state["step"] <= min(before["steps"], now["steps"]):
            changed = []  # the rate was the same so far
        if changed:
            raise RequestError(
                str(file), f"a training with other settings ({', '.join(changed)})",
                "Allowed: to go on with the same settings; another number of steps before half of either is done.",
                "Repeat the command as it was, or name another folder.",
            )  # fmt: skip
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self._step, self._average = state["step"], state["average"]
        lines = (self.out / CURVE).read_text().splitlines() if (self.out / CURVE).exists() else []
        kept = [line for line in lines if json.loads(line)["step"] <= self._step]
        (self.out / CURVE).write_text("".join(line + "\n" for line in kept))
        self.report(f"resumed at step {self._step}")

    def _described(self) -> str:
        """All that the result depends on, but how often it is looked at, as JSON."""
        schedule = attrs.asdict(self.schedule)
        for name in ("measure_every", "save_every"):
            del schedule[name]
        return json.dumps({**self.settings, **schedule}, sort_keys=True, default=str)
