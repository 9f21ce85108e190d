"""Serve a trained policy over HTTP as OpenAI's chat completions: `python -m launch.serve --workdir=RUN [--port=8000]`.

With `--config=F.py` the model of its model.path is served as it is, untrained. An agent that exists already is rolled
out against it as it is: its conversations go on token by token (launch/conversations.py), and `--record=D` keeps each
as a Trajectory in D/episodes when it ends: read them with rl.episodes.read_episodes(D).

    curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json' \\
        -d '{"model": "NAME", "messages": [{"role": "user", "content": "What is the capital of Peru?"}]}'
"""

import contextlib
import logging
import socket
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import flags

from launch import cli
from launch.evaluate import want_model
from launch.plan import Plan, make_plan, on_one_device
from launch.workdir import locked

if TYPE_CHECKING:
    import uvicorn

    from models.codec import Codec
    from rl.rollout.engine import Engine
    from rl.types import Trajectory

_TIDY_S = 10.0  # how often idle conversations are ended, and ended ones are recorded


def record_episodes(folder: Path, trajectories: Sequence["Trajectory"]) -> None:
    """One more file in `folder`/episodes, whole or not at all. Errors: OSError and what the writer raises."""
    from rl.episodes import EpisodeLog

    log = EpisodeLog(folder)
    for trajectory in trajectories:
        log.append(trajectory)
    log.close()  # not where one of them failed: a file that is not whole keeps its temporary name


@contextlib.contextmanager
def serving(
    engine: "Engine",
    codec: "Codec",
    *,
    name: str,
    temperature: float,
    sessions: int,
    waiting: int,
    idle_s: float,
    seed: int = 0,
    record: Path | None = None,
) -> Iterator["uvicorn.Server"]:
    """A server to run; when the block ends, every conversation has ended and is recorded. The caller closes the engine.

    Errors: ConfigError where the extra [serve] is not installed or another process records to the same folder; at the
    end, what kept the last conversations from being recorded.
    """
    front = _front()
    from launch.chat_api import Served
    from launch.conversations import Conversations

    with locked(record, "--record") if record else contextlib.nullcontext():
        keep: dict[str, Any] = {"keep": partial(record_episodes, record)} if record else {}
        limits = {"limit": sessions, "waiting": waiting, "idle_s": idle_s}
        store = Conversations(engine, codec, seed=seed, **limits, **keep)

        def tidy() -> None:
            store.end_idle()
            store.keep_ended()

        served = Served(name, codec, temperature, engine.capacity, sessions)
        face = front.Front(
            served, engine, store, threads=sessions + waiting, tidy=tidy, tidy_s=min(_TIDY_S, idle_s / 2)
        )
        try:
            yield front.Server(face)
        finally:
            face.close()
            try:
                store.keep_ended()
            except Exception:
                logging.error("%d conversations could not be recorded and are lost", store.stats()["unkept"])
                raise


def _front() -> Any:
    try:
        from launch import front
    except ModuleNotFoundError as err:
        if err.name not in ("starlette", "uvicorn"):
            raise
        raise cli.ConfigError(
            f"launch.serve wants {err.name}, which is not installed; pip install 'wayfinder-rl[serve]'"
        ) from err
    return front


def sessions_of(plan: Plan, given: int | None) -> int:
    """How many conversations keep their KV: those that are `given`, or as many as all replicas hold. Errors:
    ConfigError where they hold fewer.
    """
    e = plan.engine
    most = e.residents * e.replicas
    if given is not None and given > most:
        product = f"engine.residents x engine.replicas = {e.residents} x {e.replicas} = {most}"
        raise cli.ConfigError(f"--sessions: got {given}, want at most {product}; raise either")
    return given or most


def main(_) -> None:
    given = flags.FLAGS
    with cli.validating():
        if (given.workdir is None) == (given["config"].value is None):
            raise cli.ConfigError("want one of --workdir=D (a run) and --config=F.py (its model.path)")
        plan = on_one_device(make_plan(cli.resolve(given.config, given.workdir)))
        if not given.workdir:
            want_model(plan)
        sessions = sessions_of(plan, given.sessions)
        _front()
        listener = socket.create_server((given.host, given.port))
    with listener:
        from launch import build, runs

        with cli.validating():
            codec, model, params = runs.open_policy(plan, Path(given.workdir) if given.workdir else None)
        build.use_compilation_cache()
        engine = build.build_engine(plan, model, params, 0, codec)
        try:
            engine.warm_up()
            with serving(
                engine,
                codec,
                name=given.name or plan.name,
                temperature=plan.rl.temperature,
                sessions=sessions,
                waiting=given.waiting,
                idle_s=given.idle_s,
                seed=given.seed,
                record=Path(given.record) if given.record else None,
            ) as server:
                host, port = listener.getsockname()[:2]
                print(f"serving {given.name or plan.name} at http://{host}:{port}/v1", flush=True)
                with runs.stopping():  # the server hands its signal on when it has stopped
                    server.run(sockets=[listener])
        finally:
            engine.close()


def define_flags() -> None:
    """Only where this file is the program: the mains import one another."""
    cli.define_config()
    cli.define_workdir()
    flags.DEFINE_string("host", "127.0.0.1", "Address to listen at; whoever reaches it may ask")
    flags.DEFINE_integer("port", 8000, "Port; 0 takes a free one", 0, 65535)
    flags.DEFINE_string("name", None, "Of the model, as requests name it (default: the run's name)")
    flags.DEFINE_string("record", None, "Folder whose episodes/ gets each conversation when it ends")
    flags.DEFINE_integer(
        "sessions", None, "Conversations that keep their KV (default: engine.residents x engine.replicas)", 1
    )
    flags.DEFINE_integer("waiting", 64, "Requests that may wait for a session; more are told 503", 0)
    flags.DEFINE_float("idle_s", 600.0, "A conversation ends when it was idle so long", 0.01)
    flags.DEFINE_integer("seed", 0, "Of sampling, for requests without a seed", 0, cli.MOST_SEED)


if __name__ == "__main__":
    define_flags()
    cli.run(main)
