"""Orders of a pipeline's actions: our generators beside the schedules of torch 2.13, which need no processes for that.

    python3 tests/schedule/torch_pipeline_orders.py PROGRAM

PROGRAM reads lines "schedule ranks stages-per-rank micro-batches" and writes the ranks' actions, or why there are none.
"""

import itertools
import subprocess
import sys

try:
    from torch.distributed.pipelining import schedules
except ImportError as missing:
    print(f"{missing}: skipped")
    sys.exit(77)

CLASSES = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B", "interleaved": "ScheduleInterleaved1F1B", "looped_bfs": "ScheduleLoopedBFS",
           "zero_bubble": "ScheduleInterleavedZeroBubble", "zbv": "ScheduleZBVZeroBubble", "dualpipev": "ScheduleDualPipeV"}
SINGLE = ("gpipe", "1f1b")
V_SHAPED = ("zbv", "dualpipev")


class Stage:
    """As much of a PipelineStage as a schedule asks for; what it is told to do goes to `log`."""

    def __init__(self, index, ranks, stages, log=None):
        self.stage_index, self.num_stages, self.group_size, self.group_rank = index, stages, ranks, 0
        self.group, self.has_backward, self.submod, self.device, self.dw_builder = None, True, None, None, None
        self.is_first, self.is_last, self.log = index == 0, index == stages - 1, log

    def get_fwd_recv_ops(self, m):
        return [] if self.is_first else [f"{self.stage_index}RECV_F{m}"]

    def get_fwd_send_ops(self, m):
        return [] if self.is_last else [f"{self.stage_index}SEND_F{m}"]

    def get_bwd_recv_ops(self, m):
        return [] if self.is_last else [f"{self.stage_index}RECV_B{m}"]

    def get_bwd_send_ops(self, m):
        return [] if self.is_first else [f"{self.stage_index}SEND_B{m}"]

    def forward_one_chunk(self, m, *_, **__):
        self.log.append(f"{self.stage_index}F{m}")

    def backward_one_chunk(self, m, **_):
        self.log.append(f"{self.stage_index}B{m}")

    def perform_reduce_grad(self, _):
        self.log.append(f"{self.stage_index}REDUCE_GRAD")


def run_rank(made, rank, ranks, micro_batches):
    """The passes, transfers and waits of one rank, as its _step_microbatches issues them (its _get_pipeline_order begins the last
    rank's 1F1B with micro-batch 1)."""
    log = []

    def batch(ops, desc=None):
        log.extend(["+".join(ops)] if ops else [])
        return list(ops)

    def wait(work):
        # What has come or joined is waited for at once.
        sends = [w for w in work if "SEND" in w]
        if sends and log[-1] != "+".join(work) and not (log[-1].endswith("WAIT")):
            log.append(f"{rank}WAIT")
        elif sends and len(work) == 1 and log[-1] == work[0]:
            log.append(f"{rank}WAIT")

    schedules._batch_p2p, schedules._wait_batch_p2p = batch, wait
    schedules._sorted_batch_p2p = lambda ops, desc=None: {0: batch(ops)} if ops else {}
    schedule = made(Stage(rank, ranks, ranks, log), micro_batches, loss_fn=lambda x, y: x)
    schedule._check_inputs = lambda *_: ([None] * micro_batches, [None] * micro_batches)
    schedule._initialize_stage = schedule._maybe_compute_loss = schedule._maybe_get_loss = schedule._update_losses = lambda *_: None
    schedule._step_microbatches()
    return ",".join(log)


def torch_orders(name, ranks, per_rank, micro_batches):
    """The text of each rank's actions."""
    made = getattr(schedules, CLASSES[name])
    if name in SINGLE:
        return "|".join(run_rank(made, rank, ranks, micro_batches) for rank in range(ranks))
    own = [i * ranks + (ranks - 1 if name in V_SHAPED and i % 2 else 0) for i in range(per_rank)]
    schedule = made([Stage(i, ranks, ranks * per_rank) for i in own], micro_batches, loss_fn=lambda x, y: x)
    return "|".join(in_order([*map(text_of, schedule.pipeline_order_with_comms[r]), f"{r}WAIT"]) for r in range(ranks))


def text_of(action):
    return "+".join(map(str, action.sub_actions or (action,)))


def in_order(actions):
    """Its text; stages that are dropped together are in the order of a set of torch's."""
    return ",".join(",".join(sorted(group)) if is_drop else ",".join(group)
                    for is_drop, group in itertools.groupby(actions, lambda action: "RESHARD" in action))


def cases():
    """All of 2 to 6 ranks (and 8), whatever torch says of them."""
    for name in CLASSES:
        for ranks in (2, 3, 4, 6, 8):
            for per_rank in (1,) if name in SINGLE else (1, 2, 3, 4):
                for micro_batches in (1, 3, 4, 6, 8, 12, 16, 17, 24):
                    yield name, ranks, per_rank, micro_batches


def main(program):
    every = list(cases())
    lines = "".join(" ".join(map(str, case)) + "\n" for case in every)
    ours = subprocess.run([program], input=lines, capture_output=True, text=True, check=True).stdout.splitlines()
    equal, refused, wrong = 0, 0, 0
    for case, found in zip(every, ours, strict=True):
        try:
            expected = torch_orders(*case)
        except (ValueError, AssertionError, IndexError, KeyError):
            expected = None
        if expected is None or found.startswith("refused"):
            refused += 1
            agrees = expected is None and found.startswith("refused")
        else:
            equal += 1
            agrees = "|".join(in_order(rank.split(",")) for rank in found.split("|")) == expected
        if not agrees:
            wrong += 1
            print(f"{case}:\n  ours   {found[:400]}\n  torch  {str(expected)[:400]}")
    print(f"{equal} orders compared, {refused} refused, {wrong} differ")
    return 1 if wrong or equal < 60 else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
