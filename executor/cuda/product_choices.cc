// The file of choices: a title, then a line for each product.
//
//   shardwright products 1: NVIDIA H200, cuBLASLt 130000
//   1024,768,512,512,-512,768,... 3f 0 80000001 0 0 0 0 0
//
// A product is the key of CublasLt's cache, numbers with commas. Behind it stand the eight 64-bit
// words of cuBLASLt's algorithm, in hexadecimal. They are of use to the same GPU and version only,
// which the title names.
//
// Several processes may add at once. Each reads the file again, joins, and replaces it as a whole.
// A line that is lost in between is timed again in the next run.

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
