"""Runs jobs in one gloo group of processes that are forked after the imports of the test."""

import json
import os
import socket
import traceback

import torch
import torch.distributed as dist


def _child(rank, ranks, port, jobs, run, goes_on, pipe):
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    results = []
    for job in jobs:
        try:
            results.append(run(job, rank))
        except BaseException:  # pylint: disable=broad-except
            results.append(traceback.format_exc())
            if not goes_on:
                break
    os.write(pipe, (json.dumps(results) + "\n").encode())
    os._exit(0)


def run_ranks(ranks, jobs, run, *, goes_on=False):
    """Per rank: what run(job, rank) returned for each job, or a traceback, which ends the list unless `goes_on`.

    A rank that died has one text. Results are values of JSON. `goes_on` is for jobs that fail on all ranks alike: otherwise those
    that go on wait for the one that failed.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pipes, pids = [], []
    for rank in range(ranks):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            _child(rank, ranks, port, jobs, run, goes_on, write)
        os.close(write)
        pipes.append(os.fdopen(read))
        pids.append(pid)
    results = [pipe.read() for pipe in pipes]
    for pipe, pid in zip(pipes, pids):
        pipe.close()
        os.waitpid(pid, 0)
    return [json.loads(text) if text else ["the process died"] for text in results]
