// What the functions of the subcommands share.

#include <array>
#include <iostream>
#include <string>

#include <nlohmann/json.hpp>

#include "cli/command.h"
#include "cli/terminal.h"
#include "core/budget.h"
#include "core/json.h"
#include "core/printable.h"

namespace shardwright {

std::string FirstLine(std::string_view about) {
  return std::string(about.substr(0, about.find('\n')));
}

Streams StandardStreams() {
  return {.read =
              [] {
                constexpr std::int64_t kMost = std::int64_t{128} << 20;  // as ReadTextFile
                Budget bytes("-", "bytes", kMost);
                std::string text;
                std::array<char, 1 << 16> block{};
                while (std::cin.read(block.data(), block.size()) || std::cin.gcount() > 0) {
                  bytes.Take(std::cin.gcount());
                  text.append(block.data(), static_cast<std::size_t>(std::cin.gcount()));
                }
                return text;
              },
          .write = [](const std::string& text) { WriteFileAtomically("-", text); }};
}

std::string LongName(const FlagRow& row) {
  return row.name.substr(0, row.name.find(','));
}

void Arguments::PrintText(const std::string& kind, const std::string& result) const {
  if (!IsJson()) {
    Print(result);
    return;
  }
  nlohmann::ordered_json json = ReportHead("shardwright-" + kind);
  json["text"] = result;
  Print(json.dump(2) + "\n");
}

void Arguments::PrintFile(const std::string& content, const std::string& report) const {
  SayLines(report);
  streams.write(content);
}

void Arguments::Deliver(const std::string& output, const char* what, const std::string& content,
                        const std::function<std::string(const std::string& file)>& report) const {
  if (!output.empty() && output != "-") {
    WriteFileAtomically(output, content);
    Print(report(output));
  } else if (output.empty() && !IsJson() && StandardOutput().is_terminal) {
    Print(report("") + "Not written: -o FILE writes the " + what + ", -o - shows it\n");
  } else {
    Print(content);
  }
}

Flag Arguments::Get(const std::string& name) const {
  const auto it = text.find(name);
  return {name, it == text.end() ? std::string() : it->second};
}

bool Arguments::Has(const std::string& switch_name) const {
  return switches.count(switch_name) > 0;
}

void Arguments::Require(const std::string& name) const {
  if (!Get(name).is_given()) {
    throw UsageError(name + " is required; see shardwright " + command + " --help");
  }
}

void Arguments::SetText(const std::string& name, std::string& target) const {
  Set(name, target, [](const Flag& flag) { return flag.text; });
}

void Arguments::SetCount(const std::string& name, std::int64_t max, std::int64_t& target) const {
  Set(name, target, [max](const Flag& flag) { return ReadCount(flag, 1, max); });
}

void Warn(const std::string& text) {
  Say("warning: " + text);
}

nlohmann::ordered_json ReportHead(const std::string& schema) {
  return {{"schema", schema}, {"schema_version", 1}};
}

}  // namespace shardwright
