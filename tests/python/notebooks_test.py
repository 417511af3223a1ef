"""The notebooks of docs/notebooks: every cell runs, and says something.

    python3 tests/python/notebooks_test.py SHARDWRIGHT FOLDER_OF_THE_PACKAGE
"""

import os
import pathlib
import sys
import tempfile
import unittest

PROGRAM, FOLDER = (pathlib.Path(argument).resolve() for argument in sys.argv[1:3])
del sys.argv[1:3]
NOTEBOOKS = sorted((pathlib.Path(__file__).resolve().parent.parent.parent / "docs" / "notebooks").glob("*.ipynb"))
os.environ.update(PYTHONPATH=str(FOLDER), PATH=f"{PROGRAM.parent}{os.pathsep}{os.environ['PATH']}", OMP_NUM_THREADS="1",
                  PYDEVD_DISABLE_FILE_VALIDATION="1")
try:
    import ipykernel  # noqa: F401
    import nbformat
    from nbclient import NotebookClient
except ImportError as missing:
    print(f"SKIPPED: {missing}")
    sys.exit(77)


class Notebooks(unittest.TestCase):

    def test_all_cells(self):
        self.assertEqual(len(NOTEBOOKS), 5)
        for path in NOTEBOOKS:
            with self.subTest(notebook=path.name), tempfile.TemporaryDirectory() as folder:
                book = nbformat.read(path, as_version=4)
                nbformat.validate(book)
                self.assertTrue(all(not cell.get("outputs") for cell in book.cells))  # as they are committed
                NotebookClient(book, timeout=500, kernel_name="python3", resources={"metadata": {"path": folder}}).execute()
                for cell in book.cells:
                    if cell.cell_type == "code":
                        said = [out for out in cell.outputs if out.get("name") != "stderr"]
                        self.assertTrue(said, cell.source)
                        self.assertFalse([out for out in said if "".join(out.get("text", "x")).strip() == ""], cell.source)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
