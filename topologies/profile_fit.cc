#include "topologies/profile_fit.h"

#include "core/embedded.h"
#include "core/error.h"
#include "core/json.h"
#include "core/ranges.h"
#include "topologies/internal/profile_fit.h"
#include "topologies/internal/shipped_profiles.h"

namespace shardwright {
namespace internal {

ProfileFit ReadProfileFit(const JsonValue& value) {
  value.AllowOnly({"gpu", "runs", "sources", "left_out_error"});
  ProfileFit fit;
  fit.gpu = value.At("gpu").AsString();
  const JsonValue runs = value.At("runs");
  for (const std::string& kernel_set : runs.Keys()) {
    fit.runs.emplace_back(kernel_set, runs.At(kernel_set).AsInt(1));
  }
  if (fit.runs.empty()) {
    throw runs.Error("the number of runs by kernel set");
  }
  if (const auto sources = value.Find("sources")) {
    for (std::size_t i = 0; i < sources->size(); ++i) {
      fit.sources.push_back((*sources)[i].AsString());
    }
  }
  const JsonValue error = value.At("left_out_error");
  fit.left_out_error = error.AsDouble();
  if (!(fit.left_out_error >= 0 && fit.left_out_error <= 1)) {
    throw error.Error("from 0 to 1");
  }
  return fit;
}

}  // namespace internal

bool ProfileFit::Knows(std::string_view source) const {
  return IsIn(sources, source);
}

std::int64_t ProfileFit::RunCount() const {
  std::int64_t count = 0;
  for (const auto& [kernel_set, of_it] : runs) {
    count += of_it;
  }
  return count;
}

std::int64_t ProfileFit::RunCount(const std::string& kernel_set) const {
  const auto found = FindIf(runs, [&](const auto& row) { return row.first == kernel_set; });
  return found == runs.end() ? 0 : found->second;
}

std::optional<ProfileFit> FitOf(const std::string& name) {
  for (const EmbeddedFile& file : internal::ShippedProfiles()) {
    if (file.name == name) {
      const JsonValue root = JsonValue::Parse(file.text, std::string(file.path));
      const auto extends = root.Find("extends");
      if (const auto fit = root.Find("fit")) {
        return internal::ReadProfileFit(*fit);
      }
      return extends ? FitOf(extends->AsString()) : std::nullopt;
    }
  }
  SW_CHECK(false, "no shipped profile " + name);
  return std::nullopt;
}

}  // namespace shardwright
