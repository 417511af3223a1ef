#include "analysis/profile_numbers.h"

#include <cstddef>
#include <map>

#include "core/error.h"
#include "core/units.h"
#include "topologies/cluster.h"

namespace shardwright {
namespace {

NumberRef Of(Number<double>& number) {
  return {&number.value, &number.origin, &number.spread, false};
}
NumberRef Of(Number<Seconds>& number) {
  return {&number.value.value, &number.origin, &number.spread, true};
}

// Every number that a fit may change, by path, sorted.
std::map<std::string, NumberRef> AllNumbers(Profile& profile) {
  std::map<std::string, NumberRef> numbers;
  const auto of = [&](const std::string& section) {
    return [&numbers, section](const char* key, auto& number) {
      numbers.emplace(section + key, Of(number));
    };
  };
  kComputeProfileFitted(profile.compute, of("compute."));
  kHostProfileFitted(profile.host, of("host."));
  kOverlapProfileFitted(profile.overlap, of("overlap."));
  for (std::size_t i = 0; i < kMathTypeCount; ++i) {
    if (profile.compute.gemm[i]) {
      numbers["compute.gemm." + std::string(MathTypeName(static_cast<MathType>(i)))] =
          Of(*profile.compute.gemm[i]);
    }
  }
  for (TransportProfile& transport : profile.transports) {
    numbers["transports." + transport.name + ".efficiency"] = Of(transport.efficiency);
  }
  return numbers;
}

}  // namespace

std::vector<std::string> NumberPaths(const Profile& profile) {
  Profile copy = profile;
  std::vector<std::string> names;
  for (const auto& [name, number] : AllNumbers(copy)) {
    names.push_back(name);
  }
  return names;
}

NumberRef NumberAt(Profile& profile, std::string_view path, const std::string& where) {
  const std::map<std::string, NumberRef> numbers = AllNumbers(profile);
  const auto found = numbers.find(std::string(path));
  if (found != numbers.end()) {
    return found->second;
  }
  const std::vector<std::string> names = NumberPaths(profile);
  throw InputError(where, '"' + std::string(path) + '"',
                   "a number of a profile such as \"compute.gemm.bf16\"", DidYouMean(path, names));
}

}  // namespace shardwright
