#include <cmath>
#include <cstddef>
#include <string>

#include <nlohmann/json.hpp>

#include "analysis/fit_runs.h"
#include "core/json.h"
#include "core/units.h"
#include "topologies/profile.h"

namespace shardwright {
namespace {

using Json = nlohmann::ordered_json;

// The object at the path's keys but the last, made where it is missing. "compute.gemm.bf16" ->
// compute, gemm.
Json& Parent(Json& root, const std::string& path, std::string& last) {
  Json* at = &root;
  std::size_t begin = 0;
  while (true) {
    const std::size_t dot = path.find('.', begin);
    if (dot == std::string::npos) {
      last = path.substr(begin);
      return *at;
    }
    at = &(*at)[path.substr(begin, dot - begin)];
    begin = dot + 1;
  }
}

// A profile's own list of matrix-product rates replaces that of the profile it extends, so the
// rates that were not fitted are repeated.
void KeepOtherGemmRates(const std::string& base, Json& root) {
  if (!root.contains("compute") || !root["compute"].contains("gemm")) {
    return;
  }
  Json& rates = root["compute"]["gemm"];
  const Json all = Json::parse(ProfileJson(LoadProfile(base)));
  for (const auto& [type, rate] : all["compute"]["gemm"].items()) {
    if (!rates.contains(type)) {
      rates[type] = rate;
    }
  }
}

// Three digits are more than the rows determine.
double ToThreeDigits(double value) {
  constexpr double kDigits = 1000;
  double scale = 1;
  if (value <= 0) {
    return 0;
  }
  while (value * scale < kDigits / 10) {
    scale *= 10;
  }
  return std::round(value * scale) / scale;
}

}  // namespace

std::string FittedProfileJson(const FittedStack& stack, const std::string& source,
                              const std::string& date) {
  Json root;
  root["format"] = "shardwright-profile";
  root["version"] = 1;
  root["name"] = stack.gpu + "-" + stack.kernel_set;
  root["description"] = stack.gpu + ", " + stack.kernel_set + ", fitted to " +
                        std::to_string(stack.rows) + " published runs";
  root["extends"] = stack.base;
  root["architecture"] = stack.gpu;
  root["kernel_set"] = stack.kernel_set;
  if (stack.spread > 0) {  // models were left out
    root["fit"]["gpu"] = stack.gpu;
    root["fit"]["runs"] = stack.rows_of;
    root["fit"]["sources"] = stack.sources;
    root["fit"]["left_out_error"] = ToThreeDigits(stack.left_out_error);
  }
  for (const FittedNumber& number : stack.numbers) {
    std::string last;
    Json& parent = Parent(root, number.path, last);
    Json value;
    // Three digits, too.
    value["value"] =
        number.is_time ? Json(Format(Seconds(number.value))) : Json(ToThreeDigits(number.value));
    value["kind"] = "fitted";
    value["source"] = source;
    value["date"] = date;
    if (stack.spread > 0) {
      value["spread"] = ToThreeDigits(stack.spread);
    }
    parent[last] = value;
  }
  KeepOtherGemmRates(stack.base, root);
  return root.dump(2) + '\n';
}

}  // namespace shardwright
