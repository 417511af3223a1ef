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
  ComputeProfile& c = profile.compute;
  HostProfile& h = profile.host;
  OverlapProfile& o = profile.overlap;
  std::map<std::string, NumberRef> numbers = {
      {"compute.gemm_ramp", Of(c.gemm_ramp)},
      {"compute.attention_forward", Of(c.attention.forward)},
      {"compute.attention_backward", Of(c.attention.backward)},
      {"compute.triton_attention_forward", Of(c.triton_attention.forward)},
      {"compute.triton_attention_backward", Of(c.triton_attention.backward)},
      {"compute.elementwise", Of(c.elementwise)},
      {"compute.fp8_rowwise", Of(c.fp8_rowwise)},
      {"compute.own_grouped", Of(c.own_grouped)},
      {"compute.reduction", Of(c.reduction)},
      {"compute.optimizer", Of(c.optimizer)},
      {"compute.kernel_floor", Of(c.kernel_floor)},
      {"compute.kernel_gap", Of(c.kernel_gap)},
      {"compute.rank_spread", Of(c.rank_spread)},
      {"host.kernel_launch", Of(h.kernel_launch)},
      {"host.op_issue", Of(h.op_issue)},
      {"host.collective_issue", Of(h.collective_issue)},
      {"host.unit_hook", Of(h.unit_hook)},
      {"host.step", Of(h.step)},
      {"overlap.collective_rate", Of(o.collective_rate)},
      {"overlap.compute_sensitivity", Of(o.compute_sensitivity)},
  };
  for (std::size_t i = 0; i < kMathTypeCount; ++i) {
    if (c.gemm[i]) {
      numbers["compute.gemm." + std::string(MathTypeName(static_cast<MathType>(i)))] =
          Of(*c.gemm[i]);
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
