"""What strangers plant for the package: pickles in checkpoints of PyTorch, and links under the names that it writes.

    python tests/python/planted_test.py SHARDWRIGHT PACKAGE
"""

import hashlib
import io
import os
import pathlib
import pickle
import random
import shutil
import signal
import sys
import tempfile
import time
import unittest
import zipfile

try:
    import torch
    import torch.distributed.checkpoint as dcp
except ImportError as missing:
    print(f"{missing}: skipped")
    sys.exit(77)

PROGRAM, PACKAGE = sys.argv[1:3]
sys.path[:0] = [PACKAGE, str(pathlib.Path(__file__).resolve().parent.parent / "cli")]
import shardwright
from shardwright import _dcp
from shardwright._export.model_export import outside
from training_test_case import TINY

MARK = ""


class Calls:
    """Pickled, it calls the function when it is loaded."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


def touch():
    return f"open({MARK!r}, 'w').close()"


# Ways to run code that start at a name. Each has been tried: pickle.loads of it makes the file, but for those that only load more.
def planted():
    touched = f"touch {MARK}"
    yield "os.system", pickle.dumps(Calls(os.system, touched))
    yield "exec", pickle.dumps(Calls(exec, touch()))
    yield "exec, protocol 0", pickle.dumps(Calls(exec, touch()), protocol=0)
    yield "exec, protocol 2", pickle.dumps(Calls(exec, touch()), protocol=2)
    yield "getattr of an allowed class", pickle.dumps(Calls(getattr, torch.Size, "__init__"))
    yield "INST", f"(S'{touched}'\nios\nsystem\n.".encode()
    yield "OBJ", f"(cos\nsystem\nS'{touched}'\no.".encode()
    yield "EXT1", b"\x80\x02\x82\x01."
    yield "NEWOBJ_EX", b"\x80\x04cbuiltins\nexec\n(X\x01\x00\x00\x00xt}\x92."
    yield "a persistent id", b"\x80\x02X\x01\x00\x00\x00xQ."
    yield "a dotted name", b"\x80\x04\x8c\x05torch\x8c\x0fSize.__new__.x\x93."
    yield "a name of another module under torch", b"\x80\x02ctorch.hub\nload\n(X\x01\x00\x00\x00xtR."
    yield "a function of PyTorch", b"\x80\x02ctorch\nload\n(X\x01\x00\x00\x00xtR."
    yield "a call of what an object says", pickle.dumps(Calls(torch.Size, (1,)))[:-1] + b")R."
    yield "attributes of a class", b"\x80\x02ctorch\nSize\n(N}X\x08\x00\x00\x00__call__cos\nsystem\nstb."


# Pickles that ask for much: memory, or more depth than the interpreter has.
def bombs():
    yield "a place of 2^32 in the memo", b"\x80\x02K\x01r\xff\xff\xff\xff."
    yield "a text of 2^62 bytes", b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x3f."
    yield "a frame of 2^62 bytes", b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x3f."
    yield "a deep key", b"\x80\x02}" + b")" + b"\x85" * 200_000 + b"K\x01s."
    yield "deep tuples", b"\x80\x02)" + b"\x85" * 200_000 + b"."
    yield "marks", b"\x80\x02" + b"(" * 200_000 + b"."
    yield "a list in itself", b"\x80\x04]\x94h\x00a."
    yield "a set", b"\x80\x04\x8f(K\x01\x90."
    yield "no end", b"\x80\x02K\x01"
    yield "nothing", b""
    yield "a value before the mark", b"\x80\x02K\x01(\x86."


class Planted(unittest.TestCase):

    def setUp(self):
        global MARK
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        MARK = str(self.folder / "mark")
        self.dcp = self.folder / "dcp"
        torch.manual_seed(1)
        self.tensors = {"a": torch.rand(3, 4), "b": torch.arange(5), "c": torch.rand(2).bfloat16()}
        dcp.save({"model": self.tensors, "optimizer": {"param_groups": [{"lr": 0.1}]}}, checkpoint_id=self.dcp, no_dist=True)
        self.data = self.dcp / "__0_0.distcp"
        self.saved = (self.dcp / ".metadata").read_bytes()

    def metadata(self):
        return pickle.loads(self.saved)

    def save_metadata(self, metadata):
        (self.dcp / ".metadata").write_bytes(metadata if isinstance(metadata, bytes) else pickle.dumps(metadata))

    def refused(self, what, read=None):
        """It is InputError, in a moment, and nothing ran."""
        def late(*_):
            raise AssertionError(f"{what}: still at work after 20 s")
        before = signal.signal(signal.SIGALRM, late)
        signal.alarm(20)
        try:
            with self.assertRaises(shardwright.InputError, msg=what) as caught:
                (read or self.convert)()
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)
        self.assertFalse(os.path.exists(MARK), what)
        self.assertLess(len(str(caught.exception)), 1000, what)
        self.assertNotIn("\n", str(caught.exception), what)

    def convert(self):
        shardwright.from_dcp(self.dcp, self.folder / "out", TINY)

    def read_all(self):
        folder = _dcp.Folder(self.dcp)
        return {key: folder.value(key) if tensor is None else folder.tensor(key) for key, tensor in folder.known.items()}

    def test_what_was_saved_is_read(self):
        found = self.read_all()
        for name, tensor in self.tensors.items():
            self.assertEqual(found[f"model.{name}"].dtype, tensor.dtype)
            self.assertTrue(torch.equal(found[f"model.{name}"], tensor))
        for protocol in (2, 3, 4, 5):
            self.save_metadata(pickle.dumps(self.metadata(), protocol=protocol))
            self.assertEqual(self.read_all().keys(), found.keys())

    def test_the_plants_work(self):
        """They make the file where pickle loads them; else this test would show nothing."""
        for name, content in planted():
            if name.startswith(("os", "exec", "INST", "OBJ")):
                pickle.loads(content)
                self.assertTrue(os.path.exists(MARK), name)
                os.unlink(MARK)

    def test_metadata(self):
        for name, content in (*planted(), *bombs()):
            self.save_metadata(content)
            self.refused(name)

    def test_deep_in_the_metadata(self):
        plant = Calls(exec, touch())
        for name in ("planner_data", "storage_meta", "storage_data", "state_dict_metadata"):
            metadata = self.metadata()
            setattr(metadata, name, {"x": plant})
            self.save_metadata(metadata)
            self.refused(name)
        metadata = self.metadata()
        metadata.state_dict_metadata["model.a"].properties.dtype = plant
        self.save_metadata(pickle.dumps(metadata))
        self.refused("a dtype")

    def records(self, change, compression=zipfile.ZIP_STORED):
        """Every part with its records changed: change(name, content) -> content."""
        metadata, whole = self.metadata(), io.BytesIO()
        content = self.data.read_bytes()
        for key, info in metadata.storage_data.items():
            made = io.BytesIO()
            with zipfile.ZipFile(io.BytesIO(content[info.offset:info.offset + info.length])) as old, \
                    zipfile.ZipFile(made, "w", compression) as new:
                for name in old.namelist():
                    new.writestr(name, change(name.partition("/")[2], old.read(name)))
            metadata.storage_data[key] = type(info)(info.relative_path, whole.tell(), len(made.getvalue()))
            whole.write(made.getvalue())
        self.data.write_bytes(whole.getvalue())
        self.save_metadata(metadata)

    def test_pickles_in_tensors_and_values(self):
        saved = self.data.read_bytes()
        self.records(lambda name, content: content)
        self.assertEqual(len(self.read_all()), 4)
        for name, plant in (*planted(), *bombs()):
            self.data.write_bytes(saved)
            self.records(lambda record, content, plant=plant: plant if record == "data.pkl" else content)
            folder = _dcp.Folder(self.dcp)
            for key, tensor in folder.known.items():
                if tensor is not None:
                    self.refused((name, key), lambda folder=folder, key=key: folder.tensor(key))
            if name not in ("deep tuples", "a list in itself"):  # values like others
                self.refused((name, "value"), lambda folder=folder: folder.value("optimizer.param_groups"))

    def test_other_files_than_torch_save_writes(self):
        """PyTorch reads three formats, and the older two past weights_only (CVE-2025-32434)."""
        metadata = self.metadata()
        old = io.BytesIO()
        torch.save(Calls(exec, touch()), old, _use_new_zipfile_serialization=False)
        for content in (old.getvalue(), b"", b"PK", bytes(100)):
            for info in metadata.storage_data.values():
                info.offset, info.length = 0, len(content)
            self.data.write_bytes(content + bytes(4096))
            self.save_metadata(metadata)
            folder = _dcp.Folder(self.dcp)
            self.refused("format", lambda folder=folder: folder.tensor("model.a"))

    def test_records_that_unpack_to_more(self):
        self.records(lambda name, content: bytes(10_000_000) if name.startswith("data/") else content, zipfile.ZIP_DEFLATED)
        self.refused("deflated", self.read_all)

    def test_numbers(self):
        """Places, sizes and parts that are not those of the files."""
        a = "model.a"
        def info_of(metadata):
            return next(info for key, info in metadata.storage_data.items() if key.fqn == a)
        def chunk(metadata, *more):
            entry = metadata.state_dict_metadata[a]
            entry.chunks = [*entry.chunks, *more]
            return entry
        changes = {
            "another folder": lambda m: setattr(info_of(m), "relative_path", "../dcp/__0_0.distcp"),
            "an absolute path": lambda m: setattr(info_of(m), "relative_path", str(self.data)),
            "no path": lambda m: setattr(info_of(m), "relative_path", 7),
            "no file": lambda m: setattr(info_of(m), "relative_path", "none"),
            "the folder": lambda m: setattr(info_of(m), "relative_path", "."),
            "behind the end": lambda m: setattr(info_of(m), "offset", 1 << 40),
            "before the begin": lambda m: setattr(info_of(m), "offset", -1),
            "all of memory": lambda m: setattr(info_of(m), "length", 1 << 49),
            "no number": lambda m: setattr(info_of(m), "length", 1.5),
            "transformed": lambda m: setattr(info_of(m), "transform_descriptors", ["zstd"]),
            "a tensor of all memory": lambda m: setattr(m.state_dict_metadata[a], "size", torch.Size([1 << 49])),
            "too many dimensions": lambda m: setattr(m.state_dict_metadata[a], "size", torch.Size([1] * 100)),
            "another shape": lambda m: setattr(m.state_dict_metadata[a], "size", torch.Size([4, 3])),
            "another dtype": lambda m: setattr(m.state_dict_metadata[a].properties, "dtype", torch.int32),
            "no parts": lambda m: setattr(m.state_dict_metadata[a], "chunks", []),
            "a part twice": lambda m: chunk(m, *m.state_dict_metadata[a].chunks),
        }
        for name, change in changes.items():
            metadata = self.metadata()
            change(metadata)
            self.save_metadata(metadata)
            self.refused(name, self.read_all)

    def test_parts_that_overlap(self):
        """As many elements as the tensor has, so that uninitialised memory would be in the others."""
        metadata = self.metadata()
        entry = metadata.state_dict_metadata["model.a"]
        (whole,) = entry.chunks
        entry.size = torch.Size([6, 4])
        entry.chunks = [type(whole)(torch.Size([0, 0]), whole.sizes), type(whole)(torch.Size([1, 0]), whole.sizes)]
        for key, info in list(metadata.storage_data.items()):
            if key.fqn == "model.a":
                for i, part in enumerate(entry.chunks):
                    metadata.storage_data[type(key)("model.a", part.offsets, i)] = info
        self.data.write_bytes(self.data.read_bytes() + bytes(4096))
        self.save_metadata(metadata)
        self.refused("overlap", self.read_all)

    def test_files_that_are_none(self):
        for name in (".metadata", "__0_0.distcp"):
            path = self.dcp / name
            kept = path.read_bytes()
            path.unlink()
            os.mkfifo(path)
            self.refused(f"a pipe {name}", self.read_all)
            path.unlink()
            path.mkdir()
            self.refused(f"a folder {name}", self.read_all)
            path.rmdir()
            path.symlink_to("/dev/zero")
            self.refused(f"a device {name}", self.read_all)
            path.unlink()
            path.symlink_to(name)
            self.refused(f"a link to itself {name}", self.read_all)
            path.unlink()
            path.write_bytes(kept)
        self.read_all()

    def test_changed_bytes(self):
        """Each byte of the metadata, and 600 of the data: another value or an error, nothing else. Then, in the deep run, 100,000
        folders with up to eight edits, which cut, copy or change stretches of either file."""
        generator = random.Random(int(os.environ.get("SHARDWRIGHT_SEED", 5)))
        outcomes = {"read": 0, "refused": 0}
        for path, places in ((self.dcp / ".metadata", None), (self.data, 600)):
            kept = path.read_bytes()
            for at in range(len(kept)) if places is None else generator.sample(range(len(kept)), places):
                path.write_bytes(kept[:at] + bytes([kept[at] ^ generator.randrange(1, 256)]) + kept[at + 1:])
                try:
                    self.read_all()
                    outcomes["read"] += 1
                except shardwright.InputError:
                    outcomes["refused"] += 1
            path.write_bytes(kept)
        self.assertGreater(outcomes["refused"], 500)
        kept = {path: path.read_bytes() for path in (self.dcp / ".metadata", self.data)}
        for number in range(int(os.environ.get("SHARDWRIGHT_FOLDERS", 100_000)) if "SHARDWRIGHT_DEEP" in os.environ else 0):
            for path, content in kept.items():
                changed = bytearray(content)
                for _ in range(generator.randrange(5)):
                    at, to, size = (generator.randrange(len(changed) + 1) for _ in range(3))
                    piece = changed[to:to + generator.choice((1, 2, 4, 8, size))]
                    changed[at:at + generator.choice((0, len(piece), len(piece) + 1))] = generator.choice((piece, generator.randbytes(len(piece))))
                path.write_bytes(changed)
            begin = time.process_time()
            try:
                self.read_all()
                outcomes["read"] += 1
            except shardwright.InputError:
                outcomes["refused"] += 1
            self.assertLess(time.process_time() - begin, 10, number)
            self.assertFalse(os.path.exists(MARK), number)
        print(f"changed bytes: {outcomes}")

    def test_reading_changes_nothing(self):
        def picture():
            return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns, path.stat().st_ctime_ns, hashlib.sha256(path.read_bytes()).hexdigest())
                    for path in self.dcp.iterdir()}
        before = picture()
        self.read_all()
        self.refused("no model", self.convert)
        self.assertEqual(picture(), before)


class Links(unittest.TestCase):
    """The package's writer, which has the rules of core/staged_file.cc."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.victim = self.folder / "victim"
        self.victim.write_text("mine")

    def test_a_file_has_its_name_when_it_is_finished(self):
        file = self.folder / "file"
        names = set()
        with self.assertRaises(ZeroDivisionError), outside.replacing(file) as path:
            path.write_text("half")
            names.add(path.parent.name)
            self.assertFalse(file.exists())
            self.assertEqual(path.parent.stat().st_mode & 0o777, 0o700)
            raise ZeroDivisionError
        self.assertEqual(os.listdir(self.folder), ["victim"])
        for _ in range(5):
            with outside.replacing(file) as path:
                names.add(path.parent.name)
                path.write_text("whole")
        self.assertEqual(len(names), 6)
        self.assertEqual(sorted(os.listdir(self.folder)), ["file", "victim"])
        mask = os.umask(0)
        os.umask(mask)
        self.assertEqual(file.stat().st_mode & 0o777, 0o666 & ~mask)

    def test_links(self):
        """The user's own at the end of a name that the user gave is followed; in the place of a name that the program chose, replaced."""
        link = self.folder / "link"
        for kind in ("symbolic", "hard", "of links"):
            for follows in (True, False):
                self.victim.write_text("mine")
                if kind == "hard":
                    os.link(self.victim, link)
                elif kind == "of links":
                    (self.folder / "between").symlink_to("victim")
                    link.symlink_to("between")
                else:
                    link.symlink_to(self.victim)
                outside.write(link, "new", follows=follows)
                self.assertEqual(self.victim.read_text(), "new" if follows and kind != "hard" else "mine", kind)
                self.assertEqual(link.read_text(), "new")
                for name in ("link", "between"):
                    (self.folder / name).unlink(missing_ok=True)
        link.symlink_to(link)
        with self.assertRaises(OSError):
            outside.write(link, "new")
        if os.geteuid() == 0:
            link.unlink()
            link.symlink_to(self.victim)
            os.chown(link, 12345, 12345, follow_symlinks=False)
            self.assertRaises(OSError, outside.write, link, "new")
            self.victim.write_text("mine")

    def test_pipes_are_written_in_place(self):
        read, write = os.pipe()
        outside.write(f"/proc/self/fd/{write}", "text")
        os.close(write)
        with os.fdopen(read) as pipe:
            self.assertEqual(pipe.read(), "text")
        outside.write("/dev/null", "text")
        self.assertFalse(os.path.isfile("/dev/null"))
        self.assertRaises(OSError, outside.write, self.folder, "a folder")
        self.assertRaises(OSError, outside.write, self.folder / "none" / "x", "no folder")

    def test_what_the_package_writes(self):
        """Every output of the package, with a link in its place."""
        plan = shardwright.plan(model="gpt2", cluster="8xH100", seq=128)
        page, saved = self.folder / "page.html", self.folder / "plan.json"
        for path, write in ((saved, plan.save), (page, plan.to_html)):
            write(path)
            self.assertIn("gpt2", path.read_text())
        shutil.rmtree(self.folder / "dcp", ignore_errors=True)
        (self.folder / "dcp").mkdir()
        (self.folder / "recording").mkdir()
        for name in ("dcp/.metadata", "dcp/__0_0.distcp", "recording/rank0.json.gz", "recording/.rank0.json.gz"):
            (self.folder / name).symlink_to(self.victim)
        with shardwright.record(plan, self.folder / "recording", wait=0, warmup=0, steps=1) as recording:
            torch.ones(2) + 1
            recording.step()
        self.assertTrue((self.folder / "recording" / "rank0.json.gz").is_file())
        self.assertFalse((self.folder / "recording" / "rank0.json.gz").is_symlink())
        with outside.filling(self.folder / "dcp") as unfinished:
            dcp.save({"a": torch.ones(2)}, storage_writer=dcp.FileSystemWriter(unfinished), no_dist=True)
        self.assertEqual(sorted(path.name for path in (self.folder / "dcp").iterdir() if path.is_symlink()), [])
        self.assertEqual(_dcp.Folder(self.folder / "dcp").tensor("a").tolist(), [1.0, 1.0])
        self.assertEqual(self.victim.read_text(), "mine")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
