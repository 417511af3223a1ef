"""How bench/lab reads tables, and what its statistics are."""

import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "bench"))

from lab import base  # noqa: E402


def error_of(text):
    try:
        base.parse_table(text, "t.csv")
    except base.InputError as error:
        return str(error)
    return "no error"


class Csv(unittest.TestCase):

    def test_quoted_fields_keep_commas_quotes_and_line_breaks(self):
        """The examples of RFC 4180, section 2."""
        rows = base.parse_table('a,b,c\r\n"1,5","say ""x""","two\r\nlines"\r\n,,\r\n', "t.csv")
        self.assertEqual([dict(row) for row in rows], [{"a": "1,5", "b": 'say "x"', "c": "two\r\nlines"}, {"a": "", "b": "", "c": ""}])
        self.assertEqual([row.line for row in rows], [2, 4])  # the second record began on line 2 and took two lines

    def test_byte_order_mark_empty_lines_and_a_missing_last_line_end(self):
        rows = base.parse_table("\ufeffx,y\n\n1,2\n\n3,", "t.csv")
        self.assertEqual([dict(row) for row in rows], [{"x": "1", "y": "2"}, {"x": "3", "y": ""}])
        self.assertEqual(rows[1].where("y"), "t.csv: line 5: y")

    def test_errors_name_the_line(self):
        self.assertEqual(error_of(""), "t.csv: got no header, expected a first line with the names of the columns")
        self.assertEqual(error_of("a,a\n"), 't.csv: line 1: got two columns "a", expected different names')
        self.assertEqual(error_of("a,\n"), "t.csv: line 1: got no name for column 2, expected a name")
        self.assertEqual(error_of("a,b\n1\n"), "t.csv: line 2: got 1 fields, expected 2 as in the header")
        self.assertEqual(error_of('a\n"1\n2'), "t.csv: line 2: got a quote that is never closed, expected a closing quote")
        self.assertEqual(error_of('a\n"1"2\n'), "t.csv: line 2: got text behind a closing quote, expected a comma or the end of the line")
        self.assertEqual(error_of('a\n1"2\n'), "t.csv: line 2: got a quote inside a field, expected the whole field in quotes")


class Statistics(unittest.TestCase):

    def test_of_signed_errors_by_hand(self):
        found = base.statistics([0.1, -0.2, 0.4, -0.3, 0])
        # Sizes sorted: 0, 0.1, 0.2, 0.3, 0.4; position 0.9 x 4 = 3.6.
        for key, value in {"count": 5, "mean": 0.2, "median": 0.2, "p90": 0.36, "max": 0.4, "bias": 0}.items():
            self.assertAlmostEqual(found[key], value, msg=key)
        self.assertEqual(base.statistics([])["count"], 0)
        self.assertAlmostEqual(base.quantile([4, 1], 0.5), 2.5)


class Text(unittest.TestCase):

    def test_columns_are_as_wide_as_their_longest_cell(self):
        self.assertEqual(base.table("lr", [["a", "1"], ["bcd", "22"]], 2), "  a     1\n  bcd  22\n")

    def test_what_the_last_column_has_too_much_goes_on_below(self):
        lines = base.table("rl", [["1", "word " * 60]], wrap=True).splitlines()
        self.assertGreater(len(lines), 2)
        self.assertLessEqual(max(map(len, lines)), 120)
        self.assertTrue(all(line.startswith("   word") for line in lines[1:]))


if __name__ == "__main__":
    sys.argv[1:] = sys.argv[2:]  # the program is not asked
    unittest.main()
