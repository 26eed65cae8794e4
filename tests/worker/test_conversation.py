"""The conversation with a real process whose engine is a toy."""

from __future__ import annotations

import os
import signal
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from meshnode.errors import MeshError
from meshnode.worker import LoadSpec, Sampling, Worker, open_worker

Spec = Callable[..., LoadSpec]
SLEEP, ABORT, HANG, THROW = 271, 270, 272, 273  # ids that make the toy do so
PROMPT = list(b"the quick brown fox")


def code(raised: pytest.ExceptionInfo[MeshError]) -> str:
    return raised.value.code


async def generate(worker: Worker, handle: int, prompt: list[int], n: int, sampling: Sampling) -> list[int]:
    """n tokens of a whole model."""
    layers = (0, worker.loaded.n_layer)
    await worker.open(handle, sampling, prompt)
    ids, fed = list(prompt), 0
    for _ in range(n):
        reply = await worker.step(handle, fed, layers, tokens=ids[fed:], sample=True)
        assert reply.sampled is not None
        fed = len(ids)
        ids.append(reply.sampled.token)
    await worker.close(handle)
    return ids[len(prompt) :]


async def test_loads_and_says_what_it_loaded(fake_worker: Path, spec: Spec) -> None:
    asked = spec(layers=(2, 4), n_sessions=3, n_ctx=77, max_step=9, numerics="fast")
    async with open_worker(fake_worker, asked) as worker:
        loaded = worker.loaded
        assert (loaded.architecture, loaded.layers, loaded.n_layer) == ("fake", (2, 4), 6)
        assert (loaded.n_embd, loaded.n_vocab, loaded.n_sessions) == (16, 300, 3)
        assert (loaded.n_ctx, loaded.max_step, loaded.has_template) == (77, 9, True)
        assert loaded.recipe == '{"engine":"fake","numerics":"fast"}'
        assert loaded.fingerprint == "f" * 64
        assert worker.engine == "fake"
        assert os.stat(f"/proc/{worker.pid}/exe").st_ino == os.stat(fake_worker).st_ino


async def test_every_layer_when_no_range_is_given(fake_worker: Path, spec: Spec) -> None:
    async with open_worker(fake_worker, spec()) as worker:
        assert worker.loaded.layers == (0, 6)


async def test_stages_give_what_the_whole_model_gives(fake_worker: Path, spec: Spec) -> None:
    async with (
        open_worker(fake_worker, spec()) as whole,
        open_worker(fake_worker, spec(layers=(0, 4))) as head,
        open_worker(fake_worker, spec(layers=(2, 6))) as tail,
    ):
        for sampling in (Sampling(), Sampling(temperature=1.0, seed=5, repeat_penalty=1.2)):
            expected = await generate(whole, 1, PROMPT, 12, sampling)
            await head.open(1, sampling)
            await tail.open(1, sampling, PROMPT)
            ids, fed = list(PROMPT), 0
            while len(ids) < len(PROMPT) + 12:
                middle = await head.step(1, fed, (0, 3), tokens=ids[fed:])
                assert len(middle.residual) == (len(ids) - fed) * 16 * 4
                assert middle.sampled is None
                end = await tail.step(1, fed, (3, 6), residual=memoryview(middle.residual), sample=True)
                assert end.sampled is not None
                assert end.residual == b""
                fed = len(ids)
                ids.append(end.sampled.token)
            assert ids[len(PROMPT) :] == expected
            await head.close(1)
            await tail.close(1)
        assert len(set(expected)) > 3  # the toy does not repeat one token


async def test_a_new_tail_given_the_history_continues_the_same_text(fake_worker: Path, spec: Spec) -> None:
    sampling = Sampling(temperature=1.2, top_p=0.9, repeat_penalty=1.3, seed=2**64 - 1)
    async with open_worker(fake_worker, spec()) as first, open_worker(fake_worker, spec()) as second:
        text = await generate(first, 1, PROMPT, 20, sampling)
        assert await generate(second, 9, PROMPT + text[:7], 13, sampling) == text[7:]


async def test_sessions_beside_each_other_are_as_alone(fake_worker: Path, spec: Spec) -> None:
    async with open_worker(fake_worker, spec(n_sessions=8)) as worker:
        prompts = [list(f"prompt {n}".encode()) for n in range(8)]
        samplings = [Sampling(temperature=1.0, seed=n) for n in range(8)]
        alone = [await generate(worker, n, prompts[n], 15, samplings[n]) for n in range(8)]
        together: dict[int, list[int]] = {}

        async def one(n: int) -> None:
            together[n] = await generate(worker, n, prompts[n], 15, samplings[n])

        async with trio.open_nursery() as nursery:
            for n in range(8):
                nursery.start_soon(one, n)
        assert [together[n] for n in range(8)] == alone


async def test_sessions_in_lockstep_are_computed_together(
    fake_worker: Path, spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a moment's wait for the others every second batch would be of the one that asked first."""
    monkeypatch.setenv("MESHNODE_FAKE_LOG", "1")
    full = 0
    for _ in range(5):  # a busy machine may spread the requests
        async with open_worker(fake_worker, spec("meshnode-fake 9 16 99999")) as worker:  # logits take some ms
            async with trio.open_nursery() as nursery:
                for handle in range(4):
                    nursery.start_soon(generate, worker, handle, PROMPT, 30, Sampling())
            await trio.sleep(0.05)
            full = list(worker.log_tail).count("batch of 4")
        if full >= 14:
            return
    pytest.fail(f"{full} full batches of the last 20")


async def test_a_fork_has_the_cache_and_the_history_of_its_origin(fake_worker: Path, spec: Spec) -> None:
    seeded = Sampling(temperature=1.0, seed=4, frequency_penalty=0.5)
    async with open_worker(fake_worker, spec(n_sessions=2)) as worker:
        expected = await generate(worker, 1, PROMPT, 9, seeded)
        await worker.open(1, Sampling(), PROMPT)
        await worker.step(1, 0, (0, 6), tokens=PROMPT)
        await worker.fork(2, 1, len(PROMPT) - 1, seeded, PROMPT[-1:])
        await worker.close(1)
        ids = list(PROMPT)
        for n in range(9):
            at = len(PROMPT) - 1 + n
            reply = await worker.step(2, at, (0, 6), tokens=ids[at:], sample=True)
            assert reply.sampled is not None
            ids.append(reply.sampled.token)
        assert ids[len(PROMPT) :] == expected
        for keep, origin, fault in ((len(ids), 2, "cache_miss"), (0, 9, "unknown_session")):
            with pytest.raises(MeshError) as raised:
                await worker.fork(3, origin, keep, Sampling())
            assert code(raised) == fault
        await worker.fork(3, 2, 0, Sampling())
        with pytest.raises(MeshError) as raised:
            await worker.fork(4, 2, 0, Sampling())
        assert code(raised) == "busy"


async def test_a_repeated_push_samples_the_same(fake_worker: Path, spec: Spec) -> None:
    async with open_worker(fake_worker, spec()) as worker:
        await worker.open(1, Sampling(temperature=2.0, seed=3), PROMPT)
        first = await worker.step(1, 0, (0, 6), tokens=PROMPT, sample=True)
        await worker.truncate(1, 4)
        again = await worker.step(1, 4, (0, 6), tokens=PROMPT[4:], sample=True)
        assert again.sampled == first.sampled


async def test_a_repeated_push_of_a_residual_samples_the_same(fake_worker: Path, spec: Spec) -> None:
    sampling = Sampling(temperature=2.0, seed=3, repeat_penalty=3.0)
    async with open_worker(fake_worker, spec(layers=(3, 6))) as worker:
        await worker.open(1, sampling, [7])
        first = await worker.step(1, 0, (3, 6), residual=bytes(64), sample=True)
        second = await worker.step(1, 1, (3, 6), residual=bytes(64), sample=True)
        for _ in range(2):
            await worker.truncate(1, 0)
            assert (await worker.step(1, 0, (3, 6), residual=bytes(64), sample=True)).sampled == first.sampled
            assert (await worker.step(1, 1, (3, 6), residual=bytes(64), sample=True)).sampled == second.sampled


async def test_the_tail_without_sample_says_nothing(fake_worker: Path, spec: Spec) -> None:
    async with open_worker(fake_worker, spec()) as worker:
        await worker.open(1, Sampling())
        reply = await worker.step(1, 0, (0, 6), tokens=PROMPT)
        assert (reply.residual, reply.sampled) == (b"", None)
        assert reply.compute_ns > 0


async def test_tokens_and_pieces(fake_worker: Path, spec: Spec) -> None:
    async with open_worker(fake_worker, spec()) as worker:
        assert await worker.tokenize("é<end>", add_special=True, parse_special=True) == [257, 0xC3, 0xA9, 256]
        assert await worker.tokenize("<end>", add_special=False, parse_special=False) == list(b"<end>")
        assert await worker.tokenize_segments([(True, "a<end>"), (False, "<end>")]) == [257, *b"a", 256, *b"<end>"]
        assert (await worker.chat_facts()).controls == (b"<end>",)
        assert await worker.pieces([0xC3, 256, 299]) == [b"\xc3", b"", b"<299>"]
        assert await worker.pieces([]) == []
        many = [n % 256 for n in range(10_000)]  # more than one frame asks for
        assert b"".join(await worker.pieces(many)) == bytes(many)
        with pytest.raises(MeshError) as raised:
            await worker.pieces([300])
        assert code(raised) == "bad_frame"


async def test_busy_until_a_session_is_closed(fake_worker: Path, spec: Spec) -> None:
    async with open_worker(fake_worker, spec(n_sessions=2)) as worker:
        await worker.open(1, Sampling())
        await worker.open(2, Sampling())
        with pytest.raises(MeshError) as raised:
            await worker.open(3, Sampling())
        assert code(raised) == "busy"
        await worker.step(1, 0, (0, 6), tokens=PROMPT)
        await worker.close(1)
        await worker.close(1)
        await worker.open(3, Sampling())
        await worker.step(3, 0, (0, 6), tokens=PROMPT)  # its slot is empty again


@pytest.mark.parametrize(
    ("expected", "changes"),
    [
        ("unknown_session", {"handle": 9}),
        ("cache_miss", {"first_pos": 5}),
        ("bad_frame", {"first_pos": -1}),
        ("bad_layers", {"layers": (0, 7)}),
        ("bad_layers", {"layers": (3, 3)}),
        ("bad_frame", {"layers": (1, 6)}),  # tokens where a residual is due
        ("bad_frame", {"tokens": [300]}),
        ("bad_frame", {"tokens": [-1]}),
        ("bad_frame", {"tokens": [1] * 33}),  # over max_step
        ("bad_frame", {"tokens": None, "residual": bytes(60), "layers": (1, 6)}),  # no whole position
        ("bad_activation", {"tokens": None, "residual": b"\0\0\xc0\x7f" * 16, "layers": (1, 6)}),  # NaN
        ("bad_frame", {"tokens": []}),
        ("bad_frame", {"tokens": None}),
        ("bad_frame", {"residual": bytes(64)}),  # both
        ("bad_frame", {"tokens": [2**31]}),
        ("bad_frame", {"layers": (0, 3), "sample": True}),
        ("context_exceeded", {"tokens": [1] * 32}),
        ("internal", {"tokens": [THROW]}),
    ],
)
async def test_a_bad_step_leaves_all_as_it_was(
    fake_worker: Path, spec: Spec, expected: str, changes: dict[str, object]
) -> None:
    async with open_worker(fake_worker, spec(max_step=32, n_ctx=31)) as worker:
        await worker.open(1, Sampling(), PROMPT)
        step = {"handle": 1, "first_pos": 0, "layers": (0, 6), "tokens": PROMPT} | changes
        with pytest.raises(MeshError) as raised:
            await worker.step(**step)  # type: ignore[arg-type]
        assert code(raised) == expected
        reply = await worker.step(1, 0, (0, 6), tokens=PROMPT, sample=True)
        assert reply.sampled is not None


async def test_one_bad_step_of_a_batch_fails_alone(fake_worker: Path, spec: Spec) -> None:
    async with open_worker(fake_worker, spec(n_sessions=5)) as worker:
        for handle in range(5):
            await worker.open(handle, Sampling(), PROMPT)
        results: dict[int, object] = {}

        async def one(handle: int, first: int) -> None:
            try:
                results[handle] = (await worker.step(handle, first, (0, 6), tokens=PROMPT, sample=True)).sampled
            except MeshError as error:
                results[handle] = error.code

        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: worker.step(4, 0, (0, 6), tokens=[SLEEP]))
            await trio.sleep(0.02)
            for handle in range(4):
                nursery.start_soon(one, handle, 3 if handle == 2 else 0)
        assert results.pop(2) == "cache_miss"
        assert len(set(map(repr, results.values()))) == 1
        assert len(results) == 3


async def test_a_history_too_short_to_sample_from(fake_worker: Path, spec: Spec) -> None:
    async with open_worker(fake_worker, spec(layers=(3, 6))) as worker:
        await worker.open(1, Sampling(), [1, 2])
        rows = struct.pack("<48f", *([0.5] * 48))
        with pytest.raises(MeshError) as raised:
            await worker.step(1, 0, (3, 6), residual=rows, sample=True)
        assert code(raised) == "cache_miss"
        assert (await worker.step(1, 0, (3, 6), residual=rows[:128], sample=True)).sampled is not None


async def test_close_cancels_what_waits_and_then_frees(fake_worker: Path, spec: Spec) -> None:
    async with open_worker(fake_worker, spec(n_sessions=1)) as worker:
        await worker.open(1, Sampling())
        ends: list[str] = []

        async def push(first: int, token: int) -> None:
            try:
                await worker.step(1, first, (0, 6), tokens=[token])
                ends.append("done")
            except MeshError as error:
                ends.append(error.code)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(push, 0, SLEEP)
            await trio.sleep(0.02)
            nursery.start_soon(push, 1, 1)
            nursery.start_soon(push, 2, 1)
            await trio.sleep(0.02)
            await worker.close(1)
        assert sorted(ends) == ["cancelled", "cancelled", "done"]  # the one in progress was not cut short
        await worker.open(1, Sampling())
        await worker.step(1, 0, (0, 6), tokens=[1])


async def test_control_does_not_wait_behind_steps(fake_worker: Path, spec: Spec) -> None:
    async with open_worker(fake_worker, spec(n_sessions=4)) as worker:
        done: list[str] = []

        async def push(handle: int, layers: tuple[int, int]) -> None:
            await worker.step(handle, 0, layers, tokens=[SLEEP])
            done.append("step")

        async with trio.open_nursery() as nursery:
            for handle in range(4):
                await worker.open(handle, Sampling())
            for handle in range(4):  # ranges that differ cannot be one batch
                nursery.start_soon(push, handle, (0, handle + 1))
            await trio.sleep(0.02)
            await worker.tokenize("a", add_special=False, parse_special=False)
            assert len(done) <= 1  # the one in progress, which may wake up a moment later


async def test_cancelled_calls_leave_the_conversation_in_order(fake_worker: Path, spec: Spec) -> None:
    async with open_worker(fake_worker, spec("meshnode-fake 2 2048 300", n_sessions=2, n_ctx=4096)) as worker:
        await worker.open(1, Sampling())
        await worker.open(2, Sampling())
        rows = bytes(256 * 2048 * 4)  # 2 MiB: more than a pipe holds, so that the write itself is interrupted
        positions = 0
        for delay in [0.0, 0.0005, 0.001, 0.002, 0.004] * 3:
            with trio.move_on_after(delay):
                await worker.step(2, positions, (1, 2), residual=rows)
            reply = await worker.tokenize("abc", add_special=False, parse_special=False)
            assert reply == [97, 98, 99]
            await worker.close(2)
            await worker.open(2, Sampling())
        reply_1 = await worker.step(1, 0, (0, 1), tokens=PROMPT)
        assert len(reply_1.residual) == len(PROMPT) * 2048 * 4
        assert not worker._calls


async def test_large_residuals_both_ways(fake_worker: Path, spec: Spec) -> None:
    async with open_worker(fake_worker, spec("meshnode-fake 3 8192 300")) as worker:
        await worker.open(1, Sampling())
        await worker.open(2, Sampling())
        out = await worker.step(1, 0, (0, 1), tokens=list(range(256)))
        assert len(out.residual) == 256 * 8192 * 4
        through = await worker.step(2, 0, (1, 2), residual=out.residual)
        assert through.residual[4 * 8 : 4 * 8192] == out.residual[4 * 8 : 4 * 8192]  # the toy mixes 8 channels alone


async def test_a_text_over_the_bound_is_refused_here(fake_worker: Path, spec: Spec) -> None:
    async with open_worker(fake_worker, spec()) as worker:
        assert len(await worker.tokenize("a" * (1 << 20), add_special=False, parse_special=False)) == 1 << 20
        with pytest.raises(MeshError) as raised:
            await worker.tokenize("a" * (1 << 21), add_special=False, parse_special=False)
        assert code(raised) == "bad_frame"
        await worker.open(1, Sampling())


@pytest.mark.parametrize(
    ("how", "fault"),
    [(signal.SIGKILL, "SIGKILL"), (signal.SIGBUS, "SIGBUS"), (signal.SIGTERM, "SIGTERM")],
)
async def test_death_wakes_every_call_and_is_named(fake_worker: Path, spec: Spec, how: int, fault: str) -> None:
    async with open_worker(fake_worker, spec(n_sessions=3)) as worker:
        for handle in range(3):
            await worker.open(handle, Sampling())
        errors: list[MeshError] = []

        async def push(handle: int, token: int) -> None:
            with pytest.raises(MeshError) as raised:
                await worker.step(handle, 0, (0, handle + 1), tokens=[token])
            errors.append(raised.value)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(push, 0, HANG)
            await trio.sleep(0.02)
            nursery.start_soon(push, 1, 1)
            nursery.start_soon(push, 2, 1)
            await trio.sleep(0.02)
            began = trio.current_time()
            os.kill(worker.pid, how)
        assert trio.current_time() - began < 0.25
        assert [(e.code, fault in e.message) for e in errors] == [("worker_died", True)] * 3
        await worker.died.wait()
        assert worker.fault is not None
        assert fault in worker.fault.message
        with pytest.raises(MeshError) as raised:
            await worker.open(4, Sampling())
        assert code(raised) == "worker_died"


async def test_an_abort_is_named(fake_worker: Path, spec: Spec) -> None:
    async with open_worker(fake_worker, spec()) as worker:
        await worker.open(1, Sampling())
        with pytest.raises(MeshError, match="SIGABRT") as raised:
            await worker.step(1, 0, (0, 6), tokens=[ABORT])
        assert code(raised) == "worker_died"


async def test_a_hang_is_killed(fake_worker: Path, spec: Spec) -> None:
    async with open_worker(fake_worker, spec(), step_timeout=0.3) as worker:
        await worker.open(1, Sampling())
        began = trio.current_time()
        with pytest.raises(MeshError) as raised:
            await worker.step(1, 0, (0, 6), tokens=[HANG])
        assert code(raised) == "worker_hung"
        assert 0.25 < trio.current_time() - began < 0.8
        await worker.died.wait()
        assert str(worker.pid) not in os.listdir("/proc")


async def test_a_stopped_worker_is_killed(fake_worker: Path, spec: Spec) -> None:
    async with open_worker(fake_worker, spec(), step_timeout=0.3) as worker:
        os.kill(worker.pid, signal.SIGSTOP)
        with pytest.raises(MeshError) as raised:
            await worker.open(1, Sampling())
        assert code(raised) == "worker_hung"
        await worker.died.wait()


async def test_waiting_behind_others_is_no_hang(fake_worker: Path, spec: Spec) -> None:
    async with open_worker(fake_worker, spec(n_sessions=6), step_timeout=0.35) as worker:
        await trio.sleep(0.4)  # nor is having nothing to do
        async with trio.open_nursery() as nursery:
            for handle in range(6):  # 100 ms each
                await worker.open(handle, Sampling())
                nursery.start_soon(lambda h=handle: worker.step(h, 0, (0, h + 1), tokens=[SLEEP]))
        assert worker.fault is None


async def test_cancel_kills_and_reaps(fake_worker: Path, spec: Spec) -> None:
    before = set(os.listdir("/proc/self/fd"))
    made = spec()
    pid = 0
    with trio.move_on_after(0.5):
        async with open_worker(fake_worker, made) as worker:
            pid = worker.pid
            os.kill(pid, signal.SIGSTOP)
            await trio.sleep_forever()
    assert pid
    assert str(pid) not in os.listdir("/proc")
    assert len(set(os.listdir("/proc/self/fd")) - before) == 1  # the model


async def test_the_body_s_error_goes_on_unwrapped(fake_worker: Path, spec: Spec) -> None:
    with pytest.raises(KeyError):
        async with open_worker(fake_worker, spec()) as worker:
            raise KeyError(worker.pid)


async def test_calls_of_outside_end_when_the_worker_is_stopped(fake_worker: Path, spec: Spec) -> None:
    ends: list[str] = []

    async def push(worker: Worker) -> None:
        with pytest.raises(MeshError) as raised:
            await worker.step(1, 0, (0, 6), tokens=[HANG])
        ends.append(code(raised))

    async with trio.open_nursery() as nursery:
        async with open_worker(fake_worker, spec()) as worker:
            await worker.open(1, Sampling())
            nursery.start_soon(push, worker)
            await trio.sleep(0.05)
    assert ends == ["cancelled"]


async def test_a_text_that_takes_too_long_is_refused_beside_the_others(fake_worker: Path, spec: Spec) -> None:
    async with open_worker(fake_worker, spec()) as worker:
        await worker.open(1, Sampling())

        async def hang(parse: bool) -> None:
            with pytest.raises(MeshError, match="longer than 2000 ms") as refused:
                await worker.tokenize("<hang>" + "x" * 5000, add_special=False, parse_special=parse)
            assert refused.value.code == "bad_prompt"

        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(hang, True)
            await trio.sleep(0.1)
            assert (await worker.step(1, 0, (0, 6), tokens=[1, 2, 3], sample=True)).sampled is not None
            assert len(await worker.tokenize("short", add_special=False, parse_special=False)) == 5
            assert trio.current_time() - began < 1.5
        assert 1.9 < trio.current_time() - began < 4
        long = await worker.tokenize("é" * 5000, add_special=True, parse_special=True)
        assert long == [257, *"é".encode() * 5000]
        children = Path(f"/proc/{worker.pid}/task").glob("*/children")
        assert not "".join(c.read_text() for c in children).strip(), "nothing is left"
