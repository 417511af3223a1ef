#!/usr/bin/env python3
"""Writes scikit-learn's handwritten digits as the four files of MNIST, for jobs that read MNIST's format.

    python3 scripts/digits_to_idx.py FOLDER [--gzip]

1,797 digits of 8 x 8 pixels become images of 28 x 28: every pixel is drawn three times as wide and high, with a border
of two, and its 17 shades become 0 to 255. The last 297 are the test set, as in scikit-learn's own example of a split by
writer. Source of the data: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning
Repository, 1998, CC BY 4.0.
"""

import gzip
import pathlib
import struct
import sys

TEST_SAMPLES = 297
SCALE = 3
BORDER = 2
SIDE = 8 * SCALE + 2 * BORDER


def enlarged(image):
    """28 x 28 bytes of one 8 x 8 image with values 0 to 16."""
    rows = [bytes(SIDE)] * BORDER
    for row in image:
        pixels = b"".join(bytes([round(int(value) * 255 / 16)]) * SCALE for value in row)
        rows += [bytes(BORDER) + pixels + bytes(BORDER)] * SCALE
    return b"".join(rows + [bytes(SIDE)] * BORDER)


def write(path, content, compress):
    if compress:
        with open(f"{path}.gz", "wb") as raw, gzip.GzipFile("", "wb", 9, raw, mtime=0) as out:
            out.write(content)
    else:
        path.write_bytes(content)


def main(arguments):
    compress = "--gzip" in arguments
    folders = [a for a in arguments if a != "--gzip"]
    if len(folders) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        print("digits_to_idx.py: needs scikit-learn (python3-sklearn in Debian)", file=sys.stderr)
        return 4
    folder = pathlib.Path(folders[0])
    folder.mkdir(parents=True, exist_ok=True)
    digits = load_digits()
    split = len(digits.target) - TEST_SAMPLES
    for name, begin, end in (("train", 0, split), ("t10k", split, len(digits.target))):
        images = b"".join(enlarged(image) for image in digits.images[begin:end])
        labels = bytes(int(label) for label in digits.target[begin:end])
        count = end - begin
        write(folder / f"{name}-images-idx3-ubyte", struct.pack(">IIII", 0x803, count, SIDE, SIDE) + images, compress)
        write(folder / f"{name}-labels-idx1-ubyte", struct.pack(">II", 0x801, count) + labels, compress)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
