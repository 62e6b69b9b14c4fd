"""The report's sample episodes: prompt, replies, answer, score and outcome, all of it escaped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.monitor.run_data import PHASES, RunData, batch_of, num_policy_tokens
from headrace.monitor.texts import number, shown


def sample_episodes(run: RunData) -> str:
    """The sampled episodes by part of the run, coloured by reward. Empty where none are recorded."""
    if not run.episodes:
        return ""
    rewards = [r for e in run.episodes if (r := number(e, "reward")) is not None]
    low, high = min([0.0, *rewards]), max([1.0, *rewards])
    parts = ["<h2>Sample episodes</h2><p class=dim>Drawn at random from the early, middle and late part of the run; "
             "the colour runs from the lowest reward (red) to the highest (green), grey has no score.</p>"]  # fmt: skip
    for phase in PHASES:
        found = [e for e in run.episodes if e["phase"] == phase]
        if found:
            parts.append(f"<h3>{phase.capitalize()}</h3>" + "".join(_episode(e, low, high) for e in found))
    return "".join(parts)


def _episode(episode: Mapping[str, Any], low: float, high: float) -> str:
    reward = number(episode, "reward")
    colour = ""
    if reward is not None:
        hue = round(4 + 131 * (reward - low) / (high - low))
        colour = f' style="border-left-color:hsl({hue} 55% 46%)"'
    score: Mapping[str, Any] = episode.get("score") or {}
    error = episode.get("error") or (
        f"{score.get('error_class')}: {score.get('message')}" if "error_class" in score else ""
    )
    chips = [
        f'<span class="chip score">{"no score" if reward is None else f"reward {reward:.3g}"}</span>',
        *(f'<span class="chip">{shown(n)} {shown(v)}</span>' for n, v in (score.get("components") or {}).items()),
        f'<span class="chip">{shown(episode.get("outcome"))}</span>',
        f'<span class="chip">{shown(episode.get("status") or "")}</span>' if episode.get("status") else "",
        f'<span class="chip">batch {batch_of(episode)}</span>',
        f'<span class="chip">{num_policy_tokens(episode)} tokens</span>',
    ]
    body = [_message(m) for m in episode.get("messages") or ()]
    turns = episode.get("turns") or ([{"reply": episode["reply"]}] if episode.get("reply") is not None else [])
    for turn in turns:
        body.append(f'<div class="role">reply</div><pre class="reply">{shown(turn.get("reply", ""))}</pre>')
        body += [_message(m) for m in turn.get("observation") or ()]
    if episode.get("answer") is not None:
        body.append(f'<div class="role">answer</div><pre>{shown(episode["answer"])}</pre>')
    if error:
        body.append(f'<p class="bad">{shown(error)}</p>')
    return (
        f'<div class="episode"{colour}><header><span class="task">{shown(episode.get("task_id"))}</span>'
        f"{''.join(chips)}</header>{''.join(body)}</div>"
    )


def _message(message: Any) -> str:
    if not isinstance(message, Mapping):
        return f"<pre>{shown(message)}</pre>"
    return f'<div class="role">{shown(message.get("role", ""))}</div><pre>{shown(message.get("content", ""))}</pre>'
