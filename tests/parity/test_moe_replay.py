"""Router replay (R3): what the engine's routers chose is what the training pass uses, token by token (F10, F11)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_oracle import VOCAB, generate, request, sharp_model

from headrace.algorithms.fields import Minibatch, Totals
from headrace.config.schema import TrainerConfig, TransformersEngineConfig
from headrace.control.samples import samples_from_episode
from headrace.engines import EngineError, TransformersEngine
from headrace.model.load import prepare_model
from headrace.model.packing import input_length, pack
from headrace.model.routing import RouterPass, RouterRecorder, router_shape
from headrace.protocols import WeightUpdate
from headrace.testing import Reinforce, make_sample, tiny_tokenizer
from headrace.trainer.trainer import PolicyTrainer
from headrace.types import (
    AttemptKey,
    Episode,
    Generation,
    GenerationRequest,
    Outcome,
    PolicyVersion,
    RoutingIds,
    Sample,
    Segment,
    Source,
    Task,
    Trace,
    VersionSpan,
)
from headrace.weights import SharedWeights

LAYERS, CHOSEN = 2, 2
TOKENIZER = tiny_tokenizer("".join(chr(c) for c in range(ord("A"), ord("A") + VOCAB - 9)))


def moe_model(**options: Any) -> Any:
    options = {"architecture": "qwen3_moe", "norm_topk_prob": True, "vocab_size": VOCAB, "tied": False, **options}
    return prepare_model(sharp_model(**options), TOKENIZER)


def engine_of(model: Any, **config: Any) -> TransformersEngine:
    carrier = SharedWeights(model, PolicyVersion(0, 0))
    return TransformersEngine(carrier, TransformersEngineConfig(**config), vocab_size=VOCAB, record_routing=True)


def trainer_of(loaded: Any, *, replay: bool, **options: Any) -> PolicyTrainer:
    return PolicyTrainer(loaded, TrainerConfig(router_replay=replay, **options), num_steps=10)


def ask(num_groups: int = 2, members: int = 3, **sampling: Any) -> list[GenerationRequest]:
    sampling = {"max_new_tokens": 12, **sampling}
    return [
        request(f"g{g}m{m}", range(3 + g, 9 + 3 * g), seed=10 * g + m, prefix_key=f"g{g}", **sampling)
        for g in range(num_groups)
        for m in range(members)
    ]


def samples_of(asked: Sequence[GenerationRequest], replies: Sequence[Generation]) -> tuple[Sample, ...]:
    return tuple(
        make_sample(
            a.prompt_ids,
            reply.ids,
            group=int(a.id[1]),
            member=int(a.id[3]),
            logprobs=reply.logprobs,
            routing=reply.routing,
        )
        for a, reply in zip(asked, replies, strict=True)
    )


@torch.no_grad()
def plain_choices(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """[T, L, K], sorted: of one sequence, by transformers' own attention."""
    recorder = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _m, _a, output: recorder.append(output[2]))
        for layer in model.model.layers
    ]
    model.set_attn_implementation("sdpa")
    model(torch.tensor([list(ids)]), use_cache=False)
    model.set_attn_implementation("headrace")
    for hook in hooks:
        hook.remove()
    return torch.stack(recorder, dim=1).sort(-1).values


def whole(routing: RoutingIds) -> torch.Tensor:
    return torch.cat([part.long() for part in routing.parts])


def recorded_choices(routing: RoutingIds) -> torch.Tensor:
    return whole(routing).sort(-1).values


def minibatch_of(samples: tuple[Sample, ...], advantages: dict[str, float]) -> Minibatch:
    return Minibatch(
        samples=samples,
        advantages=[torch.tensor(s.mask, dtype=torch.float32) * advantages[s.id] for s in samples],
        proximal_logprobs=None,
        reference_logprobs=None,
        totals=Totals(num_tokens=sum(s.num_trained for s in samples), num_episodes=len(samples), max_length=16),
    )


def train(trainer: PolicyTrainer, samples: tuple[Sample, ...]) -> dict[str, float]:
    advantages = {sample.id: 1.0 - 0.3 * i for i, sample in enumerate(samples)}
    return trainer.forward_backward(minibatch_of(samples, advantages), Reinforce(advantages))


def gradients(trainer: PolicyTrainer) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in trainer._model.named_parameters()}


def rerouted(sample: Sample) -> Sample:
    """Its record with every expert replaced by the next one."""
    parts = tuple(((part.long() + 1) % 4).to(part.dtype) for part in sample.routing.parts)
    return replace(sample, routing=RoutingIds(parts))


class UsedIds:
    """The expert ids [T, K] that reach the experts of each layer."""

    def __init__(self, model: Any) -> None:
        self.seen: dict[int, list[torch.Tensor]] = {}
        for number, layer in enumerate(model.model.layers):
            layer.mlp.experts.register_forward_pre_hook(
                lambda _m, args, number=number: self.seen.setdefault(number, []).append(args[1].clone())
            )


# ---------------------------------------------------------------------------------------------------- engine


@pytest.mark.parametrize("temperature", [1.0, 0.0])
@pytest.mark.parametrize("max_batch_size", [64, 2])
def test_the_engine_records_every_token_that_it_computed(max_batch_size: int, temperature: float) -> None:
    """F11: one entry for each token but the last, prompt and reply, in its place, whatever the batch was; of members
    that agree (greedy ones), whose tokens are computed once, each has the record."""
    loaded = moe_model()
    engine = engine_of(loaded.model, max_batch_size=max_batch_size)
    assert engine.capabilities.routing_ids
    asked = [
        replace(a, sampling=replace(a.sampling, max_new_tokens=3 + 2 * n))
        for n, a in enumerate(ask(temperature=temperature))
    ]
    for a, reply in zip(asked, generate(engine, asked), strict=True):
        ids = a.prompt_ids + reply.ids
        assert reply.routing is not None and reply.routing.num_tokens == len(ids) - 1
        assert all(part.shape[1:] == (LAYERS, CHOSEN) and part.dtype == torch.uint8 for part in reply.routing.parts)
        assert torch.equal(recorded_choices(reply.routing), plain_choices(loaded.model, ids[:-1]))


def test_members_of_a_group_share_the_prompts_record() -> None:
    """By reference: a group's prompt is recorded once."""
    asked = ask(num_groups=1)
    first, *others = generate(engine_of(moe_model().model), asked)
    assert all(reply.routing.parts[0] is first.routing.parts[0] for reply in others)
    assert len(first.routing.parts[0]) == len(asked[0].prompt_ids)


def test_an_engine_records_only_when_asked_and_only_what_it_can() -> None:
    loaded = moe_model()
    engine = TransformersEngine(
        SharedWeights(loaded.model, PolicyVersion(0, 0)), TransformersEngineConfig(), vocab_size=VOCAB
    )
    assert not engine.capabilities.routing_ids
    assert generate(engine, ask(1, 1))[0].routing is None
    with pytest.raises(EngineError, match="LlamaForCausalLM has no routers"):
        engine_of(sharp_model())


def test_tokens_keep_the_record_of_the_weights_that_computed_them() -> None:
    """An update in the middle of a request: what was computed before stays as the old weights chose, also where keys
    and values are computed anew."""
    loaded = moe_model()
    (asked,) = ask(1, 1, max_new_tokens=30)
    engine = engine_of(loaded.model, kv_policy="recompute")

    async def main() -> Generation:
        reply = asyncio.create_task(engine.generate(asked))
        while engine.stats().num_decode_steps < 9:
            await asyncio.sleep(0)
        await engine.pause("keep")
        with torch.no_grad():
            for layer in loaded.model.model.layers:
                layer.mlp.gate.weight.copy_(layer.mlp.gate.weight.roll(1, 0))
        await engine.update_weights(WeightUpdate(version=PolicyVersion(0, 1)))
        await engine.resume()
        return await reply

    old = plain_choices(loaded.model, asked.prompt_ids)
    reply = asyncio.run(main())
    num_old = len(asked.prompt_ids) + reply.version_spans[0].end - 1
    choices = recorded_choices(reply.routing)
    now = plain_choices(loaded.model, (asked.prompt_ids + reply.ids)[:-1])
    assert len(reply.version_spans) == 2
    assert torch.equal(choices[: len(asked.prompt_ids)], old)
    assert torch.equal(choices[num_old:], now[num_old:])
    assert not torch.equal(choices[:num_old], now[:num_old])


# ----------------------------------------------------------------------------------------------------- trainer


@pytest.mark.parametrize("share_prompts", [True, False])
@pytest.mark.parametrize("max_microbatch_tokens", [1024, 40])
def test_the_recorded_ids_are_the_ones_that_are_used(share_prompts: bool, max_microbatch_tokens: int) -> None:
    """F11: each token of a packed row goes to the experts that were recorded for it, shared prompts included."""
    loaded = moe_model()
    asked = ask()
    samples = samples_of(asked, generate(engine_of(loaded.model), asked))
    used = UsedIds(loaded.model)
    options = {"share_prompts": share_prompts, "max_microbatch_tokens": max_microbatch_tokens}
    trainer = trainer_of(loaded, replay=True, **options)
    samples = tuple(rerouted(sample) for sample in samples)
    train(trainer, samples)
    rows = list(trainer._rows(samples))
    assert len(rows) > 1 or max_microbatch_tokens == 1024
    for number in range(LAYERS):
        assert len(used.seen[number]) == len(rows)
        for row, seen_TK in zip(rows, used.seen[number], strict=True):
            is_real_T = row.uses_T > 0  # the others fill the row up: nothing was recorded for them
            assert int(row.uses_T.sum()) == sum(input_length(sample) for sample in row.samples)
            assert torch.equal(seen_TK[is_real_T], row.recorded_TLK[is_real_T, number].long())
    for row in rows:
        # by other ways than pack's: where the row says that a trained token is predicted, and by ids and positions
        slots = torch.split(row.slot_N, list(row.num_N))
        owners = [(s, t) for s, slot in zip(row.samples, slots, strict=True) for t in slot.tolist()]
        for (sample, t), place in zip(owners, row.predictor_U[row.row_N].tolist(), strict=True):
            assert torch.equal(row.recorded_TLK[place].long(), whole(sample.routing)[t - 1])
        for place in (row.uses_T > 0).nonzero()[:, 0].tolist():
            position = int(row.positions_1T[0, place])
            around = [s for s in row.samples if position < input_length(s)]
            records = [whole(s.routing)[position] for s in around if s.ids[position] == int(row.ids_1T[0, place])]
            assert any(torch.equal(row.recorded_TLK[place].long(), record) for record in records)


def test_replaying_what_the_router_chooses_changes_nothing() -> None:
    """Weights that did not move, and a record of the very same choices: bit for bit the plain pass."""
    loaded = moe_model()
    asked = ask()
    samples = samples_of(asked, generate(engine_of(loaded.model), asked))
    on, off = trainer_of(loaded, replay=True), trainer_of(loaded, replay=False)
    metrics = train(off, samples)
    plain = gradients(off)
    off._weights.clear()
    replayed = train(on, samples)
    assert replayed.pop("router/replay_changed_share") == 0.0
    assert replayed == metrics
    for name, gradient in gradients(on).items():
        assert torch.equal(gradient, plain[name]), name


@pytest.mark.parametrize("activation_checkpointing", [False, True])
def test_replay_on_and_off_differ_and_the_router_learns(activation_checkpointing: bool) -> None:
    """F11: with other choices on record, loss and gradient differ from the plain pass; the router has a gradient
    through the weights of the recorded experts, and it is the derivative of the loss that was computed."""
    loaded = moe_model()
    asked = ask()
    samples = tuple(rerouted(s) for s in samples_of(asked, generate(engine_of(loaded.model), asked)))
    found = {}
    for replay in (False, True):
        config = TrainerConfig(router_replay=replay)
        trainer = PolicyTrainer(
            loaded, config, num_steps=1, activation_checkpointing=activation_checkpointing and replay
        )
        metrics = train(trainer, samples)
        found[replay] = metrics["loss"], gradients(trainer), trainer.forward(samples)
        trainer._weights.clear()
        assert metrics.get("router/replay_changed_share", 1.0) > 0.5
    assert abs(found[True][0] - found[False][0]) > 1e-3
    assert max(float((a - b).abs().max()) for a, b in zip(found[True][2], found[False][2], strict=True)) > 1e-2
    for layer in range(LAYERS):
        name = f"model.layers.{layer}.mlp.gate.weight"
        assert float(found[True][1][name].norm()) > 1e-4
        assert float((found[True][1][name] - found[False][1][name]).norm()) > 1e-4
    _check_derivative(loaded, samples, found[True][1]["model.layers.0.mlp.gate.weight"])


def _check_derivative(loaded: Any, samples: tuple[Sample, ...], gradient: torch.Tensor) -> None:
    """Along the gradient itself, by a central difference, choices fixed by the replay."""
    trainer = trainer_of(loaded, replay=True)
    gate = loaded.model.model.layers[0].mlp.gate.weight
    direction, losses = gradient / gradient.norm(), []
    for step in (1e-2, -1e-2):
        with torch.no_grad():
            gate += step * direction
        losses.append(train(trainer, samples)["loss"])
        trainer._weights.clear()
        with torch.no_grad():
            gate -= step * direction
    assert (losses[0] - losses[1]) / 2e-2 == pytest.approx(float(gradient.norm()), rel=2e-2)


def test_replay_brings_the_trainer_no_further_from_the_engine() -> None:
    """R3's claim. A nearly tied router, perturbed by less than a rounding of bfloat16, chooses other experts on a few
    tokens; with replay only the perturbation itself is left."""
    loaded = moe_model(initializer_range=0.25)
    asked = ask(num_groups=3, members=4, max_new_tokens=30)
    samples = samples_of(asked, generate(engine_of(loaded.model), asked))
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        for layer in loaded.model.model.layers:
            gate = layer.mlp.gate.weight
            gate += 2e-2 * gate.std() * torch.randn(gate.shape, generator=generator)
    gaps = {}
    for replay in (False, True):
        metrics = train(trainer_of(loaded, replay=replay), samples)
        gaps[replay] = metrics["logprob_gap_max"]
        if replay:
            assert 0 < metrics["router/replay_changed_share"] < 0.2
    assert gaps[True] < gaps[False] / 2, gaps


def test_the_load_and_the_balance_loss_are_those_of_the_replayed_choices() -> None:
    loaded = moe_model()
    asked = ask()
    samples = samples_of(asked, generate(engine_of(loaded.model), asked))
    to_one = tuple(
        replace(s, routing=RoutingIds(tuple(torch.ones_like(p).cumsum(-1).to(p.dtype) for p in s.routing.parts)))
        for s in samples
    )  # experts 1 and 2, always
    trainer = trainer_of(loaded, replay=True, router_aux_coefficient=0.1)
    metrics = train(trainer, to_one)
    assert metrics["router/num_dead_experts"] == 2 * LAYERS
    assert metrics["router/load_max_violation"] == pytest.approx(1.0)
    assert metrics["router/load_entropy"] == pytest.approx(0.5)


# ------------------------------------------------------------------------------------------------ on the way


def test_a_sample_without_record_is_an_error() -> None:
    """F11: never silently no replay; nor a record that is out of step."""
    loaded = moe_model()
    asked = ask(1, 2)
    samples = samples_of(asked, generate(engine_of(loaded.model), asked))
    trainer = trainer_of(loaded, replay=True)
    with pytest.raises(ValueError, match="1 samples carry no routing ids, g0m1/0"):
        train(trainer, (samples[0], replace(samples[1], routing=None)))
    with pytest.raises(ValueError, match=r"sample g0m1/0: routing ids of \d+ tokens .* out of step"):
        replace(samples[1], routing=samples[1].routing.span(1, samples[1].routing.num_tokens))
    # what nobody sampled (the canary's probe, a demonstration) goes its own way
    written = replace(samples[1], routing=None, stream="supervised")
    row = pack([(0, written), (1, samples[0])], share_prompts=False, dtype=torch.float32, device=torch.device("cpu"))
    own = row.recorded_TLK[: input_length(written)]
    assert (own == -1).all() and (row.recorded_TLK[input_length(written) :] >= 0).all()
    shape = router_shape(loaded.model)
    seen = RouterRecorder(shape)
    with torch.no_grad():
        loaded.model(row.ids_1T, position_ids=row.positions_1T, layout=row.layout, routing=seen, use_cache=False)
        passed = RouterPass(shape, row.uses_T, replayed_TLK=torch.full_like(row.recorded_TLK, -1))
        loaded.model(row.ids_1T, position_ids=row.positions_1T, layout=row.layout, routing=passed, use_cache=False)
    counts = torch.bincount(seen.ids_TLK()[:, 0].flatten().long(), minlength=4)
    assert torch.equal(passed.sums[0][:4], counts.double())


def test_a_later_turn_does_not_overwrite_what_earlier_turns_recorded() -> None:
    """A branch of two turns: each token has the record of the turn that came to it first."""

    def record(num_tokens: int, value: int) -> RoutingIds:
        return RoutingIds((torch.full((num_tokens, 1, 1), value, dtype=torch.uint8),))

    version = PolicyVersion(0, 0)

    def policy(ids: tuple[int, ...], parent: int, routing: RoutingIds) -> Segment:
        spans = (VersionSpan(version, 0, len(ids)),)
        return Segment(
            source=Source.POLICY,
            ids=ids,
            parent=parent,
            logprobs=(0.0,) * len(ids),
            version_spans=spans,
            routing=routing,
        )

    trace = Trace(
        segments=(
            Segment(source=Source.TEMPLATE, ids=(1, 2, 3)),
            policy((4, 5), 0, record(4, 1)),
            Segment(source=Source.ENVIRONMENT, ids=(6, 7), parent=1),
            policy((8, 9, 10), 2, record(9, 2)),
        )
    )
    episode = Episode(key=AttemptKey(0, 0), task=Task(id="t", messages=()), turns=(), trace=trace, outcome=Outcome.DONE)
    (sample,) = samples_from_episode(episode, "group-0", 1.0)
    assert torch.cat(sample.routing.parts).flatten().tolist() == [1] * 4 + [2] * 5
    assert sample.routing.num_tokens == input_length(sample)
    bare = trace.without_routing()
    assert all(segment.routing is None for segment in bare.segments) and bare == trace
