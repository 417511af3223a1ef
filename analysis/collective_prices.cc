#include "analysis/collective_prices.h"

#include <cmath>
#include <cstddef>
#include <optional>
#include <span>
#include <string_view>
#include <type_traits>
#include <utility>

#include "analysis/optimize.h"
#include "core/error.h"
#include "core/text.h"

namespace shardwright {
namespace {

// One number in a profile.
struct NumberPlace {
  double* value;
  Origin* origin;
};

template <class T>
NumberPlace PlaceIn(Number<T>& number) {
  if constexpr (std::is_same_v<T, double>) {
    return {&number.value, &number.origin};
  } else {
    return {&number.value.value, &number.origin};
  }
}

// The number that `name` names in one of the lists of a part of a profile; counts and sizes are
// given, not fitted.
template <class Part, class... Lists>
NumberPlace FieldOf(Part& part, const std::string& name, const Lists&... lists) {
  std::optional<NumberPlace> found;
  const auto visit = [&]<class T>(std::string_view field, Number<T>& number) {
    if constexpr (!std::is_same_v<T, std::int64_t> && !std::is_same_v<T, Bytes>) {
      found = field == name ? PlaceIn(number) : found;
    }
  };
  (lists(part, visit), ...);
  if (!found) {
    throw InputError("field", Quoted(name), "a number that fits may change");
  }
  return *found;
}

// Profiles for one machine extend those of their GPUs and name no architecture; that of GB200 names
// the GPU instead.
bool IsMeantFor(const NetworkNumber& number, const Profile& profile) {
  if (!number.profile.empty()) {
    return profile.name == number.profile;
  }
  return number.architecture.empty() || profile.architecture == number.architecture ||
         (profile.architecture.empty() && number.architecture == "hopper" &&
          profile.name.starts_with("h100")) ||
         (number.architecture == "blackwell" && profile.architecture.starts_with("gb200"));
}

bool IsMeantFor(const NetworkNumber& number, const TransportProfile& transport) {
  return number.transport == "between nodes"
             ? transport.name != "nvlink" && transport.name != "pcie"
             : transport.name == number.transport;
}

// Where `number` stands in a profile, if it does.
std::vector<NumberPlace> PlacesOf(const NetworkNumber& number, Profile& profile) {
  std::vector<NumberPlace> places;
  if (!IsMeantFor(number, profile)) {
    return places;
  }
  if (number.transport.empty()) {
    places.push_back(FieldOf(profile.host, number.field, kHostProfileExtras));
  }
  for (TransportProfile& transport : profile.transports) {
    if (!IsMeantFor(number, transport)) {
      continue;
    }
    if (number.protocol.empty()) {
      places.push_back(
          FieldOf(transport, number.field, kTransportProfileFields, kTransportProfileExtras));
    }
    for (ProtocolProfile& protocol : transport.protocols) {
      if (!number.protocol.empty() && protocol.name == number.protocol) {
        places.push_back(FieldOf(protocol, number.field, kProtocolProfileFields,
                                 kProtocolProfileExtras, kProtocolProfileFactors));
      }
    }
  }
  return places;
}

// Logarithmic errors count by their size, small ones by their square, so that a few rows that
// cannot be met (two reports of one machine that differ by 41 %) do not pull the others away.
double Loss(double predicted, double measured) {
  constexpr double kSquareBelow = 0.03;
  const double error = std::log(predicted / measured) / kSquareBelow;
  return kSquareBelow * (std::sqrt(1 + error * error) - 1);
}

// What numbers that are far from what is expected of them add to the objective: little, so that it
// counts only where the rows do not tell.
double Surprise(std::span<const double> values, const std::vector<NetworkNumber>& numbers) {
  constexpr double kWeight = 0.001;
  double sum = 0;
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    if (numbers[i].expected > 0) {
      const double distance = values[i] * numbers[i].upper - numbers[i].expected;
      sum += kWeight * std::pow(distance / numbers[i].expected_width, 2);
    }
  }
  return sum;
}

std::vector<double*> ValuesOf(const NetworkNumber& number, const ProfilesByName& profiles) {
  std::vector<double*> values;
  for (const auto& [name, profile] : profiles) {
    for (const NumberPlace& place : PlacesOf(number, *profile)) {
      values.push_back(place.value);
    }
  }
  return values;
}

}  // namespace

Profile& ProfileFor(const std::string& name, const GpuSpec& gpu, ProfilesByName& profiles) {
  if (const auto known = profiles.find(name); known != profiles.end()) {
    return *known->second;
  }
  Profile profile = name.empty() ? DefaultProfile(gpu, "") : LoadProfile(name);
  if (name.empty() && profile.architecture.empty()) {
    profile = DefaultProfile(gpu, "torch");  // MI300X has no other
  }
  const std::string key = name.empty() ? profile.name : name;
  const auto known = profiles.find(key);
  return known != profiles.end()
             ? *known->second
             : *profiles.emplace(key, std::make_unique<Profile>(std::move(profile))).first->second;
}

PricedPlace PricedPlaceOf(const std::string& cluster, std::int64_t nodes,
                          std::int64_t gpus_per_node, std::int64_t ranks,
                          const std::string& profile, ProfilesByName& profiles) {
  PricedPlace place;
  const GroupShape group{ranks, 1};
  try {
    place.cluster = LoadCluster(cluster, nodes, gpus_per_node);
    const RingPath ring = FindRing(place.cluster, group);
    place.fabric = ring.inter_hops > 0
                       ? place.cluster.network
                       : place.cluster.gpu.architecture +
                             (ring.intra_kind == ScaleUpKind::kNvlink ? " nvlink" : " pcie");
  } catch (const InputError& error) {
    place.error = error.what();
    return place;
  }
  place.profile = &ProfileFor(profile, place.cluster.gpu, profiles);
  place.path = FindCollectivePath(place.cluster, *place.profile, group);
  return place;
}

Seconds PriceOf(const PricedCollective& collective) {
  const PricedPlace& place = *collective.place;
  Seconds call = place.profile->host.library_call.value;
  if (collective.op == OpCode::kAllToAll) {
    call += static_cast<double>(place.path.ring.size - 1) * place.profile->host.library_peer.value;
  }
  return std::max(CollectiveTime(collective.op, collective.bytes, place.path), call) +
         collective.tool;
}

void SetNumber(const NetworkNumber& number, const ProfilesByName& profiles) {
  for (double* value : ValuesOf(number, profiles)) {
    *value = number.value;
  }
}

void SetNumber(const NetworkNumber& number, const Origin& origin, Profile& profile) {
  for (const NumberPlace& place : PlacesOf(number, profile)) {
    *place.value = number.value;
    *place.origin = origin;
  }
}

std::int64_t FitNumbers(const std::vector<const PricedCollective*>& rows,
                        const ProfilesByName& profiles, std::vector<NetworkNumber>& numbers) {
  std::vector<std::vector<double*>> places;
  std::vector<FitVariable> variables;
  for (const NetworkNumber& number : numbers) {
    const std::string name = number.transport + " " + number.protocol + " " + number.field;
    const std::vector<double*>& values = places.emplace_back(ValuesOf(number, profiles));
    if (values.empty() || !(number.lower < number.upper)) {
      throw InputError("numbers", Quoted(name), "a number of the profiles, and bounds around it");
    }
    // In units of the upper bound, so that times and factors are of one size.
    variables.push_back({name, number.lower / number.upper, 1, *values.front() / number.upper});
  }
  const auto set_all = [&](std::span<const double> values) {
    for (std::size_t i = 0; i < places.size(); ++i) {
      for (double* value : places[i]) {
        *value = values[i] * numbers[i].upper;
      }
    }
  };
  constexpr std::int64_t kMostEvaluations = 60000;
  constexpr Bytes kSmall{64LL << 10};
  constexpr double kSmallWeight = 0.25;
  const FitResult result = Minimise(
      [&](std::span<const double> values) {
        set_all(values);
        double sum = 0;
        for (const PricedCollective* row : rows) {
          const double weight = row->bytes < kSmall ? kSmallWeight : 1;
          sum += weight * Loss(PriceOf(*row).value, row->measured.value);
        }
        return sum / static_cast<double>(rows.size()) + Surprise(values, numbers);
      },
      variables, kMostEvaluations);
  set_all(result.values);
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    numbers[i].value = result.values[i] * numbers[i].upper;
  }
  return result.evaluations;
}

}  // namespace shardwright
