#pragma once

// The one gate to a terminal or a log. Names come from files and peers of strangers, and a terminal
// obeys control characters: nothing reaches standard error but through Say and its sisters, and
// standard output but through WriteFileAtomically (core/json.h).

#include <string>
#include <string_view>

namespace shardwright {

// `text` with characters that control a terminal or the direction of writing as \u001b, and bytes
// that are no UTF-8 as \x9b. Newlines and tabs stay. A JSON document keeps its meaning.
[[nodiscard]] std::string Printable(std::string_view text);
// The same of what stands in one line: newlines and tabs become \n and \t.
[[nodiscard]] std::string PrintableLine(std::string_view text);

// To standard error: a line, to which the newline is added; lines that end with theirs; a line in
// the place of the one before.
void Say(std::string_view line);
void SayLines(std::string_view lines);
void SayProgress(std::string_view line);

}  // namespace shardwright
