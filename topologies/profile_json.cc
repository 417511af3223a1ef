// Profile files. The format is described in docs/clusters.md.

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/json.h"
#include "core/ranges.h"
#include "topologies/internal/cluster_json.h"
#include "topologies/internal/number_json.h"
#include "topologies/internal/profile_fit.h"
#include "topologies/profile.h"

namespace shardwright {
namespace {

using internal::OrderedJson;

// Reads numbers of one section over what a base profile already gives.
struct SectionReader {
  JsonValue section;
  bool has_base = false;  // absent keys keep the base's value instead of being an error
  std::optional<Origin> origin;
  std::vector<std::string>* keys = nullptr;  // those that may stand in the section
  // Fractions of what hardware can do: above 1 is a mistake, and 0 would take for ever.
  double largest_factor = 1;
  bool factor_may_be_zero = false;

  template <class T>
  void operator()(const char* key, Number<T>& number) const {
    keys->emplace_back(key);
    if (has_base && !section.Find(key)) {
      return;
    }
    number = internal::ReadNumber<T>(section.At(key), origin);
    if constexpr (std::is_same_v<T, double>) {
      const bool is_zero = number.value == 0;
      if (number.value > largest_factor || (is_zero && !factor_may_be_zero)) {
        throw section.At(key).Error(
            std::string(factor_may_be_zero ? "from 0 to " : "above 0, at most ") +
            std::to_string(static_cast<int>(largest_factor)));
      }
    }
  }
};

// Memory traffic per byte sent, a sensitivity that may be none, an exponent.
constexpr double kLargestOverlapFactor = 10;
constexpr double kMostKeys = 1'000;

std::vector<std::string> OriginKeys() {
  return {"kind", "source", "date"};
}

void ReadCompute(const JsonValue& section, bool has_base, ComputeProfile& out) {
  std::vector<std::string> keys = OriginKeys();
  keys.emplace_back("gemm");
  const SectionReader reader{section, has_base, internal::ReadOrigin(section, std::nullopt), &keys};
  kComputeProfileFields(out, reader);
  SectionReader extras = reader;
  extras.has_base = true;
  extras.factor_may_be_zero = true;
  kComputeProfileExtras(out, extras);
  extras.largest_factor = kMostKeys;
  kComputeProfileCounts(out, extras);
  for (const auto& [name, library] : {std::pair("cudnn_attention", &out.cudnn_attention),
                                      std::pair("flash3_attention", &out.flash3_attention),
                                      std::pair("triton_attention", &out.triton_attention),
                                      std::pair("ck_attention", &out.ck_attention),
                                      std::pair("own_attention", &out.own_attention)}) {
    if ((library->forward.value > 0) != (library->backward.value > 0)) {
      throw section.Error("both " + std::string(name) + "_forward and " + name +
                          "_backward, or none");
    }
  }
  section.AllowOnly(keys);
  if (has_base && !section.Find("gemm")) {
    return;
  }
  const JsonValue gemm = section.At("gemm");
  gemm.AllowOnly({"fp32", "tf32", "fp16", "bf16", "fp8"});
  out.gemm = {};  // a list of what the GPU has, never mixed with the base's
  std::vector<std::string> types;
  const SectionReader gemm_reader{gemm, false, reader.origin, &types};
  for (std::size_t i = 0; i < kMathTypeCount; ++i) {
    const char* name = MathTypeName(static_cast<MathType>(i));
    if (gemm.Find(name)) {
      gemm_reader(name, out.gemm[i].emplace());
    }
  }
}

constexpr auto kNoFields = [](auto& /*part*/, auto /*visit*/) {};

// One of the plain sections; absent ones keep the base. Files may leave out the extras.
template <class Part, class Fields, class Extras>
void ReadSection(const JsonValue& root, const char* name, bool has_base, Part& out, Fields fields,
                 Extras extras, double largest_factor = 1) {
  if (has_base && !root.Find(name)) {
    return;
  }
  const JsonValue section = root.At(name);
  std::vector<std::string> keys = OriginKeys();
  SectionReader reader{section, has_base,       internal::ReadOrigin(section, std::nullopt),
                       &keys,   largest_factor, largest_factor > 1};
  fields(out, reader);
  reader.has_base = true;
  extras(out, reader);
  section.AllowOnly(keys);
}

// The entry named `name`, added at its sorted place when it is not there.
template <class Row>
Row& FindOrAdd(std::vector<Row>& rows, const std::string& name, bool& is_new) {
  auto at = std::lower_bound(rows.begin(), rows.end(), name,
                             [](const Row& row, const std::string& n) { return row.name < n; });
  is_new = at == rows.end() || at->name != name;
  if (is_new) {
    at = rows.insert(at, Row{});
    at->name = name;
  }
  return *at;
}

// What the library chooses by, and among what.
void ReadChoices(const JsonValue& value, std::vector<std::string>& keys, TransportProfile& out) {
  for (const char* key : {"choice", "all_reduce_choice", "all_reduce_protocols"}) {
    keys.emplace_back(key);
  }
  if (const auto choice = value.Find("choice")) {
    out.choice = static_cast<CollectiveChoice>(choice->AsChoice(kCollectiveChoiceNames));
  }
  if (const auto choice = value.Find("all_reduce_choice")) {
    out.all_reduce_choice = static_cast<CollectiveChoice>(choice->AsChoice(kCollectiveChoiceNames));
  }
  if (const auto protocols = value.Find("all_reduce_protocols")) {
    out.all_reduce_protocols.clear();
    for (std::size_t i = 0; i < protocols->size(); ++i) {
      out.all_reduce_protocols.push_back((*protocols)[i].AsString());
    }
  }
}

void ReadTransport(const JsonValue& value, bool has_base, TransportProfile& out) {
  std::vector<std::string> keys = OriginKeys();
  keys.emplace_back("protocols");
  const std::optional<Origin> origin = internal::ReadOrigin(value, std::nullopt);
  kTransportProfileFields(out, SectionReader{value, has_base, origin, &keys});
  kTransportProfileExtras(out, SectionReader{value, true, origin, &keys, kLargestOverlapFactor});
  if (out.overlap.value < 1) {
    throw value.At("overlap").Error("from 1 to 10");
  }
  ReadChoices(value, keys, out);
  value.AllowOnly(keys);
  if (has_base && !value.Find("protocols")) {
    return;
  }
  const JsonValue protocols = value.At("protocols");
  for (const std::string& name : protocols.Keys()) {
    bool is_new = false;
    ProtocolProfile& protocol = FindOrAdd(out.protocols, name, is_new);
    const JsonValue row = protocols.At(name);
    std::vector<std::string> row_keys = OriginKeys();
    SectionReader reader{row, !is_new, internal::ReadOrigin(row, origin), &row_keys};
    kProtocolProfileFields(protocol, reader);
    reader.has_base = true;
    kProtocolProfileExtras(protocol, reader);
    reader.largest_factor = kLargestOverlapFactor;
    kProtocolProfileFactors(protocol, reader);
    row.AllowOnly(row_keys);
  }
  if (out.protocols.empty()) {
    throw protocols.Error("at least one protocol");
  }
}

void ReadTransports(const JsonValue& root, bool has_base, std::vector<TransportProfile>& out) {
  if (has_base && !root.Find("transports")) {
    return;
  }
  const JsonValue transports = root.At("transports");
  for (const std::string& name : transports.Keys()) {
    bool is_new = false;
    TransportProfile& transport = FindOrAdd(out, name, is_new);
    ReadTransport(transports.At(name), !is_new, transport);
  }
}

Profile ReadBase(const JsonValue& root) {
  const auto extends = root.Find("extends");
  if (!extends) {
    return {};
  }
  const std::string name = extends->AsString();
  const std::vector<std::string> names = ListProfiles();
  if (!IsIn(names, name)) {
    throw extends->Error("the name of a shipped profile", DidYouMean(name, names));
  }
  return LoadProfile(name);
}

std::string ReadText(const JsonValue& root, const char* key, const std::string& otherwise) {
  const auto value = root.Find(key);
  return value ? value->AsString() : otherwise;
}

template <class Part, class Fields>
OrderedJson FieldsJson(const Part& part, Fields fields) {
  OrderedJson object = OrderedJson::object();
  fields(part,
         [&](const char* key, const auto& number) { object[key] = internal::NumberJson(number); });
  return object;
}

// The numbers that differ from what a file without them means.
template <class Part, class Fields>
void AddExtras(const Part& part, Fields fields, OrderedJson& object) {
  const OrderedJson otherwise = FieldsJson(Part(), fields);
  const OrderedJson all = FieldsJson(part, fields);
  for (const auto& [key, number] : all.items()) {
    if (number != otherwise[key]) {
      object[key] = number;
    }
  }
}

template <class Part, class Fields, class Extras>
OrderedJson SectionJson(const Part& part, Fields fields, Extras extras) {
  OrderedJson object = FieldsJson(part, fields);
  AddExtras(part, extras, object);
  return object;
}

OrderedJson TransportsJson(const std::vector<TransportProfile>& rows) {
  OrderedJson transports = OrderedJson::object();
  for (const TransportProfile& transport : rows) {
    OrderedJson row = FieldsJson(transport, kTransportProfileFields);
    row["choice"] = CollectiveChoiceName(transport.choice);
    if (transport.all_reduce_choice) {
      row["all_reduce_choice"] = CollectiveChoiceName(*transport.all_reduce_choice);
    }
    if (!transport.all_reduce_protocols.empty()) {
      row["all_reduce_protocols"] = transport.all_reduce_protocols;
    }
    AddExtras(transport, kTransportProfileExtras, row);
    for (const ProtocolProfile& protocol : transport.protocols) {
      OrderedJson& numbers = row["protocols"][protocol.name];
      numbers = SectionJson(protocol, kProtocolProfileFields, kProtocolProfileExtras);
      AddExtras(protocol, kProtocolProfileFactors, numbers);
    }
    transports[transport.name] = row;
  }
  return transports;
}

}  // namespace

const char* CollectiveChoiceName(CollectiveChoice choice) {
  return kCollectiveChoiceNames.at(static_cast<std::size_t>(choice)).data();
}

Profile ParseProfile(std::string_view text, const std::string& file) {
  const JsonValue root = JsonValue::Parse(text, file);
  root.AllowOnly({"format", "version", "name", "description", "extends", "architecture",
                  "kernel_set", "fit", "compute", "host", "copy", "transports", "overlap",
                  "memory"});
  internal::CheckFormat(root, "shardwright-profile");
  if (const auto fit = root.Find("fit")) {
    (void)internal::ReadProfileFit(*fit);
  }
  Profile profile = ReadBase(root);
  const bool has_base = root.Find("extends").has_value();
  profile.name = root.At("name").AsString();
  profile.description = ReadText(root, "description", profile.description);
  profile.architecture = ReadText(root, "architecture", profile.architecture);
  profile.kernel_set = ReadText(root, "kernel_set", profile.kernel_set);
  if (!has_base || root.Find("compute")) {
    ReadCompute(root.At("compute"), has_base, profile.compute);
  }
  ReadSection(root, "host", has_base, profile.host, kHostProfileFields, kHostProfileExtras);
  ReadSection(root, "copy", has_base, profile.copy, kCopyProfileFields, kNoFields);
  ReadTransports(root, has_base, profile.transports);
  ReadSection(root, "overlap", has_base, profile.overlap, kOverlapProfileFields,
              kOverlapProfileExtras, kLargestOverlapFactor);
  ReadSection(root, "memory", has_base, profile.memory, kMemoryProfileFields, kNoFields);
  return profile;
}

std::string ProfileJson(const Profile& profile) {
  OrderedJson root = OrderedJson::object();
  root["format"] = "shardwright-profile";
  root["version"] = 1;
  root["name"] = profile.name;
  root["description"] = profile.description;
  root["architecture"] = profile.architecture;
  root["kernel_set"] = profile.kernel_set;
  OrderedJson gemm = OrderedJson::object();
  for (std::size_t i = 0; i < kMathTypeCount; ++i) {
    if (profile.compute.gemm[i]) {
      gemm[MathTypeName(static_cast<MathType>(i))] = internal::NumberJson(*profile.compute.gemm[i]);
    }
  }
  root["compute"] = SectionJson(profile.compute, kComputeProfileFields, kComputeProfileExtras);
  AddExtras(profile.compute, kComputeProfileCounts, root["compute"]);
  root["compute"]["gemm"] = gemm;
  root["host"] = SectionJson(profile.host, kHostProfileFields, kHostProfileExtras);
  root["copy"] = FieldsJson(profile.copy, kCopyProfileFields);
  root["transports"] = TransportsJson(profile.transports);
  root["overlap"] = SectionJson(profile.overlap, kOverlapProfileFields, kOverlapProfileExtras);
  root["memory"] = FieldsJson(profile.memory, kMemoryProfileFields);
  return internal::PrettyJson(root);
}

}  // namespace shardwright
