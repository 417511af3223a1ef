#include "analysis/internal/network_numbers.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <span>
#include <type_traits>
#include <utility>

#include "analysis/optimize.h"
#include "core/error.h"
#include "topologies/profile.h"

namespace shardwright {
namespace internal {
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

template <class Fields>
NumberPlace FieldIn(const Fields& fields, const std::string& name) {
  const auto found = std::find_if(fields.begin(), fields.end(),
                                  [&](const auto& field) { return field.first == name; });
  SW_CHECK(found != fields.end(), name);
  return found->second;
}

NumberPlace FieldOf(ProtocolProfile& protocol, const std::string& field) {
  const std::array<std::pair<std::string_view, NumberPlace>, 8> fields = {
      std::pair{"base_latency", PlaceIn(protocol.base_latency)},
      std::pair{"hop_latency", PlaceIn(protocol.hop_latency)},
      std::pair{"bandwidth", PlaceIn(protocol.bandwidth)},
      std::pair{"reduce_bandwidth", PlaceIn(protocol.reduce_bandwidth)},
      std::pair{"fill", PlaceIn(protocol.fill)},
      std::pair{"tree_latency", PlaceIn(protocol.tree_latency)},
      std::pair{"turn_latency", PlaceIn(protocol.turn_latency)},
      std::pair{"turn_overlap", PlaceIn(protocol.turn_overlap)},
  };
  return FieldIn(fields, field);
}

NumberPlace FieldOf(TransportProfile& transport, const std::string& field) {
  const std::array<std::pair<std::string_view, NumberPlace>, 7> fields = {
      std::pair{"efficiency", PlaceIn(transport.efficiency)},
      std::pair{"overlap", PlaceIn(transport.overlap)},
      std::pair{"split_latency", PlaceIn(transport.split_latency)},
      std::pair{"all_reduce_gain", PlaceIn(transport.all_reduce_gain)},
      std::pair{"p2p_gain", PlaceIn(transport.p2p_gain)},
      std::pair{"p2p_latency", PlaceIn(transport.p2p_latency)},
      std::pair{"p2p_drift", PlaceIn(transport.p2p_drift)},
  };
  return FieldIn(fields, field);
}

NumberPlace FieldOf(HostProfile& host, const std::string& field) {
  const std::array<std::pair<std::string_view, NumberPlace>, 2> fields = {
      std::pair{"library_call", PlaceIn(host.library_call)},
      std::pair{"library_peer", PlaceIn(host.library_peer)},
  };
  return FieldIn(fields, field);
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
  return number.transport == kBetweenNodes ? transport.name != "nvlink" && transport.name != "pcie"
                                           : transport.name == number.transport;
}

// Where `number` stands in a profile, if it does.
std::vector<NumberPlace> PlacesOf(const NetworkNumber& number, Profile& profile) {
  std::vector<NumberPlace> places;
  if (!IsMeantFor(number, profile)) {
    return places;
  }
  if (number.transport.empty()) {
    places.push_back(FieldOf(profile.host, number.field));
  }
  for (TransportProfile& transport : profile.transports) {
    if (!IsMeantFor(number, transport)) {
      continue;
    }
    if (number.protocol.empty()) {
      places.push_back(FieldOf(transport, number.field));
    }
    for (ProtocolProfile& protocol : transport.protocols) {
      if (!number.protocol.empty() && protocol.name == number.protocol) {
        places.push_back(FieldOf(protocol, number.field));
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

using Entry = PreparedSweep::Entry;

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

}  // namespace

NetworkNumber Factor(std::string fabric, std::string transport, std::string protocol,
                     std::string field, double lower, double upper) {
  NetworkNumber number;
  number.fabric = std::move(fabric);
  number.transport = std::move(transport);
  number.protocol = std::move(protocol);
  number.field = std::move(field);
  number.lower = lower;
  number.upper = upper;
  return number;
}

NetworkNumber Time(std::string fabric, std::string transport, std::string protocol,
                   std::string field, double upper_us) {
  NetworkNumber number = Factor(std::move(fabric), std::move(transport), std::move(protocol),
                                std::move(field), 0, upper_us * 1e-6);
  number.is_time = true;
  return number;
}

NumberSetter::NumberSetter(const NetworkNumber& number, PreparedSweep& sweep) {
  for (auto& [name, profile] : sweep.profiles) {
    for (const NumberPlace& place : PlacesOf(number, *profile)) {
      values.push_back(place.value);
    }
  }
}

void NumberSetter::operator()(double value) const {
  for (double* target : values) {
    *target = value;
  }
}

std::int64_t FitNumbers(const std::vector<const Entry*>& entries, PreparedSweep& sweep,
                        std::vector<NetworkNumber>& numbers) {
  std::vector<NumberSetter> setters;
  std::vector<FitVariable> variables;
  for (NetworkNumber& number : numbers) {
    const NumberSetter& setter = setters.emplace_back(number, sweep);
    SW_CHECK(!setter.values.empty(), NumberName(number));
    // In units of the upper bound, so that times and factors are of one size.
    variables.push_back({NumberName(number), number.lower / number.upper, 1,
                         *setter.values.front() / number.upper});
  }
  const auto set_all = [&](std::span<const double> values) {
    for (std::size_t i = 0; i < setters.size(); ++i) {
      setters[i](values[i] * numbers[i].upper);
    }
  };
  constexpr std::int64_t kMostEvaluations = 60000;
  constexpr Bytes kSmall{64LL << 10};
  constexpr double kSmallWeight = 0.25;
  const FitResult result = Minimise(
      [&](std::span<const double> values) {
        set_all(values);
        double sum = 0;
        for (const Entry* entry : entries) {
          const double weight = entry->row.bytes < kSmall ? kSmallWeight : 1;
          sum += weight * Loss(PredictEntry(*entry).value, entry->row.time.value);
        }
        return sum / static_cast<double>(entries.size()) + Surprise(values, numbers);
      },
      variables, kMostEvaluations);
  set_all(result.values);
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    numbers[i].value = result.values[i] * numbers[i].upper;
  }
  return result.evaluations;
}

}  // namespace internal

std::string NumberName(const NetworkNumber& number) {
  std::string name = number.fabric.empty() ? "shared" : number.fabric;
  if (!number.profile.empty()) {
    name = number.profile;
  }
  name += ":";
  for (const std::string* part : {&number.protocol, &number.field}) {
    name += part->empty() ? "" : " " + *part;
  }
  return name;
}

void ApplyFit(const NetworkFit& fit, const Origin& origin, Profile& profile) {
  for (const NetworkNumber& number : fit.numbers) {
    for (const internal::NumberPlace& place : internal::PlacesOf(number, profile)) {
      *place.value = number.value;
      *place.origin = origin;
    }
  }
}

}  // namespace shardwright
