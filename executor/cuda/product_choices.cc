#include "executor/cuda/product_choices.h"

#include <sstream>
#include <utility>

#include "core/error.h"
#include "core/files.h"
#include "core/json.h"

namespace shardwright {
namespace {

constexpr const char* kTitle = "shardwright products 1: ";

[[noreturn]] void Refuse(const std::string& file, int line, const std::string& expected) {
  throw RunError(file + ": line " + std::to_string(line) + ": expected " + expected +
                 "; remove the file, and products are timed again");
}

}  // namespace

ProductChoices::ProductChoices(std::string file, std::string made_for)
    : file_(std::move(file)), made_for_(std::move(made_for)), table_(Read()) {}

std::optional<LtAlgorithmData> ProductChoices::Find(const std::string& product) const {
  const auto at = table_.find(product);
  return at == table_.end() ? std::nullopt : std::optional(at->second);
}

ProductChoices::Table ProductChoices::Read() const {
  std::string text;
  if (Exists(file_)) {
    InputFile file(file_);
    text.resize(static_cast<std::size_t>(file.size()));
    text.resize(file.Read(text.data(), text.size()));
  }
  std::istringstream in(text);
  std::string line;
  if (!std::getline(in, line)) {
    return {};
  }
  const std::string title = kTitle;
  if (line.compare(0, title.size(), title) != 0) {
    Refuse(file_, 1, "\"" + title + "...\"");
  }
  if (line.substr(title.size()) != made_for_) {
    return {};
  }
  Table table;
  for (int number = 2; std::getline(in, line); ++number) {
    std::istringstream words(line);
    std::string product;
    LtAlgorithmData algorithm{};
    words >> product >> std::hex;
    for (std::uint64_t& word : algorithm) {
      words >> word;
    }
    std::string more;
    if (words.fail() || words >> more) {
      Refuse(file_, number, "a product and eight hexadecimal numbers");
    }
    table[product] = algorithm;
  }
  return table;
}

void ProductChoices::Add(const std::string& product, const LtAlgorithmData& algorithm) {
  table_[product] = algorithm;
  table_.merge(Read());
  std::ostringstream out;
  out << kTitle << made_for_ << '\n';
  for (const auto& [name, data] : table_) {
    out << name << std::hex;
    for (const std::uint64_t word : data) {
      out << ' ' << word;
    }
    out << '\n';
  }
  WriteFileAtomically(file_, out.str());
}

}  // namespace shardwright
