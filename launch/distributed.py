"""Several processes as one run: how they come together, share a workdir and end.

All of them get the same command line but for `--process_id`, and see the same files: the workdir and the data folder.
Process 0 writes the records, commits the checkpoints and prints. However one of them ends, the others end too: by what
it told them (rl/hosts.py), by a connection that broke, or at the latest when its heartbeat is missed.
"""

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_collections

from launch import cli

if TYPE_CHECKING:  # importing it starts jax, which flags precede
    from rl.hosts import Hosts

HEARTBEAT_S = 60  # a process that stops without a word is missed after so long
GRACE_S = 3.0  # process 0 holds the others' connection: it goes last, so that they can say what they know


@contextlib.contextmanager
def joined(coordinator: str, processes: int, process: int) -> Iterator["Hosts"]:
    """The processes of this run, for as long as the block runs; one alone where `coordinator` is "".

    "auto": the cluster says who belongs together (a TPU pod, Slurm, Open MPI, Kubernetes). Among several, what raises
    in the block ends this process at once: whoever waited for the others here would be waited for.
    """
    from rl import hosts

    if not coordinator:
        yield hosts.ALONE
        return
    with cli.validating():
        _initialize(coordinator, processes, process)
    here = hosts.join()
    try:
        with contextlib.ExitStack() as stack:
            if here.index:
                nowhere = stack.enter_context(open(os.devnull, "w"))
                stack.enter_context(contextlib.redirect_stdout(nowhere))
            yield here
    except BaseException as error:
        _end(here, error)

    import jax

    jax.distributed.shutdown()


def check_same(hosts: "Hosts", config: ml_collections.ConfigDict, **given: Any) -> None:
    """That all processes were started alike. Errors: ConfigError."""
    said = {**cli.leaves(config), **{f"--{name}": value for name, value in given.items()}}
    mine = {name: repr(value) for name, value in said.items()}
    for i, theirs in enumerate(hosts.exchange(mine)):
        differing = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
        if differing:
            name = differing[0]
            raise cli.ConfigError(
                f"{name}: got {mine.get(name, 'nothing')} in process {hosts.index}, {theirs.get(name, 'nothing')} in "
                f"process {i}; start all processes with one command line"
            )


@contextlib.contextmanager
def opened(hosts: "Hosts", workdir: str | os.PathLike, config: ml_collections.ConfigDict) -> Iterator[cli.Workdir]:
    """The workdir, made or reopened and locked by process 0 for all of them."""
    with contextlib.ExitStack() as stack:
        with hosts.telling():
            if hosts.index == 0:
                stack.enter_context(cli.open_workdir(workdir, config))
        hosts.exchange(None)
        yield Path(workdir)


def _initialize(coordinator: str, processes: int, process: int) -> None:
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it takes SIGTERM for itself; the loop stops by its own
    if coordinator == "auto":
        jax.distributed.initialize(heartbeat_timeout_seconds=HEARTBEAT_S)
    else:
        jax.distributed.initialize(coordinator, processes, process, heartbeat_timeout_seconds=HEARTBEAT_S)


def _end(here: "Hosts", error: BaseException) -> None:
    """The last words of this process, without jax's own end, which would wait for all the others."""
    status = 1
    if isinstance(error, cli.ConfigError):
        status = cli.EXIT_BAD_INPUT
        print(f"error: {error}", file=sys.stderr)
    else:
        traceback.print_exception(error)
        print(f"error: process {here.index} of {here.count} failed: {type(error).__name__}: {error}", file=sys.stderr)
    sys.stderr.flush()
    if here.index == 0:
        time.sleep(GRACE_S)
    os._exit(status)
