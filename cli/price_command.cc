#include <array>
#include <type_traits>

#include <nlohmann/json.hpp>

#include "analysis/collective_prices.h"
#include "analysis/kernel_prices.h"
#include "cli/command.h"
#include "core/json.h"

namespace shardwright {
namespace {

using Json = nlohmann::ordered_json;

std::string TextIn(const JsonValue& json, const char* key) {
  const auto value = json.Find(key);
  return value ? value->AsString() : "";
}

std::int64_t CountIn(const JsonValue& json, const char* key) {
  const auto value = json.Find(key);
  return value ? value->AsInt() : 0;
}

double NumberIn(const JsonValue& json, const char* key) {
  const auto value = json.Find(key);
  return value ? value->AsDouble() : 0;
}

// The elements of the list at `key`, read one by one; none where it is missing.
template <class Read>
void ForEach(const JsonValue& json, const char* key, Read read) {
  const auto list = json.Find(key);
  for (std::size_t i = 0; list && i < list->size(); ++i) {
    read((*list)[i]);
  }
}

Json PriceKernels(const JsonValue& json, const std::string& profile) {
  Json prices = Json::array();
  ForEach(json, "kernels", [&](const JsonValue& question) {
    std::vector<std::string> known;
    KernelRow row;
    kKernelRowFields(row, [&](const char* key, auto& value) {
      known.emplace_back(key);
      if constexpr (std::is_same_v<decltype(value), std::string&>) {
        value = TextIn(question, key);
      } else if constexpr (std::is_same_v<decltype(value), bool&>) {
        value = CountIn(question, key) == 1;
      } else {
        value = CountIn(question, key);
      }
    });
    question.AllowOnly(known);
    const KernelPrice price = PriceKernel(row, profile);
    prices.push_back(price.error.empty()
                         ? Json{{"time_s", price.time.value}, {"profile", price.profile}}
                         : Json{{"error", price.error}});
  });
  return prices;
}

std::vector<PricedPlace> ReadPlaces(const JsonValue& json, const std::string& profile,
                                    ProfilesByName& profiles) {
  std::vector<PricedPlace> places;
  ForEach(json, "places", [&](const JsonValue& place) {
    place.AllowOnly({"cluster", "nodes", "gpus_per_node", "gpus", "profile"});
    places.push_back(PricedPlaceOf(
        place.At("cluster").AsString(), place.At("nodes").AsInt(1, kMaxRanks),
        place.At("gpus_per_node").AsInt(1, kMaxRanks), place.At("gpus").AsInt(1, kMaxRanks),
        profile.empty() ? TextIn(place, "profile") : profile, profiles));
  });
  return places;
}

constexpr std::array<std::string_view, 5> kOpNames = {"all_gather", "reduce_scatter", "all_reduce",
                                                      "broadcast", "alltoall"};
constexpr std::array<OpCode, 5> kOps = {OpCode::kAllGather, OpCode::kReduceScatter,
                                        OpCode::kAllReduce, OpCode::kBroadcast, OpCode::kAllToAll};

std::vector<PricedCollective> ReadCollectives(const JsonValue& json,
                                              const std::vector<PricedPlace>& places) {
  std::vector<PricedCollective> collectives;
  ForEach(json, "collectives", [&](const JsonValue& row) {
    row.AllowOnly({"place", "op", "bytes", "tool_s", "measured_s"});
    const auto at = static_cast<std::size_t>(row.At("place").AsInt());
    if (at >= places.size() || !places[at].error.empty()) {
      throw row.At("place").Error("one of the places that exist");
    }
    collectives.push_back({&places[at], kOps[row.At("op").AsChoice(kOpNames)],
                           Bytes(row.At("bytes").AsInt(1)), Seconds(NumberIn(row, "tool_s")),
                           Seconds(NumberIn(row, "measured_s"))});
  });
  return collectives;
}

std::vector<NetworkNumber> ReadNumbers(const JsonValue& step) {
  std::vector<NetworkNumber> numbers;
  ForEach(step, "numbers", [&](const JsonValue& row) {
    row.AllowOnly({"architecture", "profile", "transport", "protocol", "field", "lower", "upper",
                   "expected", "expected_width", "value"});
    numbers.push_back({TextIn(row, "architecture"), TextIn(row, "profile"),
                       TextIn(row, "transport"), TextIn(row, "protocol"),
                       row.At("field").AsString(), NumberIn(row, "lower"), NumberIn(row, "upper"),
                       NumberIn(row, "expected"), NumberIn(row, "expected_width"),
                       NumberIn(row, "value")});
  });
  return numbers;
}

// Fits the numbers of a step to its rows, or, without rows, gives them the values that it says.
Json RunStep(const JsonValue& step, const std::vector<PricedCollective>& collectives,
             const ProfilesByName& profiles) {
  std::vector<NetworkNumber> numbers = ReadNumbers(step);
  std::vector<const PricedCollective*> rows;
  ForEach(step, "rows", [&](const JsonValue& at) {
    const auto i = static_cast<std::size_t>(at.AsInt());
    if (i >= collectives.size() || collectives[i].measured.value <= 0) {
      throw at.Error("the place of a collective with measured_s in the list");
    }
    rows.push_back(&collectives[i]);
  });
  Json result = {{"evaluations", 0}, {"values", Json::array()}};
  if (!rows.empty() && !numbers.empty()) {
    result["evaluations"] = FitNumbers(rows, profiles, numbers);
  }
  for (const NetworkNumber& number : numbers) {
    SetNumber(number, profiles);
    result["values"].push_back(number.value);
  }
  return result;
}

std::string ProfileWith(const JsonValue& write) {
  Profile profile = LoadProfile(write.At("extends").AsString());
  const Origin origin{NumberKind::kFitted, write.At("source").AsString(),
                      write.At("date").AsString()};
  for (const NetworkNumber& number : ReadNumbers(write)) {
    SetNumber(number, origin, profile);
  }
  profile.name += "-fitted";
  return ProfileJson(profile);
}

Json PlaceJson(const PricedPlace& place) {
  if (!place.error.empty()) {
    return {{"error", place.error}};
  }
  return {{"fabric", place.fabric},
          {"architecture", place.path.nccl.architecture},
          {"is_inside", place.path.network == nullptr},
          {"profile", place.profile->name}};
}

}  // namespace

int PriceCommand(const Arguments& arguments) {
  const JsonValue json = JsonValue::ReadFile(arguments.Get("QUESTIONS").text);
  json.AllowOnly({"profile", "places", "collectives", "steps", "kernels", "write"});
  const std::string profile = TextIn(json, "profile");
  Json answer = ReportHead("shardwright-prices");
  ProfilesByName profiles;
  const std::vector<PricedPlace> places = ReadPlaces(json, profile, profiles);
  const std::vector<PricedCollective> collectives = ReadCollectives(json, places);
  for (const PricedPlace& place : places) {
    answer["places"].push_back(PlaceJson(place));
  }
  for (const auto& [name, loaded] : profiles) {
    answer["profiles"].push_back({{"name", name},
                                  {"library_call_s", loaded->host.library_call.value.value},
                                  {"library_peer_s", loaded->host.library_peer.value.value}});
  }
  ForEach(json, "steps", [&](const JsonValue& step) {
    answer["steps"].push_back(RunStep(step, collectives, profiles));
  });
  for (const PricedCollective& collective : collectives) {
    answer["collectives"].push_back(PriceOf(collective).value);
  }
  answer["kernels"] = PriceKernels(json, profile);
  if (const auto write = json.Find("write")) {
    answer["written"] = ProfileWith(*write);
  }
  arguments.Print(answer.dump() + '\n');
  return kExitOk;
}

}  // namespace shardwright
