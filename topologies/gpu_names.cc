#include "topologies/gpu_names.h"

#include <cctype>
#include <functional>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <sstream>

#include "core/error.h"
#include "core/json.h"
#include "core/ranges.h"
#include "core/text.h"
#include "topologies/cluster.h"
#include "topologies/gpu_name_catalog.h"
#include "topologies/internal/cluster_json.h"

namespace shardwright {
namespace {

using Words = std::vector<std::string>;

struct Row {
  std::string gpu, form, pci;
  std::string only_with;  // "gb" or "form": not meant where that is not said
  Words words, also;
  std::vector<std::int64_t> gb;
};

struct Names {
  std::vector<Row> rows;
  std::map<std::string, Words> makers;  // "any", "nvidia", "amd"
  std::map<std::string, std::string> forms;
  std::map<std::string, std::int64_t> most;
  std::map<std::string, std::string> refused;
  std::vector<std::pair<std::string, std::string>> nodes;
  std::set<std::int64_t> sizes;               // GB of any card
  std::set<std::string, std::greater<>> all;  // longer words before their beginnings
};

Words Split(const std::string& text) {
  std::istringstream words(text);
  return {std::istream_iterator<std::string>(words), {}};
}

bool Has(const Words& words, const std::string& word) {
  return IsIn(words, word);
}

std::string TextAt(const JsonValue& object, std::string_view key) {
  const auto value = object.Find(key);
  return value ? value->AsString() : "";
}

Words WordsAt(const JsonValue& object, std::string_view key) {
  return Split(TextAt(object, key));
}

Row ReadRow(const JsonValue& value) {
  value.AllowOnly({"gpu", "words", "form", "gb", "also", "pci", "only_with"});
  Row row;
  row.gpu = value.At("gpu").AsString();
  row.words = WordsAt(value, "words");
  row.also = WordsAt(value, "also");
  row.form = TextAt(value, "form");
  row.pci = TextAt(value, "pci");
  for (const std::string& size : WordsAt(value, "gb")) {
    row.gb.push_back(IntegerIn(size).value());
  }
  row.only_with = TextAt(value, "only_with");
  return row;
}

Names ReadNames() {
  const EmbeddedFile& file = EmbeddedGpuNameCatalog()[0];
  const JsonValue root = JsonValue::Parse(file.text, std::string(file.path));
  internal::CheckFormat(root, "shardwright-gpu-names");
  Names names;
  const auto add = [&](const Words& words) { names.all.insert(words.begin(), words.end()); };
  for (std::size_t i = 0; i < root.At("names").size(); ++i) {
    names.rows.push_back(ReadRow(root.At("names")[i]));
    add(names.rows.back().words);
    add(names.rows.back().also);
    names.sizes.insert(names.rows.back().gb.begin(), names.rows.back().gb.end());
  }
  for (const std::string& maker : root.At("words").Keys()) {
    add(names.makers[maker] = WordsAt(root.At("words"), maker));
  }
  for (const std::string& form : root.At("forms").Keys()) {
    for (const std::string& word : WordsAt(root.At("forms"), form)) {
      names.forms[word] = form;
      names.all.insert(word);
    }
  }
  for (const std::string& key : root.At("most").Keys()) {
    names.most[key] = root.At("most").At(key).AsInt();
  }
  for (std::size_t i = 0; i < root.At("refused").size(); ++i) {
    for (const std::string& word : WordsAt(root.At("refused")[i], "words")) {
      names.refused[word] = root.At("refused")[i].At("why").AsString();
    }
  }
  for (const std::string& name : root.At("nodes").Keys()) {
    names.nodes.emplace_back(name, root.At("nodes").At(name).AsString());
  }
  for (const GpuSpec& gpu : GpuCatalog()) {
    names.all.insert(gpu.architecture);
  }
  return names;
}

const Names& TheNames() {
  static const Names names = ReadNames();
  return names;
}

// What a text says, word by word.
struct Said {
  GpuName name;
  Words words;  // but counts, sizes and forms
  std::vector<std::int64_t> gb;
  std::set<std::string> forms;
  std::string bare;     // a size without its unit
  std::string unknown;  // the first word that is none
};

// "rtx6000ada" as rtx, 6000 and ada; false, and nothing said, where a part is no word.
bool AddWords(const std::string& text, Said& said) {
  if (text.empty()) {
    return true;
  }
  for (const std::string& word : TheNames().all) {
    if (text.starts_with(word)) {
      Said more = said;
      const auto form = TheNames().forms.find(word);
      if (form != TheNames().forms.end()) {
        more.forms.insert(form->second);
      } else {
        more.words.push_back(word);
      }
      if (AddWords(text.substr(word.size()), more)) {
        said = more;
        return true;
      }
    }
  }
  return false;
}

bool IsOfAMaker(const std::string& word) {
  const auto& makers = TheNames().makers;
  return AnyOf(makers, [&](const auto& maker) { return Has(maker.second, word); });
}

bool IsNameless(const Said& said) {
  return AllOf(said.words, IsOfAMaker);
}

// Of "8xh100" 8 and "h100"; nothing where no number of at most seven digits and an x stand in
// front.
std::optional<std::pair<std::int64_t, std::string>> CountInFront(const std::string& token) {
  const std::size_t x = token.find_first_not_of("0123456789");
  const auto count = x > 7 || token[x] != 'x' ? std::nullopt : IntegerIn(token.substr(0, x));
  return count ? std::optional(std::pair(*count, token.substr(x + 1))) : std::nullopt;
}

// Of "a100x8" 8 and "a100".
std::optional<std::pair<std::int64_t, std::string>> CountBehind(const std::string& token) {
  const std::size_t x = token.find_last_not_of("0123456789");
  if (x == token.npos || token[x] != 'x' || token.size() - x > 8) {
    return std::nullopt;
  }
  const auto count = IntegerIn(token.substr(x + 1));
  return count ? std::optional(std::pair(*count, token.substr(0, x))) : std::nullopt;
}

// 80 of "80g", "80gb" and "80gib".
std::optional<std::int64_t> SizeIn(const std::string& token) {
  const std::size_t unit = std::min(token.find_first_not_of("0123456789"), token.size());
  const std::string_view rest = std::string_view(token).substr(unit);
  const bool is_size = unit <= 4 && (rest == "g" || rest == "gb" || rest == "gib");
  return is_size ? IntegerIn(token.substr(0, unit)) : std::nullopt;
}

// One word, in which counts and sizes may be glued to the name: "8xh100", "a100x8", "80gb".
void AddToken(const std::string& token, Said& said) {
  if (AddWords(token, said)) {
    return;
  }
  const std::string one = token.substr(0, token.size() - 1);  // "8 H100s"; "4080S" is another card
  if (token.ends_with('s') && std::isalpha(static_cast<unsigned char>(one[0])) != 0 &&
      !said.name.counts.empty() && TheNames().all.contains(one)) {
    said.words.push_back(one);
    return;
  }
  if (const auto size = SizeIn(token)) {
    said.gb.push_back(*size);
  } else if (const auto front = CountInFront(token);
             front && (IsNameless(said) || front->second.empty()) &&
             !TheNames().all.contains(std::to_string(front->first))) {
    said.name.counts.push_back(front->first);
    AddToken(front->second, said);
  } else if (const auto behind = CountBehind(token)) {
    AddToken(behind->second, said);
    said.name.counts.push_back(behind->first);
  } else if (const auto number = IntegerIn(token); number && token.size() < 8 && IsNameless(said)) {
    said.name.counts.push_back(*number);
  } else if (number && TheNames().sizes.contains(*number)) {
    said.gb.push_back(*number);
    said.bare = token;
  } else if (said.unknown.empty()) {
    said.unknown = token;
  }
}

bool IsCount(std::string_view text) {
  return text.size() < 8 && IntegerIn(text).has_value();
}

// What stands in brackets: "(8)", "(x8)" and "(8 GPUs)" are counts, "(r)", "(tm)" and "(rev a1)"
// nothing.
std::string InBrackets(std::string text) {
  static const std::set<std::string, std::less<>> kThings = {"",     "x",    "gpu",
                                                             "gpus", "card", "cards"};
  text.erase(std::remove(text.begin(), text.end(), ' '), text.end());
  std::string_view count = text;
  count.remove_prefix(count.starts_with('x') ? 1 : 0);
  const std::size_t end = std::min(count.find_first_not_of("0123456789"), count.size());
  if (kThings.contains(count.substr(end)) && IsCount(count.substr(0, end))) {
    return "x" + std::string(count.substr(0, end));
  }
  return text == "r" || text == "tm" || text.starts_with("rev") ? "" : text;
}

void ReplaceAll(std::string& text, std::string_view from, std::string_view to) {
  for (std::size_t at = 0; (at = text.find(from, at)) != text.npos; at += to.size()) {
    text.replace(at, from.size(), to);
  }
}

// The words of the text in lower case, with counts as "8x" or "x8" and sizes as "80gb".
Words Plain(std::string_view text) {
  std::string plain = LowerCase(text);
  ReplaceAll(plain, "\xc3\x97", "x");  // the sign of multiplication
  ReplaceAll(plain, "\xc2\xae", " ");
  ReplaceAll(plain, "\xe2\x84\xa2", " ");
  for (std::size_t open = 0; (open = plain.find('(', open)) != plain.npos;) {
    const std::size_t close = std::min(plain.find(')', open), plain.size());
    const std::string inside = " " + InBrackets(plain.substr(open + 1, close - open - 1)) + " ";
    plain.replace(open, close + 1 - open, inside);
    open += inside.size();
  }
  if (const std::size_t colon = plain.rfind(':');
      colon != plain.npos && IsCount(plain.substr(colon + 1))) {
    plain.replace(colon, 1, " x");  // "a100:8"
  }
  std::replace(plain.begin(), plain.end(), '*', 'x');
  constexpr std::string_view kSeparators = "-_)[]/:\t";
  std::replace_if(
      plain.begin(), plain.end(), [&](char c) { return kSeparators.find(c) != kSeparators.npos; },
      ' ');
  static const std::set<std::string> kSizes = {"g", "gb", "gib"};
  static const std::set<std::string> kThings = {"x",     "gpu",  "gpus", "card",
                                                "cards", "node", "nodes"};
  Words words;
  for (const std::string& token : Split(plain)) {
    const bool is_behind = !words.empty() && IsCount(words.back());
    if (is_behind && kSizes.contains(token)) {
      words.back() += token;
    } else if (is_behind && kThings.contains(token)) {
      words.back() += "x";
    } else if (!words.empty() && words.back() == "x" && IsCount(token)) {
      words.back() += token;
    } else {
      words.push_back(token);
    }
  }
  return words;
}

// A longer text is no name: words are looked for in it from each place on.
constexpr std::size_t kLongestName = 200;

bool Fits(const Row& row, const Said& said) {
  const GpuSpec& gpu = FindGpu(row.gpu, "catalog/gpu_names.json");
  const auto has_size = [&](std::int64_t gb) { return IsIn(row.gb, gb); };
  return AllOf(row.words, [&](const std::string& word) { return Has(said.words, word); }) &&
         AllOf(said.words,
               [&](const std::string& word) {
                 const auto maker = TheNames().makers.find(gpu.vendor);
                 return Has(row.words, word) || Has(row.also, word) ||
                        Has(TheNames().makers.at("any"), word) || word == gpu.architecture ||
                        (maker != TheNames().makers.end() && Has(maker->second, word));
               }) &&
         AllOf(said.forms, [&](const std::string& form) { return form == row.form; }) &&
         AllOf(said.gb, has_size) && (row.only_with != "gb" || !said.gb.empty()) &&
         (row.only_with != "form" || !said.forms.empty() || !said.gb.empty());
}

// Cards that share a word with a number in it, "h100": they differ in memory or form.
Words Family(const Said& said) {
  Words family;
  for (const Row& row : TheNames().rows) {
    const bool shares = AnyOf(row.words, [&](const auto& word) {
      return std::any_of(word.begin(), word.end(),
                         [](unsigned char c) { return std::isdigit(c); }) &&
             Has(said.words, word);
    });
    if (shares && !Has(family, row.gpu)) {
      family.push_back(row.gpu);
    }
  }
  return family;
}

void Explain(Said& said, const Words& tokens) {
  for (const std::string& token : tokens) {
    const auto found = TheNames().refused.find(token.substr(0, token.find('.')));
    if (found != TheNames().refused.end()) {
      said.name.why = found->second;
      return;
    }
  }
  const Words family = Family(said);
  if (!said.bare.empty()) {
    said.name.why =
        "write the count as \"x" + said.bare + "\", or the memory as \"" + said.bare + "GB\"";
  }
  if (!family.empty()) {
    said.name.why += said.name.why.empty() ? "" : "; ";
    said.name.why += "the catalog has of that name " + Listed(family);
  } else if (!said.unknown.empty() && !said.words.empty()) {
    said.name.why = Quoted(said.unknown) +
                    " is in no name of the catalog's GPUs (shardwright list gpus); a cluster file "
                    "may describe another one (docs/clusters.md, \"gpu\")";
  }
}

Said Read(std::string_view text) {
  Said said;
  if (text.size() > kLongestName) {
    said.unknown = text;
    return said;
  }
  const Words tokens = Plain(text);
  for (const std::string& token : tokens) {
    const std::size_t counts = said.name.counts.size();
    AddToken(token, said);
    if (!IsOfAMaker(token) && said.name.counts.size() == counts) {
      said.name.key += (said.name.key.empty() ? "" : "-") + token;
    }
  }
  said.name.is_only_counts = said.unknown.empty() && said.gb.empty() && said.forms.empty() &&
                             AllOf(said.words, IsOfAMaker);
  if (said.unknown.empty()) {
    Words found;
    std::set<std::int64_t> sizes;
    for (const Row& row : TheNames().rows) {
      if (Fits(row, said)) {
        found.push_back(row.gpu);
        sizes.insert(row.gb.begin(), row.gb.begin() + (row.gb.empty() ? 0 : 1));
      }
    }
    const bool is_ours = Has(found, said.name.key);  // "p100-16"
    said.name.gpu = found.empty() ? "" : is_ours ? said.name.key : found.front();
    if (sizes.size() > 1 && !is_ours) {
      said.name.assumed = "GPU: " + found.front() + " of " + Listed(found) + ", which it may be";
    }
  }
  if (said.name.gpu.empty()) {
    Explain(said, tokens);
  }
  return said;
}

}  // namespace

GpuName ReadGpuName(std::string_view text) {
  return Read(text).name;
}

std::string GpuOfProduct(std::string_view product) {
  const GpuName name = ReadGpuName(product);
  return name.counts.empty() ? name.gpu : "";
}

std::string GpuOfPciDevice(std::string_view device) {
  device.remove_prefix(device.starts_with("0x") ? 2 : 0);
  for (const Row& row : TheNames().rows) {
    if (!row.pci.empty() && row.pci == device) {
      return row.gpu;
    }
  }
  return "";
}

std::int64_t MostOfANode(const GpuSpec& gpu) {
  for (const std::string& key : {gpu.name, gpu.scale_up ? gpu.architecture : ""}) {
    if (const auto found = TheNames().most.find(key); found != TheNames().most.end()) {
      return found->second;
    }
  }
  return gpu.scale_up ? 8 : 0;
}

const std::vector<std::pair<std::string, std::string>>& CloudNodes() {
  return TheNames().nodes;
}

std::string DidYouMeanProduct(std::string_view word, const std::vector<std::string>& names) {
  const auto digits = [](std::string_view text) {
    std::string kept;
    std::copy_if(text.begin(), text.end(), std::back_inserter(kept),
                 [](unsigned char c) { return std::isdigit(c); });
    return kept;
  };
  const std::string own = digits(word);
  std::vector<std::string> alike;
  std::copy_if(names.begin(), names.end(), std::back_inserter(alike), [&](const std::string& name) {
    const std::string other = digits(name);
    return !own.empty() && !other.empty() && name.front() == word.front() &&
           (own.starts_with(other) || other.starts_with(own));
  });
  return DidYouMean(word, alike);
}

}  // namespace shardwright
