"""Train a small Llama on the collected ids, or distil it from a teacher (KL divergence on the same text).

Usage: train.py DATA OUT LAYERS WIDTH FEED_FORWARD HEADS MINUTES [TEACHER]

The target: train.py d target 12 128 384 2 72. The middle: train.py d middle 2 128 384 2 12 target.
"""

import sys
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy, kl_div
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

LENGTH, BATCH = 256, 12


class Muon(torch.optim.Optimizer):
    """Momentum orthogonalised by Newton-Schulz in float32 (torch's own runs it in bfloat16, slow on a CPU)."""

    def __init__(self, params: Iterable[torch.nn.Parameter], lr: float):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
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


def build(layers: int, width: int, feed_forward: int, heads: int) -> LlamaForCausalLM:
    """A Llama with one key-value head and tied embeddings."""
    config = LlamaConfig(
        vocab_size=4096, hidden_size=width, intermediate_size=feed_forward, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=1, head_dim=width // heads, max_position_embeddings=2048,
        tie_word_embeddings=True, bos_token_id=0, eos_token_id=0, pad_token_id=1,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    return LlamaForCausalLM(config)


def optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside, AdamW for embeddings and norms."""
    named = list(model.named_parameters())
    inner = [p for name, p in named if p.ndim == 2 and "embed" not in name and "lm_head" not in name]
    outer = [p for _, p in named if not any(p is q for q in inner)]
    return [Muon(inner, lr=0.02), torch.optim.AdamW(outer, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)]


def rate(step: int, progress: float) -> float:
    """Factor of the learning rate: warm-up over 50 steps, constant to half time, then linear to 2 %."""
    decay = 1 if progress < 0.5 else max(0.02, (1 - progress) / 0.5)
    return min(1, (step + 1) / 50) * decay


def batch_of(ids: np.ndarray, rng: np.random.Generator) -> torch.Tensor:
    """Random windows [BATCH, LENGTH + 1]."""
    starts = rng.integers(0, len(ids) - LENGTH - 1, BATCH)
    return torch.from_numpy(np.stack([ids[start : start + LENGTH + 1] for start in starts]).astype(np.int64))


def loss_of(model: LlamaForCausalLM, teacher: LlamaForCausalLM | None, batch: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of the text, or the divergence from the teacher on it (nats a token)."""
    logits = model(batch[:, :-1]).logits.float()
    if teacher is None:
        return cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    with torch.no_grad():
        wanted = teacher(batch[:, :-1]).logits.float().log_softmax(-1)
    return kl_div(logits.log_softmax(-1), wanted, log_target=True, reduction="none").sum(-1).mean()


@torch.no_grad()
def evaluate(model: LlamaForCausalLM, ids: np.ndarray) -> float:
    """Held-out loss (nats a token) over 24 evenly spaced windows."""
    model.eval()
    losses = []
    for start in range(0, len(ids) - LENGTH - 1, len(ids) // 24):
        window = torch.from_numpy(ids[start : start + LENGTH + 1].astype(np.int64))[None]
        losses.append(cross_entropy(model(window[:, :-1]).logits[0], window[0, 1:]).item())
    model.train()
    return sum(losses) / len(losses)


def train(
    model: LlamaForCausalLM, teacher: LlamaForCausalLM | None, ids: np.ndarray, held_out: np.ndarray, minutes: float
) -> None:
    """Train in place until the time is up."""
    rng, steps_by = np.random.default_rng(0), optimizers(model)
    base = [optimizer.param_groups[0]["lr"] for optimizer in steps_by]
    start, step, average = time.time(), 0, None
    model.train()
    while (progress := (time.time() - start) / 60 / minutes) < 1:
        for optimizer, lr in zip(steps_by, base, strict=True):
            optimizer.param_groups[0]["lr"] = lr * rate(step, progress)
        loss = loss_of(model, teacher, batch_of(ids, rng))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in steps_by:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        average = loss.item() if average is None else 0.98 * average + 0.02 * loss.item()
        if step % 100 == 0:
            held = f"held out {evaluate(model, held_out):.3f}" if step % 500 == 0 else ""
            print(f"{step} {time.time() - start:.0f}s {average:.3f} {progress:.2f} {held}", flush=True)


def main(data: Path, out: Path, shape: list[int], minutes: float, teacher: str | None) -> None:
    """Train, evaluate and save the model in bfloat16 with its tokenizer."""
    torch.manual_seed(0)
    torch.set_num_threads(2)
    ids, held_out = (np.fromfile(data / name, dtype=np.uint16) for name in ("train.bin", "val.bin"))
    model = build(*shape)
    taught_by = LlamaForCausalLM.from_pretrained(teacher, dtype=torch.float32).eval() if teacher else None
    print(sum(p.numel() for p in model.parameters()) / 1e6, "M parameters", flush=True)
    train(model, taught_by, ids, held_out, minutes)
    print("held out", evaluate(model, held_out))
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(data / "tokenizer.json"), eos_token="<|endoftext|>", bos_token="<|endoftext|>",
        pad_token="<|pad|>", mask_token="<|mask|>", model_max_length=2048, clean_up_tokenization_spaces=False,
    )  # fmt: skip
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    data, out, *shape, minutes = sys.argv[1:8]
    main(Path(data), Path(out), [int(size) for size in shape], float(minutes), sys.argv[8] if sys.argv[8:] else None)
