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
from treegraft.kept import damaged
from treegraft_plugins.hf.fingerprint import asked_otherwise
from treegraft_plugins.hf.loading import without_progress_bars
from treegraft_plugins.hf.training.corpus import Report
from treegraft_plugins.options import number, whole

STATE = "training.pt"
CURVE = "curve.jsonl"
_STEPS = "schedule.steps"


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
    learning_rate: float = attrs.field(default=0.03, validator=number(1e-6))
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
        schedule: how long, and how often to look.
        settings: what the training data and the loss depend on, by name; a checkpoint made with others is refused.
        out: the folder for the checkpoint, the curve and the finished model.
        report: where lines of progress go.
    """

    model: nn.Module
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

    def resume(self) -> None:
        """Go to where the folder's checkpoint left off, if there is one.

        Raises:
            RequestError: it was made with other settings, or is damaged.
        """
        file, curve = self.out / STATE, self.out / CURVE
        if not file.exists():
            curve.unlink(missing_ok=True)
            return
        with damaged(file):
            state = torch.load(file, weights_only=True)
            before = json.loads(state["settings"])
        self._require_same(before, state["step"])
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self._step, self._average = state["step"], state["average"]
        with damaged(curve):
            lines = curve.read_text().splitlines() if curve.exists() else []
            kept = [line for line in lines if json.loads(line)["step"] <= self._step]
        curve.write_text("".join(line + "\n" for line in kept))
        self._save_model()  # the interruption may have come between checkpoint and model
        self.report(f"resumed at step {self._step}")

    def _require_same(self, before: Mapping[str, Any], step: int) -> None:
        now = self._described()
        changed = asked_otherwise(before, now)
        if list(changed) == [_STEPS] and 2 * step <= min(before[_STEPS], now[_STEPS]):
            return  # the rate was the same so far
        if changed:
            raise RequestError(
                str(self.out / STATE), f"a training with other settings ({'; '.join(changed.values())})",
                "Allowed: to go on with the same settings; another number of steps before half of either is done.",
                "Repeat the command as it was, or name another folder.",
            )  # fmt: skip

    def run(
        self, loss: Callable[[np.random.Generator], torch.Tensor], measure: Callable[[], Mapping[str, float]]
    ) -> None:
        """Train from wherever the checkpoint left off to the last step, and save the model.

        Args:
            loss: of a step, from its randomness.
            measure: held-out figures by name.
        """
        schedule, begin, first = self.schedule, time.monotonic(), self._step
        self.model.train()
        while self._step < schedule.steps:
            self._advance(loss(schedule.rng(self._step)))
            if self._step % schedule.measure_every == 0 or self._step == schedule.steps:
                self._look(measure, schedule.steps - self._step, (time.monotonic() - begin) / (self._step - first))
            if self._step % schedule.save_every == 0 or self._step == schedule.steps:
                self._save()
        self.report(f"trained for {self._step} steps: {self.out}")

    def _advance(self, loss: torch.Tensor) -> None:
        for optimizer, rate in zip(self._optimizers, self._rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * self.schedule.factor(self._step)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self._step += 1
        value = loss.item()
        self._average = value if self._average is None else 0.98 * self._average + 0.02 * value

    def _look(self, measure: Callable[[], Mapping[str, float]], num_left: int, seconds_per_step: float) -> None:
        """Measure, report, and add a line to the curve."""
        self.model.eval()
        figures = {"loss": self._average, **measure()}
        self.model.train()
        with (self.out / CURVE).open("a") as file:
            file.write(json.dumps({"step": self._step, **figures}) + "\n")
        shown = ", ".join(f"{name} {value:.3f}" for name, value in figures.items())
        left = f"{num_left * seconds_per_step / 60:.0f} min left"
        self.report(f"step {self._step}/{self.schedule.steps}: {shown}, {seconds_per_step:.2f} s a step, {left}")

    def _save(self) -> None:
        """All that resuming needs, in float32, and the model."""
        state = {
            "step": self._step,
            "average": self._average,
            "settings": json.dumps(self._described()),
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
        }
        unfinished = self.out / (STATE + ".part")
        torch.save(state, unfinished)
        unfinished.replace(self.out / STATE)
        self._save_model()

    def _save_model(self) -> None:
        """The model in bfloat16, as a drafter loads it."""
        with without_progress_bars():
            copy.deepcopy(self.model).to(torch.bfloat16).save_pretrained(self.out)

    def _described(self) -> dict[str, Any]:
        """All that the result depends on, but how often it is looked at, by name."""
        schedule = attrs.asdict(
            self.schedule, filter=lambda field, _: field.name not in ("measure_every", "save_every")
        )
        return {**self.settings, **{f"schedule.{name}": value for name, value in schedule.items()}}
