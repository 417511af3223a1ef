"""Strangers at the port of a run: what they send, replay or announce changes no bit of it, and costs it next to nothing. All on
127.0.0.1. SHARDWRIGHT_DEEP=1: 10,000 frames for two ranks and as many for four."""

import hashlib
import hmac
import json
import os
import pathlib
import random
import resource
import socket
import struct
import subprocess
import sys
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import shardwright_test_case
from shardwright_test_case import ShardwrightTestCase, main

CONFIG = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 16, "vocab_size": 500}
MAGIC = b"SWkey2\r\n"
FRAME = struct.Struct("=IiiiiiqQ")  # magic, kind, from, to, channel, size, bytes, left
FRAME_MAGIC = 0x53575432
DEEP = "SHARDWRIGHT_DEEP" in os.environ
FRAMES = 10_000 if DEEP else 300


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def knock(port, limit=10.0):
    return socket.create_connection(("127.0.0.1", port), timeout=limit)


def reset(connection):
    """Closes without leaving the port in TIME_WAIT."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def read_exactly(connection, count):
    data = b""
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            return data
        data += piece
    return data


def resident_mib(process):
    for line in pathlib.Path(f"/proc/{process.pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    return 0.0


class Proxy:
    """Between workers and rank 0: keeps what goes by, and may change frame `victim` of the workers (or of rank 0)."""

    def __init__(self, port, change=None):
        self.port, self.change = port, change
        self.server = socket.create_server(("127.0.0.1", 0))
        self.recorded = []  # (from a worker, bytes)
        self.ends = []
        self.threads = [threading.Thread(target=self.accept, daemon=True)]
        self.threads[0].start()

    def accept(self):
        while True:
            try:
                worker, _ = self.server.accept()
            except OSError:
                return
            for _ in range(2000):
                try:
                    first = knock(self.port)
                    break
                except OSError:
                    time.sleep(0.01)
            self.ends += [worker, first]
            for ends in ((worker, first, True), (first, worker, False)):
                thread = threading.Thread(target=self.pump, args=ends, daemon=True)
                thread.start()
                self.threads.append(thread)

    def pump(self, source, target, of_worker):
        # What a handshake is, then frames.
        parts = [72] if of_worker else [40, 40]
        try:
            source.settimeout(120)
            while True:
                if parts:
                    data = read_exactly(source, parts.pop(0))
                    if not data:
                        break
                else:
                    data = read_exactly(source, FRAME.size)
                    if len(data) < FRAME.size:
                        break
                    length = FRAME.unpack(data)[6]
                    body = read_exactly(source, length)
                    if self.change:
                        data = self.change(of_worker, data)
                    data += body
                self.recorded.append((of_worker, data))
                target.sendall(data)
        except OSError:
            pass
        for end in (source, target):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def close(self):
        self.server.shutdown(socket.SHUT_RDWR)  # wakes the one that accepts
        for thread in self.threads:
            thread.join(10)
        for end in (self.server, *self.ends):
            end.close()


class Wire(ShardwrightTestCase):

    def setUp(self):
        super().setUp()
        (self.folder / "config.json").write_text(json.dumps(CONFIG))
        self.key = os.urandom(32).hex()
        self.write_key(self.key)
        self.port = free_port()

    def write_key(self, text, mode=0o600, name="key"):
        path = self.folder / name
        path.write_text(text)
        path.chmod(mode)
        return name

    def plan(self, ranks):
        name = f"{ranks}.json"
        self.succeed("plan", "--model", "./config.json", "--cluster", f"h100-80 x{ranks}, nvlink 450 GB/s", "--kernel-set",
                     "shardwright-host", "--precision", "fp32", "--seq", "16", "--micro-batch", "2", "--global-batch",
                     str(2 * ranks), "-o", name)
        return name

    def start(self, rank, ranks, *flags, port=None, limit=None, **variables):
        environment = dict(os.environ, OPENBLAS_NUM_THREADS="1", RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank),
                           MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port or self.port), **variables)
        # 1 s or so for the ranks to end when a test has failed.
        process = subprocess.Popen([shardwright_test_case.PROGRAM, "run", self.plan_file, "--data", "random:100", "--json", *flags],
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=self.folder, env=environment,
                                   preexec_fn=limit)
        self.addCleanup(lambda: (process.kill(), process.communicate()) if process.poll() is None else None)
        return process

    def losses(self, runs):
        """Of rank 0, when all have ended well."""
        ends = [(*run.communicate(timeout=300), run.returncode) for run in runs]
        self.assertEqual([end[2] for end in ends], [0] * len(runs), ends)
        return [step["loss"] for step in json.loads(ends[0][0])["steps"]]

    def undisturbed(self, ranks, steps):
        self.plan_file = self.plan(ranks)
        code, out, err = self.run_program("run", self.plan_file, "--data", "random:100", "--json", "--steps", str(steps))
        self.assertEqual(code, 0, err)
        return [step["loss"] for step in json.loads(out)["steps"]]

    def prove(self, connection, key):
        """The worker's side of the handshake, by Python's own HMAC; whether rank 0 accepts it, and the session's key."""
        challenge = read_exactly(connection, 40)
        self.assertEqual(challenge[:8], MAGIC)
        nonce = os.urandom(32)
        session = hmac.digest(key.encode(), b"shardwright 2" + challenge[8:] + nonce, hashlib.sha256)
        connection.sendall(MAGIC + nonce + hmac.digest(session, b"worker", hashlib.sha256))
        answer = read_exactly(connection, 40)
        accepted = answer == MAGIC + hmac.digest(session, b"rank 0", hashlib.sha256)
        self.assertTrue(accepted or answer == MAGIC + bytes(32))
        return accepted, session

    def test_handshake_is_what_it_says(self):
        self.plan_file = self.plan(2)
        zero = self.start(0, 2, "--rendezvous-key", "key", "--timeout", "20 s")
        self.wait_for_port()
        with knock(self.port) as connection:
            self.assertFalse(self.prove(connection, self.key[::-1])[0])
            self.assertEqual(connection.recv(1), b"")
        with knock(self.port) as connection:
            accepted, session = self.prove(connection, self.key)
            self.assertTrue(accepted)
            # Of another job: only now a name is told, and only because the key is right.
            proof = hmac.digest(session, b"hello 1 2 theirs", hashlib.sha256)
            connection.sendall(FRAME.pack(FRAME_MAGIC, 0, 1, 0, 0, 2, 32 + 6, 0) + proof + b"theirs")
            frame = FRAME.unpack(read_exactly(connection, FRAME.size))
            self.assertEqual((frame[0], frame[1]), (FRAME_MAGIC, 4))
            self.assertEqual(read_exactly(connection, frame[6]), b'rank 1: it belongs to job "theirs", rank 0 to job ""')
        zero.kill()
        zero.communicate()

    def wait_for_port(self):
        for _ in range(2000):
            try:
                knock(self.port).close()
                return
            except OSError:
                time.sleep(0.01)
        self.fail("rank 0 does not listen")

    def test_who_has_no_key_takes_no_rank(self):
        # A rank of the same job and plan with other data and another key, or none, is there first.
        expected = self.undisturbed(2, 5)
        self.write_key("x" * 32, name="other")
        flags = ("--rendezvous-key", "key", "--steps", "5")
        zero = self.start(0, 2, *flags)
        self.wait_for_port()
        strange = self.start(1, 2, "--rendezvous-key", "other", "--seed", "7", "--timeout", "5 s")
        _, err = strange.communicate(timeout=100)
        self.assertEqual(strange.returncode, 5)
        self.assertIn(f"error: rank 1: rank 0 at 127.0.0.1:{self.port} has another key; give all ranks the same "
                      "--rendezvous-key\n", err)
        alone = self.start(1, 2, "--seed", "7", "--timeout", "1 s")
        _, err = alone.communicate(timeout=100)
        self.assertEqual(alone.returncode, 5)
        self.assertIn(f"error: rank 1: rank 0 does not answer at 127.0.0.1:{self.port} within 1000 ms: Connection refused "
                      "(without a key only among processes of one user on one machine)\n", err)
        self.assertEqual(self.losses([zero, self.start(1, 2, *flags)]), expected)

    def test_idle_connections_lock_nobody_out(self):
        expected = self.undisturbed(2, 3)
        flags = ("--rendezvous-key", "key", "--steps", "3")
        zero = self.start(0, 2, *flags, limit=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256)))
        self.wait_for_port()
        idle = [knock(self.port) for _ in range(301)]
        self.assertEqual(self.losses([zero, self.start(1, 2, *flags)]), expected)
        for connection in idle:
            connection.close()

    def frames(self, recorded, rng):
        """Random, mutated and replayed, one after the other."""
        workers = [data for of_worker, data in recorded if of_worker]
        while True:
            yield rng.randbytes(rng.randrange(1, 4096))
            yield rng.choice(workers)
            yield b"".join(workers[:4])  # a whole session from its beginning
            yield rng.choice(recorded)[1]
            mutated = bytearray(rng.choice(workers)[:4096])
            for _ in range(rng.randrange(1, 6)):
                mutated[rng.randrange(len(mutated))] = rng.randrange(256)
            yield bytes(mutated)
            yield MAGIC + rng.randbytes(64)
            yield FRAME.pack(FRAME_MAGIC, rng.randrange(6), rng.randrange(4), 0, 0, 2, 1 << rng.randrange(63), 0) + rng.randbytes(99)

    def disturb(self, frames, count, until=lambda: False):
        """Sends so many frames, each over a connection of its own; how many found a port."""
        taken = 0
        for _ in range(count):
            if until():
                break
            try:
                connection = knock(self.port, 0.5)
            except OSError:
                next(frames)
                time.sleep(0.0005)
                continue
            taken += 1
            try:
                connection.sendall(next(frames))
                if taken % 8 == 0:
                    connection.recv(4096)  # waits for an answer
            except OSError:
                pass
            reset(connection)
        return taken

    def test_frames_of_strangers_change_no_bit(self):
        rng = random.Random(5)
        for ranks in (2, 4):
            with self.subTest(ranks=ranks):
                steps = 30
                expected = self.undisturbed(ranks, steps)
                flags = ["--rendezvous-key", "key", "--steps", str(steps), "--every", "5", "--checkpoint", f"heard-{ranks}"]
                # What a whole run says, by a proxy that listens.
                self.port = free_port()
                proxy = Proxy(self.port)
                listened = [self.start(r, ranks, *flags, port=None if r == 0 else proxy.server.getsockname()[1])
                            for r in range(ranks)]
                self.assertEqual(self.losses(listened), expected)
                proxy.close()
                self.assertGreater(len(proxy.recorded), 100)
                # Some ranks are there, all are, and to the end.
                self.port = free_port()
                flags[-1] = f"disturbed-{ranks}"
                frames = self.frames(proxy.recorded, rng)
                runs = [self.start(0, ranks, *flags)]
                self.wait_for_port()
                before = resident_mib(runs[0])
                taken = self.disturb(frames, FRAMES // 2)
                self.assertEqual(taken, FRAMES // 2)
                runs += [self.start(r, ranks, *flags) for r in range(1, ranks - 1)]
                taken += self.disturb(frames, FRAMES // 2)
                self.assertGreater(taken, FRAMES * 3 // 4)
                self.assertLess(resident_mib(runs[0]) - before, 50)
                runs.append(self.start(ranks - 1, ranks, *flags))
                late = threading.Thread(target=self.disturb,
                                        args=(frames, 10 * FRAMES, lambda: all(run.poll() is not None for run in runs)))
                late.start()
                self.assertEqual(self.losses(runs), expected)
                late.join()

    def test_changed_frames_change_no_bit_or_end_the_run_in_words(self):
        # A frame's head is changed on its way, of a worker or of rank 0, early or late. (Bytes of gradients would change losses
        # unseen: who sits on the line can do that, see docs/security.md.)
        rng = random.Random(11)
        expected = self.undisturbed(2, 3)
        always = ("--rendezvous-key", "key", "--steps", "3", "--timeout", "2 s", "--every", "1", "--checkpoint")
        ended = 0
        for number in range(100 if DEEP else 8):
            state = {"left": rng.randrange(0, 2 if number % 2 else 120), "done": False}
            of = number % 4 < 2

            def change(of_worker, data, state=state, of=of):
                if of_worker != of or state["done"]:
                    return data
                state["left"] -= 1
                if state["left"] >= 0:
                    return data
                state["done"] = True
                changed = bytearray(data)
                changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
                return bytes(changed)

            self.port = free_port()
            proxy = Proxy(self.port, change)
            flags = (*always, f"c{number}")
            runs = [self.start(0, 2, *flags), self.start(1, 2, *flags, port=proxy.server.getsockname()[1])]
            ends = [(*run.communicate(timeout=100), run.returncode) for run in runs]
            proxy.close()
            with self.subTest(number=number, ends=ends):
                for _, err, code in ends:
                    self.assertIn(code, (0, 5))
                    if code == 5:
                        self.assertRegex(err, "error: .*rank [01]")
                        ended += 1
                if ends[0][2] == 0:
                    self.assertEqual([step["loss"] for step in json.loads(ends[0][0])["steps"]], expected)
        self.assertGreater(ended, 0)

    def test_keys(self):
        self.plan_file = self.plan(2)

        def refused(code, error, *flags, **variables):
            run = self.start(1, 2, *flags, **variables)
            out, err = run.communicate(timeout=60)
            self.assertEqual((run.returncode, out), (code, ""), err)
            self.assertIn(f"error: {error}", err)

        refused(3, "wide: got mode 640, expected a file that only its owner can read; chmod 600 wide\n", "--rendezvous-key",
                self.write_key(self.key, 0o640, "wide"))
        refused(3, "short: got 31 bytes, expected a key of 32 to 4096 bytes; openssl rand -hex 32 makes one\n",
                "--rendezvous-key", self.write_key("k" * 31, name="short"))
        refused(3, "environment: SHARDWRIGHT_KEY: got 7 characters, expected at least 32\n", SHARDWRIGHT_KEY="geheim!")
        refused(2, "--rendezvous-key and --insecure-network contradict each other\n", "--rendezvous-key", "key",
                "--insecure-network")
        # Other machines could reach rank 0: never without a key.
        environment = dict(os.environ, RANK="0", WORLD_SIZE="2", MASTER_ADDR="n1.example", MASTER_PORT=str(self.port))
        done = subprocess.run([shardwright_test_case.PROGRAM, "run", self.plan_file, "--data", "random:100"], cwd=self.folder,
                              env=environment, capture_output=True, text=True, timeout=60, check=False)
        self.assertEqual((done.returncode, done.stderr),
                         (2, "error: ranks that meet at n1.example need a key: --rendezvous-key FILE (openssl rand -hex 32 "
                             "makes one), or --insecure-network; all on this machine: MASTER_ADDR=127.0.0.1\n"))
        environment = dict(os.environ, OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_RANK="0")
        done = subprocess.run([shardwright_test_case.PROGRAM, "run", self.plan_file, "--rendezvous-key", "key"],
                              cwd=self.folder, env=environment, capture_output=True, text=True, timeout=60, check=False)
        self.assertEqual((done.returncode, done.stderr),
                         (2, "error: --rendezvous-key is for ranks that meet by TCP; under mpirun MPI joins them\n"))

    def test_by_the_environment_and_insecurely(self):
        expected = self.undisturbed(2, 2)
        for flags, variables in (((), {"SHARDWRIGHT_KEY": self.key}), (("--insecure-network",), {})):
            self.port = free_port()
            runs = [self.start(r, 2, "--steps", "2", *flags, **variables) for r in range(2)]
            ends = [(*run.communicate(timeout=100), run.returncode) for run in runs]
            self.assertEqual([end[2] for end in ends], [0, 0], ends)
            self.assertEqual([step["loss"] for step in json.loads(ends[0][0])["steps"]], expected)
            self.assertEqual("warning: --insecure-network: whoever reaches port" in ends[0][1], bool(flags))


if __name__ == "__main__":
    main()
