"""Requests that come, wait, stop, are aborted or cancelled; an engine that is paused, probed, closed, dies or hangs."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest

from headrace.config.engines import TransformersEngineConfig
from headrace.engines import EngineError, RequestError, TransformersEngine
from headrace.protocols import Engine, WeightUpdate
from headrace.testing import tiny_model, tiny_tokenizer
from headrace.types import GenerationRequest, PolicyVersion, Sampling
from headrace.weights import SharedWeights

TOKENIZER = tiny_tokenizer()


@pytest.fixture(scope="module")
def model():
    return tiny_model(initializer_range=0.2)


def make(model, decode=TOKENIZER.decode, **config) -> TransformersEngine:
    carrier = SharedWeights(model, PolicyVersion(0, 0))
    return TransformersEngine(carrier, TransformersEngineConfig(**config), vocab_size=len(TOKENIZER), decode=decode)


def ask(name: str, text: str = "abc", *, seed: int = 0, **sampling) -> GenerationRequest:
    ids = tuple(TOKENIZER(text)["input_ids"])
    declared = Sampling(**{"max_new_tokens": 20, **sampling})
    return GenerationRequest(id=name, prompt_ids=ids, sampling=declared, seed=seed)


async def until(condition) -> None:
    while not condition():
        await asyncio.sleep(0)


def break_forward(monkeypatch, engine, effect) -> None:
    """Let the model's next call on the compute thread do ``effect`` first."""
    forward = engine._compute._forward

    def broken(*args):
        effect()
        return forward(*args)

    monkeypatch.setattr(engine._compute, "_forward", broken)


def test_it_is_an_engine(model):
    """The embedded engine has every method of the protocol."""
    engine = make(model, max_context=100)
    assert isinstance(engine, Engine)
    assert engine.capabilities.max_context == 100
    assert make(model).capabilities.max_context == 512


# ------------------------------------------------------------------------------------------- ends of replies


def test_stop_ids_end_the_reply_and_stay_in_it(model):
    """I2: the end-of-turn id is a sampled id with a log-probability, and nothing follows it."""

    async def main():
        engine = make(model)
        free = await engine.generate(ask("free", max_new_tokens=30))
        stop = free.ids[7]
        first = free.ids.index(stop)
        return free, first, await engine.generate(ask("r", max_new_tokens=30, stop_ids=(stop, 1)))

    free, first, reply = asyncio.run(main())
    assert reply.finish_reason == "stop"
    assert reply.ids == free.ids[: first + 1]
    assert len(reply.logprobs) == first + 1
    assert free.finish_reason == "length"


def test_stop_string_inside_and_across_tokens_keeps_whole_tokens(model):
    """F27: a stop string that starts inside one token and ends inside another is found, the completing token is
    kept whole, and ids and log-probabilities have one length."""

    async def main():
        engine = make(model, decode=lambda ids: "".join(f"<{i}>" for i in ids))
        free = await engine.generate(ask("free"))
        cut = next(
            t
            for t in range(5, 19)
            if f"{free.ids[t - 1]}><{free.ids[t]}" not in "".join(f"<{i}>" for i in free.ids[:t])
        )
        stop = f"{free.ids[cut - 1]}><{free.ids[cut]}"
        return free, cut, await engine.generate(ask("r", stop_strings=("never", stop)))

    free, cut, reply = asyncio.run(main())
    assert reply.finish_reason == "stop"
    assert reply.ids == free.ids[: cut + 1]
    assert len(reply.ids) == len(reply.logprobs)


def test_stop_string_of_a_real_tokenizer(model):
    """F27: with the tokenizer's own decode, the reply ends with the stop string's last character."""

    async def main():
        engine = make(model)
        text = TOKENIZER.decode((await engine.generate(ask("free", max_new_tokens=60))).ids)
        stop = text[10:12]
        reply = await engine.generate(ask("r", max_new_tokens=60, stop_strings=(stop,)))
        return text, stop, TOKENIZER.decode(reply.ids)

    text, stop, got = asyncio.run(main())
    assert got == text[: text.index(stop) + 2]


def test_a_decode_callback_that_raises_fails_its_request_only(model):
    """An error in turning ids into text is that request's error; neighbours and engine go on."""

    def decode(ids):
        raise UnicodeError("bad bytes")

    async def main():
        engine = make(model, decode=decode)
        bad, good = await asyncio.gather(
            engine.generate(ask("bad", stop_strings=("x",))), engine.generate(ask("good")), return_exceptions=True
        )
        assert isinstance(bad, EngineError) and "UnicodeError: bad bytes" in str(bad)
        assert len(good.ids) == 20
        assert await engine.healthy()

    asyncio.run(main())


# ----------------------------------------------------------------------------------------------- batching


def test_requests_join_and_leave_between_steps(model):
    """Requests of mixed lengths share decode steps, ended rows cost nothing, and late ones join at once: the number
    of decode steps is that of the best schedule."""

    async def main():
        engine = make(model, max_batch_size=3)
        lengths = (2, 9, 4, 6, 3)
        replies = await asyncio.gather(
            *(engine.generate(ask(f"r{i}", seed=i, max_new_tokens=n)) for i, n in enumerate(lengths))
        )
        assert [len(r.ids) for r in replies] == list(lengths)
        stats = engine.stats()
        assert stats.num_generated_tokens == sum(lengths)
        # Each first token comes with the admission. Rows: 2 then 6 then nothing; 9; 4 then 3.
        assert stats.num_decode_steps == 8
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        assert stats.prefill_s > 0 and stats.decode_s > 0

    asyncio.run(main())


def test_ended_rows_take_no_part_in_a_step(model, monkeypatch):
    """No compute is spent on ended rows, and free rows are filled before the next decode step."""

    async def main():
        engine = make(model, max_batch_size=3)
        widths = []
        decode = engine._compute.decode
        monkeypatch.setattr(
            engine._compute, "decode", lambda store, moves, rows: widths.append(len(rows)) or decode(store, moves, rows)
        )
        await asyncio.gather(
            *(engine.generate(ask(f"r{i}", seed=i, max_new_tokens=n)) for i, n in enumerate((2, 5, 7, 3)))
        )
        return widths

    assert asyncio.run(main()) == [3, 3, 3, 2, 1, 1]


def test_first_step_waits_for_all_ready_tasks(model, monkeypatch):
    """I18: however many tasks are about to submit when the first one does, they are admitted together, in order."""

    async def main():
        engine = make(model)
        admitted = []
        admit = engine._compute.admit
        monkeypatch.setattr(
            engine._compute, "admit", lambda *args: admitted.append([a.uniform for a in args[3]]) or admit(*args)
        )

        async def nested(i):
            for _ in range(i % 3):  # a task that does something else first
                await asyncio.sleep(0)
            return await engine.generate(ask(f"r{i}", seed=i, max_new_tokens=2))

        await asyncio.gather(*(asyncio.create_task(nested(i)) for i in range(10)))
        return admitted

    admitted = asyncio.run(main())
    assert len(admitted) == 1 and len(admitted[0]) == 10


# ------------------------------------------------------------------------------------- abort, cancel, pause


def test_abort_returns_the_partial_reply(model):
    """An aborted request returns what it has, with versions and log-probabilities; its neighbours go on."""

    async def main():
        engine = make(model)
        whole = await engine.generate(ask("whole", max_new_tokens=200))
        one = asyncio.create_task(engine.generate(ask("one", max_new_tokens=200)))
        two = asyncio.create_task(engine.generate(ask("two", seed=1, max_new_tokens=40)))
        await until(lambda: engine.stats().num_generated_tokens >= 220)
        await engine.abort("one")
        await engine.abort("unknown")
        reply = await one
        assert reply.finish_reason == "abort"
        assert 5 <= len(reply.ids) < 200
        assert reply.ids == whole.ids[: len(reply.ids)]
        assert len((await two).ids) == 40

    asyncio.run(main())


def test_abort_of_a_waiting_request_returns_an_empty_reply(model):
    """A request that never got a row returns no tokens, and never gets one."""

    async def main():
        engine = make(model, max_batch_size=1)
        one = asyncio.create_task(engine.generate(ask("one")))
        two = asyncio.create_task(engine.generate(ask("two")))
        await until(lambda: engine.stats().num_generated_tokens >= 3)
        await engine.abort("two")
        assert (await two).ids == ()
        assert len((await one).ids) == 20
        assert engine.stats().num_generated_tokens == 20

    asyncio.run(main())


def test_cancelling_the_caller_frees_the_row(model):
    """I19: a caller whose deadline passed leaves no row behind, and its id may be used again."""

    async def main():
        engine = make(model, max_batch_size=1)
        one = asyncio.create_task(engine.generate(ask("one", max_new_tokens=400)))
        await until(lambda: engine.stats().num_generated_tokens >= 3)
        one.cancel()
        with pytest.raises(asyncio.CancelledError):
            await one
        assert len((await engine.generate(ask("one"))).ids) == 20
        assert engine.stats().num_generated_tokens < 60

    asyncio.run(main())


def test_pause_keep_holds_and_resume_goes_on(model):
    """Paused, nothing moves: running requests hold, new ones wait; resumed, the replies are those of no pause."""

    async def main():
        asked = [ask(f"r{i}", seed=i) for i in range(3)]
        expected = await asyncio.gather(*(make(model).generate(a) for a in asked))
        engine = make(model)
        tasks = [asyncio.create_task(engine.generate(a)) for a in asked[:2]]
        await until(lambda: engine.stats().num_generated_tokens >= 6)
        await engine.pause("keep")
        before = engine.stats()
        tasks.append(asyncio.create_task(engine.generate(asked[2])))
        for _ in range(50):
            await asyncio.sleep(0)
        assert replace(engine.stats(), num_waiting=0) == replace(before, num_waiting=0)
        assert engine.stats().num_waiting == 1
        await engine.resume()
        replies = await asyncio.gather(*tasks)
        assert [r.ids for r in replies] == [e.ids for e in expected]

    asyncio.run(main())


def test_pause_abort_ends_everything_in_flight(model):
    """pause('abort') ends running and waiting requests with what they have; later requests wait for resume."""

    async def main():
        engine = make(model, max_batch_size=1)
        tasks = [asyncio.create_task(engine.generate(ask(f"r{i}", max_new_tokens=400))) for i in range(2)]
        await until(lambda: engine.stats().num_generated_tokens >= 5)
        await engine.pause("abort")
        running, waiting = await asyncio.gather(*tasks)
        assert running.finish_reason == waiting.finish_reason == "abort"
        assert len(running.ids) >= 5 and waiting.ids == ()
        late = asyncio.create_task(engine.generate(ask("late")))
        await engine.resume()
        assert len((await late).ids) == 20

    asyncio.run(main())


@pytest.mark.parametrize("paused", [True, False])
def test_probe_runs_alone(model, paused):
    """I6: probes are served while everything else holds, paused or not; the held replies are not changed by it."""

    async def main():
        asked = [ask(f"r{i}", seed=i, max_new_tokens=60) for i in range(2)]
        expected = await asyncio.gather(*(make(model).generate(a) for a in asked))
        engine = make(model, max_batch_size=2)
        tasks = [asyncio.create_task(engine.generate(a)) for a in asked]
        await until(lambda: engine.stats().num_generated_tokens >= 6)
        if paused:
            await engine.pause("keep")
            await engine.update_weights(WeightUpdate(version=PolicyVersion(0, 1)))
        probing = asyncio.create_task(engine.probe([ask("p0", "hello"), ask("p1", "hello", seed=1)]))
        await asyncio.sleep(0)
        await until(lambda: engine.stats().num_cached_prefix_tokens >= 8 or probing.done())
        held = [task.done() for task in tasks]
        probes = await probing
        assert held == [False, False]
        assert [len(p.ids) for p in probes] == [20, 20]
        assert probes[0].version_spans[0].version == engine.version
        assert probes[0].ids == (await engine.probe([ask("p0", "hello")]))[0].ids
        if paused:
            assert not any(task.done() for task in tasks)
            await engine.resume()
        assert [r.ids for r in await asyncio.gather(*tasks)] == [e.ids for e in expected]

    asyncio.run(main())


# ------------------------------------------------------------------------------------ refusals and failures


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_ids": ()}, "the prompt is empty"),
        ({"prompt_ids": (1, 500)}, r"prompt ids \[500\] are not in the vocabulary of 10"),
        ({"prompt_ids": (1, -1)}, r"prompt ids \[-1\]"),
        ({"prompt_ids": (1,) * 45}, "a prompt of 45 tokens plus max_new_tokens 20 is 65, more than the context of 64"),
        ({"sampling": Sampling(max_new_tokens=0)}, "max_new_tokens is 0"),
        ({"sampling": Sampling(max_new_tokens=2, temperature=-1)}, "temperature is -1"),
        ({"sampling": Sampling(max_new_tokens=2, temperature=float("nan"))}, "temperature is nan"),
        ({"sampling": Sampling(max_new_tokens=2, top_p=0)}, "top_p is 0"),
        ({"sampling": Sampling(max_new_tokens=2, top_k=-1)}, "top_k is -1"),
        ({"sampling": Sampling(max_new_tokens=2, stop_strings=("",))}, "a stop string is empty"),
    ],
)
def test_bad_requests_are_refused_by_name(model, change, message):
    """One clear error for each wrong request, before any work; the engine stays well."""

    async def main():
        engine = make(model, max_context=64)
        with pytest.raises(RequestError, match=f"request bad: .*{message}"):
            await engine.generate(replace(ask("bad"), **change))
        assert len((await engine.generate(replace(ask("good"), prompt_ids=(1,) * 44))).ids) == 20

    asyncio.run(main())


def test_a_sliding_window_shorter_than_the_context_is_refused():
    """I20: attention that the engine would compute otherwise than the model is an error at start, with the way out."""
    windowed = tiny_model()
    windowed.config.sliding_window = 32
    with pytest.raises(EngineError, match=r"sliding_window = 32, .*set engine\.max_context = 32"):
        make(windowed)
    assert make(windowed, max_context=32).capabilities.max_context == 32


def test_stop_strings_need_a_decode_callback(model):
    """I20: stop strings that could not be found are refused, not ignored."""
    with pytest.raises(RequestError, match="this engine was built without decode"):
        asyncio.run(make(model, decode=None).generate(ask("r", stop_strings=("x",))))


def test_request_ids_are_unique_in_flight(model):
    """Replies are joined by id, so two requests in flight cannot have one."""

    async def main():
        engine = make(model)
        one = asyncio.create_task(engine.generate(ask("same")))
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="request same is already in flight"):
            await engine.generate(ask("same"))
        assert len((await one).ids) == 20

    asyncio.run(main())


@pytest.mark.parametrize("when", ["prefill", "decode", "recompute"])
def test_a_raising_step_fails_every_request_and_the_engine(model, monkeypatch, when):
    """I19: when a step raises, running and waiting requests end with the cause, later calls raise at once, and
    nothing hangs."""

    def explode():
        raise MemoryError("no memory left")

    async def main():
        engine = make(model, max_batch_size=2, kv_policy="recompute")
        if when == "prefill":
            break_forward(monkeypatch, engine, explode)
        tasks = [asyncio.create_task(engine.generate(ask(f"r{i}", max_new_tokens=300))) for i in range(3)]
        if when != "prefill":
            await until(lambda: engine.stats().num_generated_tokens >= 4)
            await engine.pause("keep")
            break_forward(monkeypatch, engine, explode)
            if when == "recompute":
                await engine.update_weights(WeightUpdate(version=PolicyVersion(0, 1)))
            await engine.resume()
        for reply in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(reply, EngineError)
            assert "an engine step failed: MemoryError: no memory left" in str(reply)
            assert isinstance(reply.__cause__, MemoryError)
        assert not await engine.healthy()
        for call in (engine.generate(ask("later")), engine.resume(), engine.pause("keep"), engine.probe([ask("p")])):
            with pytest.raises(EngineError, match="the engine failed earlier: MemoryError"):
                await call
        await engine.close()

    asyncio.run(main())


def test_a_raising_probe_fails_the_engine(model, monkeypatch):
    """I6, I19: a probe whose step raises says so; the engine is dead for the requests it held."""

    def explode():
        raise MemoryError("no memory left")

    async def main():
        engine = make(model)
        await engine.pause("keep")
        held = asyncio.create_task(engine.generate(ask("held")))
        await asyncio.sleep(0)
        break_forward(monkeypatch, engine, explode)
        with pytest.raises(EngineError, match="failed during a probe: MemoryError"):
            await engine.probe([ask("p")])
        with pytest.raises(EngineError, match="no memory left"):
            await held
        assert not await engine.healthy()

    asyncio.run(main())


def test_broken_weights_end_in_an_error_not_in_tokens(monkeypatch):
    """I13: a model whose logits are NaN yields an error that says so."""
    broken = tiny_model()
    broken.model.norm.weight.data[3] = float("nan")
    with pytest.raises(EngineError, match="are not finite: the weights or the cache are broken"):
        asyncio.run(make(broken).generate(ask("r")))


def test_a_hung_step_is_the_callers_deadline_and_close_does_not_wait(model, monkeypatch):
    """I19: with the compute thread hung, generate and pause end by their callers' deadlines, abort still returns
    the partial reply, and close returns at once."""
    entered, release = threading.Event(), threading.Event()

    def hang():
        entered.set()
        release.wait()

    async def main():
        engine = make(model)
        task = asyncio.create_task(engine.generate(ask("r", max_new_tokens=300)))
        other = asyncio.create_task(engine.generate(ask("s", seed=1, max_new_tokens=300)))
        await until(lambda: engine.stats().num_generated_tokens >= 6)
        await engine.pause("keep")
        break_forward(monkeypatch, engine, hang)
        await engine.resume()
        await until(entered.is_set)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.pause("keep"), 0.05)
        await engine.abort("r")
        assert len((await task).ids) >= 3
        await engine.close()
        with pytest.raises(EngineError, match="request s: the engine was closed"):
            await other
        with pytest.raises(EngineError, match="the engine is closed"):
            await engine.generate(ask("late"))
        assert not await engine.healthy()
        await engine.close()

    try:
        asyncio.run(main())
    finally:
        release.set()


def test_one_engine_serves_one_loop_after_another(model):
    """An engine outlives the event loop of its first calls (a script that calls asyncio.run twice)."""
    engine = make(model)
    first, second = (asyncio.run(engine.generate(ask("r"))) for _ in range(2))
    assert first == second
