#!/usr/bin/env python3
"""docs/images/accuracy.svg: predicted over measured step times of the published runs.

    scripts/accuracy_picture.py build/shardwright [PICTURE]

Rows are those of bench/published/measured_runs.csv that can be predicted. Hollow: the row's profile was fitted to runs of this
table; filled: nothing of its stack was. What a fit does on models that were left out of it is in bench/accuracy.md.
"""

import json
import math
import pathlib
import statistics
import subprocess
import sys

from bench_command import bench_command

ROOT = pathlib.Path(__file__).resolve().parent.parent
WIDTH, HEIGHT = 760, 360  # of the axes, pixels
LEFT, TOP, BOTTOM = 70, 20, 60
BAND = 0.1
STEP = 0.1  # of the grid


def is_fitted(profile):
    path = ROOT / "topologies/profiles" / (profile + ".json")
    return path.exists() and "fit" in json.loads(path.read_text(encoding="utf-8"))


def points_of(rows):
    """(measured s, predicted s, whether it is of a fit) of every row with both."""
    return [(row["measured"], row["predicted"], is_fitted(row["profile"]))
            for row in rows if row.get("measured") and row.get("predicted")]


def median_error(points):
    return statistics.median(abs(predicted / measured - 1) for measured, predicted, _ in points)


class Axes:
    def __init__(self, points):
        times = [measured for measured, _, _ in points]
        errors = [predicted / measured - 1 for measured, predicted, _ in points]
        self.low = math.floor(math.log10(min(times)))
        self.high = math.ceil(math.log10(max(times)))
        self.least = STEP * math.floor(min(errors) / STEP)
        self.most = STEP * math.ceil(max(errors) / STEP)

    def x(self, seconds):
        return LEFT + WIDTH * (math.log10(seconds) - self.low) / (self.high - self.low)

    def y(self, error):
        return TOP + HEIGHT * (self.most - error) / (self.most - self.least)

    def decades(self):
        return range(self.low, self.high + 1)

    def errors(self):
        return [STEP * i for i in range(round(self.least / STEP), round(self.most / STEP) + 1)]


def seconds_text(decade):
    return f"{10 ** decade:g} s" if decade >= 0 else f"{10 ** (decade + 3):g} ms"


def grid(axes):
    lines = [f'<rect x="{LEFT}" y="{axes.y(BAND):.1f}" width="{WIDTH}" height="{axes.y(-BAND) - axes.y(BAND):.1f}" fill="#2a7f62" '
             'fill-opacity="0.12"/>']
    for decade in axes.decades():
        x = axes.x(10.0 ** decade)
        lines.append(f'<path d="M{x:.1f} {TOP}v{HEIGHT}" stroke="#ddd"/>')
        lines.append(f'<text x="{x:.1f}" y="{TOP + HEIGHT + 18}" text-anchor="middle">{seconds_text(decade)}</text>')
    for error in axes.errors():
        y = axes.y(error)
        stroke = "#2a7f62" if abs(error) < STEP / 2 else "#ddd"
        lines.append(f'<path d="M{LEFT} {y:.1f}h{WIDTH}" stroke="{stroke}"/>')
        lines.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{round(100 * error):+d} %</text>')
    return lines


def dot(axes, point):
    measured, predicted, fitted = point
    fill = "none" if fitted else "#b3420e"
    stroke = "#1f5fa8" if fitted else "#b3420e"
    return f'<circle cx="{axes.x(measured):.1f}" cy="{axes.y(predicted / measured - 1):.1f}" r="3.5" fill="{fill}" stroke="{stroke}"/>'


def picture(points):
    axes = Axes(points)
    fitted = [point for point in points if point[2]]
    free = [point for point in points if not point[2]]
    width, height = LEFT + WIDTH + 30, TOP + HEIGHT + BOTTOM + 46
    legend = TOP + HEIGHT + BOTTOM + 6
    texts = [f"{len(fitted)} runs with a profile fitted to runs of this table: median error {100 * median_error(fitted):.1f} %",
             f"{len(free)} runs of stacks to which nothing was fitted: median error {100 * median_error(free):.1f} %"]
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" '
             'font-family="sans-serif" font-size="13" fill="#222">',
             f"<title>Errors of predicted step times of {len(points)} published runs</title>",
             f"<desc>{texts[0]}; {texts[1]}. The band is from -10 to +10 %.</desc>",
             f'<rect width="{width}" height="{height}" fill="#fff"/>', *grid(axes), '<g fill-opacity="0.8">']
    lines += [dot(axes, point) for point in sorted(fitted) + sorted(free)]
    lines.append("</g>")
    lines.append(f'<text x="{LEFT + WIDTH / 2:.0f}" y="{TOP + HEIGHT + 38}" text-anchor="middle">measured step time (published)</text>')
    lines.append(f'<text transform="translate(16 {TOP + HEIGHT / 2:.0f}) rotate(-90)" text-anchor="middle">predicted / measured - 1</text>')
    for i, text in enumerate(texts):
        y = legend + 22 * i
        fill, stroke = ("none", "#1f5fa8") if i == 0 else ("#b3420e", "#b3420e")
        lines.append(f'<circle cx="{LEFT + 6}" cy="{y - 4}" r="3.5" fill="{fill}" stroke="{stroke}"/>')
        lines.append(f'<text x="{LEFT + 18}" y="{y}">{text}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def main():
    program = sys.argv[1]
    output = pathlib.Path(sys.argv[2]) if len(sys.argv) > 2 else ROOT / "docs/images/accuracy.svg"
    table = ROOT / "bench/published/measured_runs.csv"
    answer = subprocess.run([*bench_command(program, "validate"), str(table), "--json"], check=True, stdout=subprocess.PIPE)
    output.write_text(picture(points_of(json.loads(answer.stdout)["rows"])), encoding="utf-8")


if __name__ == "__main__":
    main()
