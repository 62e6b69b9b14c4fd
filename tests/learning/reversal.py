"""The learning fixture of CPU-FACTS section 4: a 134k-parameter model that has been taught string reversal half-way.

Words of five letters a to h; half of all 32,768 are for training (those with an even hash), half are fresh problems.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from headrace.environments.task_list import TaskList
from headrace.model.attention import ATTENTION_NAME
from headrace.model.renderer import ChatRenderer
from headrace.testing import SMALL_ALPHABET, tiny_model, tiny_tokenizer
from headrace.types import Task

LETTERS = "abcdefgh"
NUM_LETTERS = 5
SFT_STEPS = 190
MAX_SFT_STEPS = 400


def is_fresh(word: str) -> bool:
    return hashlib.sha256(word.encode()).digest()[0] % 2 == 1


def words(num: int, *, fresh: bool, seed: int) -> list[str]:
    """Distinct words of one half, in an order that ``seed`` decides."""
    rng = random.Random(f"{seed}/{fresh}")
    found: dict[str, None] = {}
    while len(found) < num:
        word = "".join(rng.choices(LETTERS, k=NUM_LETTERS))
        if is_fresh(word) == fresh:
            found[word] = None
    return list(found)


def task(word: str) -> Task:
    return Task(id=word, messages=({"role": "user", "content": word},), answer=word[::-1])


def tasks(num_train: int = 2048, num_held_out: int = 256, seed: int = 0) -> tuple[TaskList, Sequence[Task]]:
    """(train, held out); what ``tasks.factory`` calls."""
    train = [task(w) for w in words(num_train, fresh=False, seed=seed)]
    return TaskList(train), TaskList([task(w) for w in words(num_held_out, fresh=True, seed=seed)])


def warmed_up_model(path: Path, seed: int = 0, accuracy: float | None = None) -> Path:
    """Supervised warm-up from random weights, saved as a Hugging Face folder. ``accuracy``: stop once the expected
    sampled accuracy of the last few batches is this; None: after SFT_STEPS, which makes about 0.4 of seed 0 and up to
    0.8 of others."""
    tokenizer = tiny_tokenizer(SMALL_ALPHABET)
    model = tiny_model(vocab_size=len(tokenizer), seed=seed, max_context=64)
    model.set_attn_implementation("sdpa")
    renderer = ChatRenderer(tokenizer)
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rng = random.Random(seed)
    pool = words(4096, fresh=False, seed=seed)
    reached: deque[float] = deque(maxlen=4)
    for _ in range(SFT_STEPS if accuracy is None else MAX_SFT_STEPS):
        rows, labels = [], []
        for word in rng.choices(pool, k=64):
            prompt = list(renderer.render(task(word).messages))
            reply = [*tokenizer.encode(word[::-1], add_special_tokens=False), end]
            rows.append(prompt + reply)
            labels.append([-100] * len(prompt) + reply)
        output = model(input_ids=torch.tensor(rows), labels=torch.tensor(labels))
        reached.append(_expected_accuracy(output.logits.detach(), torch.tensor(labels)))
        if accuracy is not None and sum(reached) >= accuracy * 4:
            break
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    else:
        assert accuracy is None, f"seed {seed}: accuracy {reached} after {MAX_SFT_STEPS} steps, not {accuracy}"
    model.set_attn_implementation(ATTENTION_NAME)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def _expected_accuracy(logits_BTV: torch.Tensor, labels_BT: torch.Tensor) -> float:
    """Mean probability of the whole right reply: what sampling would score on these words."""
    logprobs_BTV = logits_BTV[:, :-1].log_softmax(-1)
    targets_BT = labels_BT[:, 1:]
    picked_BT = logprobs_BTV.gather(2, targets_BT.clamp(min=0)[..., None])[..., 0]
    return float(picked_BT.masked_fill(targets_BT < 0, 0.0).sum(1).exp().mean())


def run_config(model: Path, output_dir: Path, name: str, **sections: Any) -> dict[str, Any]:
    """The fixture's settings as a run's data; ``sections`` are merged over them."""
    data: dict[str, Any] = {
        "name": name,
        "output_dir": str(output_dir),
        "model": {"path": str(model)},
        "tasks": {"type": "python", "factory": f"{__file__}:tasks"},
        "rewards": [{"type": "exact"}],
        "sampling": {"max_new_tokens": 8},
        "trainer": {"learning_rate": 3e-4, "num_batches": 100, "num_threads": 1},
        "engine": {"max_batch_size": 256, "num_threads": 1},
        "rollout": {"groups_per_batch": 16, "group_size": 16},
        "checkpoint": {"every": 0},
        "monitor": {"progress": False},
    }
    for section, values in sections.items():
        data[section] = {**data.get(section, {}), **values} if isinstance(values, dict) else values
    return data
