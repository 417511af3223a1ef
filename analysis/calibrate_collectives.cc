// Collectives: the cheapest of several protocols, whose latency partly hides behind the transfer.
// That is not linear in anything, so the price itself is asked again and again.

#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "analysis/calibrate.h"
#include "analysis/optimize.h"
#include "analysis/piecewise_fit.h"
#include "core/ranges.h"
#include "simulator/costs/collectives.h"

namespace shardwright {
namespace {

// One kind of collective of one size on one path, as measured.
struct MeasuredSize {
  OpCode code = OpCode::kAllGather;
  Bytes bytes;
  CollectivePath path;  // points into the profile that is being fitted
  double seconds = 0;
  double weight = 1;
};

// What one variable of the search moves.
enum class Knob : std::uint8_t {
  kEfficiency,  // of the transport
  kLatency,     // all latencies of the transport, by one factor
  kReduce,      // Simple's reduce_bandwidth
};
struct LinkVariable {
  Knob knob = Knob::kEfficiency;
  std::size_t transport = 0;  // index into Profile::transports
};

constexpr double kLargestChange = 1e7;  // of rates and latencies, either way
constexpr double kNoticeable = 0.005;   // of a time, when a number changes by a tenth
constexpr std::int64_t kMostEvaluations = 4000;
// Times as large: tells latency from rate. Gathers in 16 bits and reductions in 32 do not.
constexpr double kOtherSize = 2.25;

class CollectiveFit {
 public:
  CollectiveFit(const std::vector<CalibrationRun>& runs, const CalibrationSamples& samples,
                const Profile& start)
      : start_(start), profile_(start) {
    double total = 0;
    for (const ShapeSample& sample : samples.shapes) {
      const CalibrationRun& run = runs[sample.run];
      const OpShape& shape = run.program.shapes[sample.shape.value];
      if (!InfoOf(shape.code).is_collective || sample.seconds <= 0) {
        continue;
      }
      const Group& group = run.program.groups[shape.group.value];
      if (group.size <= 1) {
        continue;
      }
      measured_.push_back({shape.code, shape.bytes,
                           FindCollectivePath(run.cluster, profile_, {group.size, group.stride}),
                           sample.seconds, static_cast<double>(sample.ops) * sample.seconds});
      total += measured_.back().weight;
    }
    for (MeasuredSize& row : measured_) {
      row.weight /= total;
    }
    AddVariables();
  }

  [[nodiscard]] bool HasData() const { return !variables_.empty(); }

  // Of each transport that saw one size only: half of what its rate or its latencies were found to
  // cost is the other's, and the collectives last as long.
  [[nodiscard]] std::vector<TransportProfile> Others(std::span<const double> changes) {
    std::vector<TransportProfile> others;
    for (const LinkVariable& moved : of_one_size_) {
      Apply(changes);
      TransportProfile& transport = profile_.transports[moved.transport];
      if (moved.knob == Knob::kEfficiency) {
        transport.efficiency.value = std::min(1.0, 2 * transport.efficiency.value);
      } else {
        ScaleLatencies(transport, 0.5);
      }
      const TransportProfile from = transport;
      double fastest = -std::log(kLargestChange), slowest = std::log(kLargestChange);
      for (int i = 0; i < 60; ++i) {
        const double middle = (fastest + slowest) / 2;
        transport = from;
        if (moved.knob == Knob::kEfficiency) {
          ScaleLatencies(transport, std::exp(middle));
        } else {
          transport.efficiency.value = std::min(1.0, from.efficiency.value * std::exp(-middle));
        }
        (MeanLogError() < 0 ? fastest : slowest) = middle;
      }
      others.push_back(transport);
    }
    return others;
  }

  // Changes of the variables, as natural logarithms.
  [[nodiscard]] std::vector<double> Run() {
    std::vector<FitVariable> variables;
    for (const LinkVariable& variable : variables_) {
      FitVariable v;
      v.name = NameOf(variable);
      v.lower = -std::log(kLargestChange);
      v.upper = Most(variable);
      v.start = std::min(0.0, v.upper);
      variables.push_back(v);
    }
    const auto objective = [&](std::span<const double> changes) { return Objective(changes); };
    FitResult best;
    best.objective = std::numeric_limits<double>::infinity();
    for (const double shift : Starts()) {
      for (std::size_t i = 0; i < variables.size(); ++i) {
        const double wanted = variables_[i].knob == Knob::kEfficiency ? -shift
                              : variables_[i].knob == Knob::kLatency  ? shift
                                                                      : 0;
        variables[i].start = std::clamp(wanted, variables[i].lower, variables[i].upper);
      }
      FitResult found = Minimise(objective, variables, kMostEvaluations);
      if (found.objective < best.objective) {
        best = std::move(found);
      }
    }
    return best.values;
  }

  // Writes what was found; numbers that nothing measured depends on stay.
  void Store(std::vector<double> changes, const Origin& origin, Profile& profile,
             std::vector<CalibratedNumber>& numbers) {
    std::vector<std::vector<double>> errors(variables_.size());
    for (std::size_t i = 0; i < variables_.size(); ++i) {
      errors[i] = ErrorsOf(i, changes);
      changes[i] = errors[i].empty() ? 0 : changes[i];
    }
    Apply(changes);
    for (std::size_t i = 0; i < variables_.size(); ++i) {
      if (!errors[i].empty()) {
        const auto count = std::ssize(errors[i]);
        const double spread = std::round(MedianOf(std::move(errors[i])) * 1e4) / 1e4;
        StoreOne(variables_[i], {origin, spread, count}, profile, numbers);
      }
    }
  }

 private:
  struct Evidence {
    const Origin& origin;
    double spread = 0;
    std::int64_t rows = 0;
  };

  template <class Protocols>
  static auto* FindSimple(Protocols& protocols) {
    const auto it = FindIn(protocols, "Simple", &ProtocolProfile::name);
    return it == protocols.end() ? nullptr : &*it;
  }

  // Are there two sizes? How a gather and a reduction of one size compare says more of what the
  // ranks waited for than of latency.
  [[nodiscard]] bool TellsLatency(const TransportProfile* transport) const {
    double least = std::numeric_limits<double>::infinity(), most = 0;
    for (const MeasuredSize& row : measured_) {
      if (transport == row.path.intra || transport == row.path.network) {
        least = std::min(least, static_cast<double>(row.bytes.value));
        most = std::max(most, static_cast<double>(row.bytes.value));
      }
    }
    return most >= kOtherSize * least;
  }

  // By the start profile, does a collective's size cost more than the collective itself?
  [[nodiscard]] bool IsBoundByRate(std::size_t t) {
    const auto all = [&] {
      double sum = Summed<double>(measured_, [&](const MeasuredSize& row) { return TimeOf(row); });
      return sum;
    };
    const double with = all();
    ScaleLatencies(profile_.transports[t], 0);
    const double without = all();
    profile_.transports[t] = start_.transports[t];
    return without >= with / 2;
  }

  static void ScaleLatencies(TransportProfile& transport, double factor) {
    transport.split_latency.value = transport.split_latency.value * factor;
    transport.p2p_latency.value = transport.p2p_latency.value * factor;
    for (ProtocolProfile& protocol : transport.protocols) {
      protocol.base_latency.value = protocol.base_latency.value * factor;
      protocol.hop_latency.value = protocol.hop_latency.value * factor;
      protocol.tree_latency.value = protocol.tree_latency.value * factor;
      protocol.turn_latency.value = protocol.turn_latency.value * factor;
    }
  }

  [[nodiscard]] double MeanLogError() const {
    double sum = Summed<double>(measured_, [&](const MeasuredSize& row) {
      return row.weight * std::log(TimeOf(row) / row.seconds);
    });
    return sum;
  }

  void AddVariables() {
    for (std::size_t t = 0; t < profile_.transports.size(); ++t) {
      const TransportProfile* transport = &profile_.transports[t];
      bool is_used = false, reduces = false;
      for (const MeasuredSize& row : measured_) {
        const bool is_outer =
            transport == (row.path.network != nullptr ? row.path.network : row.path.intra);
        is_used = is_used || transport == row.path.intra || is_outer;
        reduces = reduces || (is_outer && row.code == OpCode::kReduceScatter);
      }
      if (is_used && TellsLatency(transport)) {
        variables_.push_back({Knob::kEfficiency, t});
        variables_.push_back({Knob::kLatency, t});
      } else if (is_used) {
        const LinkVariable one = {IsBoundByRate(t) ? Knob::kEfficiency : Knob::kLatency, t};
        variables_.push_back(one);
        of_one_size_.push_back(one);
      }
      if (reduces && FindSimple(transport->protocols) != nullptr) {
        variables_.push_back({Knob::kReduce, t});
      }
    }
  }

  [[nodiscard]] std::string NameOf(const LinkVariable& variable) const {
    const std::string prefix = "transports." + start_.transports[variable.transport].name;
    switch (variable.knob) {
      case Knob::kEfficiency:
        return prefix + ".efficiency";
      case Knob::kLatency:
        return prefix + ".protocols[].latencies";
      case Knob::kReduce:
        break;
    }
    return prefix + ".protocols.Simple.reduce_bandwidth";
  }

  // Fractions end at 1.
  [[nodiscard]] double Most(const LinkVariable& variable) const {
    const TransportProfile& from = start_.transports[variable.transport];
    switch (variable.knob) {
      case Knob::kEfficiency:
        return -std::log(from.efficiency.value);
      case Knob::kReduce:
        return -std::log(FindSimple(from.protocols)->reduce_bandwidth.value);
      case Knob::kLatency:
        break;
    }
    return std::log(kLargestChange);
  }

  // Logarithms of how many times slower everything might be: not at all, and as much as the middle
  // collective was.
  [[nodiscard]] std::vector<double> Starts() {
    std::vector<double> ratios;
    Apply(std::vector<double>(variables_.size(), 0));
    for (const MeasuredSize& row : measured_) {
      ratios.push_back(std::log(row.seconds / TimeOf(row)));
    }
    return {0, MedianOf(std::move(ratios))};
  }

  void Apply(std::span<const double> changes) {
    for (std::size_t i = 0; i < variables_.size(); ++i) {
      const TransportProfile& from = start_.transports[variables_[i].transport];
      TransportProfile& to = profile_.transports[variables_[i].transport];
      const double factor = std::exp(changes[i]);
      switch (variables_[i].knob) {
        case Knob::kEfficiency:
          to.efficiency.value = std::min(1.0, from.efficiency.value * factor);
          break;
        case Knob::kLatency:
          to.split_latency.value = from.split_latency.value * factor;
          to.p2p_latency.value = from.p2p_latency.value * factor;
          for (std::size_t p = 0; p < to.protocols.size(); ++p) {
            to.protocols[p].base_latency.value = from.protocols[p].base_latency.value * factor;
            to.protocols[p].hop_latency.value = from.protocols[p].hop_latency.value * factor;
            to.protocols[p].tree_latency.value = from.protocols[p].tree_latency.value * factor;
            to.protocols[p].turn_latency.value = from.protocols[p].turn_latency.value * factor;
          }
          break;
        case Knob::kReduce:
          FindSimple(to.protocols)->reduce_bandwidth.value =
              std::min(1.0, FindSimple(from.protocols)->reduce_bandwidth.value * factor);
          break;
      }
    }
  }

  static double TimeOf(const MeasuredSize& row) {
    return CollectiveTime(row.code, row.bytes, row.path).value;
  }

  double Objective(std::span<const double> changes) {
    Apply(changes);
    double sum = 0;
    for (const MeasuredSize& row : measured_) {
      // Logarithms, so that a search that starts far off finds its way.
      sum += row.weight * std::abs(std::log(TimeOf(row) / row.seconds));
    }
    for (const double change : changes) {
      sum += 1e-7 * change * change;  // what nothing depends on stays
    }
    return sum;
  }

  // Of the rows that notice when variable `i` changes by a tenth.
  std::vector<double> ErrorsOf(std::size_t i, std::vector<double> changes) {
    Apply(changes);
    std::vector<double> before =
        Mapped<double>(measured_, [&](const MeasuredSize& row) { return TimeOf(row); });
    changes[i] -= std::log(1.1);
    Apply(changes);
    std::vector<double> errors;
    for (std::size_t r = 0; r < measured_.size(); ++r) {
      if (std::abs(TimeOf(measured_[r]) / before[r] - 1) >= kNoticeable) {
        errors.push_back(std::abs(before[r] / measured_[r].seconds - 1));
      }
    }
    return errors;
  }

  // The value found is in profile_, the one before in start_.
  void StoreOne(const LinkVariable& variable, const Evidence& evidence, Profile& profile,
                std::vector<CalibratedNumber>& numbers) const {
    const TransportProfile& from = start_.transports[variable.transport];
    const TransportProfile& found = profile_.transports[variable.transport];
    TransportProfile& to = profile.transports[variable.transport];
    const auto set = [&](const std::string& field, const auto& old, const auto& fresh,
                         auto& target) {
      constexpr bool kIsTime =
          std::is_same_v<std::remove_cvref_t<decltype(target)>, Number<Seconds>>;
      target.value = fresh.value;
      target.origin = evidence.origin;
      target.spread = evidence.spread;
      CalibratedNumber number;
      number.field = "transports." + from.name + '.' + field;
      number.is_time = kIsTime;
      if constexpr (kIsTime) {
        number.before = old.value.value;
        number.after = fresh.value.value;
      } else {
        number.before = old.value;
        number.after = fresh.value;
      }
      number.spread = evidence.spread;
      number.rows = evidence.rows;
      numbers.push_back(std::move(number));
    };
    if (variable.knob == Knob::kEfficiency) {
      set("efficiency", from.efficiency, found.efficiency, to.efficiency);
      return;
    }
    if (variable.knob == Knob::kReduce) {
      set("protocols.Simple.reduce_bandwidth", FindSimple(from.protocols)->reduce_bandwidth,
          FindSimple(found.protocols)->reduce_bandwidth,
          FindSimple(to.protocols)->reduce_bandwidth);
      return;
    }
    // Those that few have move along unlisted.
    to.split_latency.value = found.split_latency.value;
    to.p2p_latency.value = found.p2p_latency.value;
    for (std::size_t p = 0; p < to.protocols.size(); ++p) {
      const std::string name = "protocols." + from.protocols[p].name;
      set(name + ".base_latency", from.protocols[p].base_latency, found.protocols[p].base_latency,
          to.protocols[p].base_latency);
      set(name + ".hop_latency", from.protocols[p].hop_latency, found.protocols[p].hop_latency,
          to.protocols[p].hop_latency);
      to.protocols[p].tree_latency.value = found.protocols[p].tree_latency.value;
      to.protocols[p].turn_latency.value = found.protocols[p].turn_latency.value;
    }
  }

  const Profile& start_;
  Profile profile_;  // measured_ points into it
  std::vector<MeasuredSize> measured_;
  std::vector<LinkVariable> variables_;
  std::vector<LinkVariable> of_one_size_;
};

}  // namespace

std::vector<TransportProfile> CalibrateCollectives(const std::vector<CalibrationRun>& runs,
                                                   const CalibrationSamples& samples,
                                                   const Origin& origin, Profile& profile,
                                                   std::vector<CalibratedNumber>& numbers) {
  const Profile start = profile;
  CollectiveFit fit(runs, samples, start);
  if (!fit.HasData()) {
    return {};
  }
  const std::vector<double> changes = fit.Run();
  fit.Store(changes, origin, profile, numbers);
  return fit.Others(changes);
}

}  // namespace shardwright
