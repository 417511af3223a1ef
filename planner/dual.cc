#include "planner/dual.h"

#include <algorithm>
#include <cstddef>
#include <functional>
#include <limits>
#include <numeric>
#include <utility>

#include "planner/maximize.h"

namespace shardwright {
namespace {

using Weights = Occupancy::Weights;
using RowWeights = Occupancy::RowWeights;
using Loads = std::array<double, kLoadCount>;
using LoadSet = std::array<bool, kLoadCount>;

// Stretches of a step, by what may run in them.
enum Stretch : std::uint8_t {
  kUpdate,
  kFirstForward,
  kTurnForward,
  kTurnBackward,
  kForward,
  kBackward
};
constexpr std::size_t kStretchCount = 6;
constexpr std::array<Stretch, kStretchCount> kStretches = {
    kUpdate, kFirstForward, kTurnForward, kTurnBackward, kForward, kBackward};

// Of each transfer in a row: as which ones it may run in some stretch, as indices of prices.
using Sources = std::array<std::vector<std::size_t>, Occupancy::kRowTransferCount>;

// What a second of each transfer in a row is worth, and which weight says so.
struct StretchWeights {
  RowWeights worth{};  // 0 of what does not run there
  std::array<bool, Occupancy::kRowTransferCount> runs{};
  std::array<std::size_t, Occupancy::kRowTransferCount> source{};
};

class Dual {
 public:
  Dual(const Terms& terms, const Occupancy& occupancy)
      : t_(terms), m_(*terms.measured), occupancy_(occupancy) {
    AddVariables();
    AddWork();
    for (const Stretch stretch : kStretches) {
      sources_[stretch] = SourcesIn(stretch);
    }
  }

  // The best value that is found from `prices` on, or from none.
  [[nodiscard]] double Improve(std::vector<double>& prices) const {
    constexpr double kTolerance = 2e-4;
    prices.resize(kPriceCount, 0);
    const std::vector<std::vector<double>> limits = Limits();
    std::vector<double> start;
    for (const Variable& v : variables_) {
      start.push_back(prices[v.index]);
    }
    double most = 1;  // other stretches may have allowed more
    for (const std::vector<double>& limit : limits) {
      most = std::max(most, std::inner_product(start.begin(), start.end(), limit.begin(), 0.0));
    }
    for (double& x : start) {
      x /= most;
    }
    const Maximum best = Maximize([this](const std::vector<double>& x) { return ValueAt(x); },
                                  limits, std::move(start), kTolerance);
    for (std::size_t i = 0; i < variables_.size(); ++i) {
      prices[variables_[i].index] = best.at[i];
    }
    return best.value;
  }

 private:
  static constexpr std::size_t kDevice = Occupancy::kTransferCount;  // prices of memory
  static constexpr std::size_t kHost = kDevice + 1;
  static constexpr std::size_t kPriceCount = kHost + 1;
  using Prices = std::array<double, kPriceCount>;  // by transfer: per second; of memory: per byte

  void AddVariables() {
    double scale = 0;  // a step, roughly
    for (std::size_t l = 0; l < kLoadCount; ++l) {
      scale += t_.passes * m_.base.seconds[l];
    }
    for (std::size_t i = 0; i < Occupancy::kTransferCount; ++i) {
      bool is_used = t_.seconds[i] > 0;
      for (const AfterForward& a : t_.after_forward) {
        is_used = is_used || (a.transfer == i && a.seconds > 0);
      }
      const bool copies = i == Occupancy::kToHost || i == Occupancy::kToDevice;
      if (is_used || (copies && t_.offloads_activations)) {
        variables_.push_back({i, 1});
      }
    }
    // The price of all memory: far more than a step.
    constexpr double kMost = 4;
    variables_.push_back({kDevice, kMost * scale / t_.device_limit});
    if (t_.has_host_limit) {
      variables_.push_back({kHost, kMost * scale / t_.host_limit});
    }
  }

  void AddWork() {
    for (std::size_t l = 0; l < kLoadCount; ++l) {
      const double forward = m_.forward.seconds[l];
      const double backward = m_.base.seconds[l] - forward;
      const double first = t_.first_forwards;
      work_[kFirstForward][l] = first * (forward - m_.turn_forward.seconds[l]);
      work_[kTurnForward][l] = first * m_.turn_forward.seconds[l];
      work_[kTurnBackward][l] = first * m_.turn_backward.seconds[l];
      work_[kForward][l] = (t_.passes - first) * forward;
      work_[kBackward][l] = t_.passes * backward - work_[kTurnBackward][l];
      for (const Stretch stretch : kStretches) {
        runs_[stretch][l] = work_[stretch][l] != 0;
      }
      for (const BlockClass& c : m_.classes) {
        for (const BlockCost& cost : c.costs) {
          runs_[kBackward][l] = runs_[kBackward][l] || cost.work.seconds[l] != 0;
        }
      }
    }
    updates_ = t_.is_ordered ? kUpdate : kBackward;
    has_updates_ = t_.update.seconds > 0 && (!t_.is_ordered || t_.update.seconds >= t_.head);
    if (has_updates_) {
      runs_[updates_].fill(true);
    }
    // Where all forwards are first ones, what is gathered for them is copied there.
    gather_copies_ = t_.first_forwards >= t_.passes ? kFirstForward : kForward;
    if (t_.gather_copies.seconds > 0) {
      runs_[gather_copies_].fill(true);
      runs_[kBackward].fill(true);
    }
  }

  [[nodiscard]] Sources SourcesIn(Stretch stretch) const {
    const bool is_update = stretch == kUpdate;
    const bool reduces = stretch == kForward || stretch == kBackward;
    const bool is_backward = stretch == kTurnBackward || stretch == kBackward;
    const bool only_first = is_update || (stretch == kFirstForward && t_.regathers_follow_forward);
    const bool only_again = stretch == kTurnForward || stretch == kTurnBackward ||
                            (stretch == kBackward && t_.forward_gathers_end);
    const bool has_moments =
        !t_.is_ordered || is_update || (stretch == kFirstForward && !t_.moments_end_before_forward);
    Sources s;
    const auto add = [&](bool may_run, std::size_t transfer, std::size_t source) {
      if (may_run) {
        s[transfer].push_back(source);
      }
    };
    add(!only_again, Occupancy::kGather, Occupancy::kGather);
    add(!only_first, Occupancy::kGather, Occupancy::kRegather);
    add(!only_first, Occupancy::kPartial, Occupancy::kPartial);
    add(reduces, Occupancy::kReduce, Occupancy::kReduce);
    add(reduces, Occupancy::kReplicate, Occupancy::kReplicate);
    add(!is_update && !is_backward, Occupancy::kToHost, Occupancy::kToHost);
    add(is_backward, Occupancy::kToDevice, Occupancy::kToDevice);
    add(has_moments, Occupancy::kToHost, Occupancy::kMomentsToHost);
    add(has_moments, Occupancy::kToDevice, Occupancy::kMomentsToDevice);
    return s;
  }

  // Has a step such a stretch?
  [[nodiscard]] bool Exists(Stretch stretch) const {
    if (stretch == kForward) {
      return t_.passes > t_.first_forwards;
    }
    return stretch == kBackward || t_.is_ordered;
  }

  // A transfer in a row counts as the most valuable one that it may be.
  [[nodiscard]] StretchWeights WeightsIn(Stretch stretch, const Prices& z) const {
    StretchWeights w;
    for (std::size_t i = 0; i < Occupancy::kRowTransferCount; ++i) {
      for (const std::size_t source : sources_[stretch][i]) {
        if (!w.runs[i] || z[source] > w.worth[i]) {
          w.runs[i] = true;
          w.source[i] = source;
          w.worth[i] = z[source];
        }
      }
    }
    return w;
  }

  // For each set of transfers without a kernel, whatever each is of: together they are worth no
  // more than the time.
  [[nodiscard]] std::vector<std::vector<double>> Limits() const {
    std::vector<std::vector<double>> limits;
    const auto add = [&](const Occupancy::Row& row, const Sources& sources, std::size_t choice) {
      Prices progress{};
      for (std::size_t i = 0; i < Occupancy::kRowTransferCount; ++i) {
        if (!sources[i].empty()) {
          progress[sources[i][std::min((choice >> i) & 1U, sources[i].size() - 1)]] =
              row.progress[i];
        }
      }
      std::vector<double> limit;
      for (const Variable& v : variables_) {
        limit.push_back(v.index < Occupancy::kTransferCount ? progress[v.index] : 0);
      }
      AddLimit(std::move(limit), limits);
    };
    for (const Stretch stretch : kStretches) {
      for (const Occupancy::Row& row : occupancy_.rows()) {
        for (std::size_t choice = 0; choice < (1U << Occupancy::kRowTransferCount); ++choice) {
          if (row.load == kLoadCount && Exists(stretch)) {
            add(row, sources_[stretch], choice);
          }
        }
      }
    }
    return limits;
  }

  // Unless another one says at least as much.
  static void AddLimit(std::vector<double> limit, std::vector<std::vector<double>>& limits) {
    const auto is_weaker = [](const std::vector<double>& a, const std::vector<double>& b) {
      return std::equal(a.begin(), a.end(), b.begin(), std::less_equal<>());
    };
    for (const std::vector<double>& other : limits) {
      if (is_weaker(limit, other)) {
        return;
      }
    }
    std::erase_if(limits, [&](const auto& other) { return is_weaker(other, limit); });
    limits.push_back(std::move(limit));
  }

  // The least cost of the step when transfers and memory have these prices, and how fast it changes
  // with them.
  [[nodiscard]] Slope ValueAt(const std::vector<double>& x) const {
    Prices z{};
    for (std::size_t i = 0; i < x.size(); ++i) {
      z[variables_[i].index] = x[i] * variables_[i].scale;
    }
    FeasiblePart(z);
    Sum sum;
    std::array<PriceList, kStretchCount> prices;
    for (const Stretch stretch : kStretches) {
      prices[stretch] = KernelPrices(WeightsIn(stretch, z), runs_[stretch]);
    }
    std::array<Loads, kStretchCount> work = work_;
    AddMemory(z, prices[kBackward], work[kBackward], sum);
    if (has_updates_) {
      AddStreaming(t_.update, prices[updates_], work[updates_]);
    }
    AddStreaming(t_.gather_copies, prices[gather_copies_], work[gather_copies_]);
    AddStreaming(t_.reduce_copies, prices[kBackward], work[kBackward]);
    if (t_.is_ordered) {
      AddEnds(z, sum);
    }
    for (std::size_t i = 0; i < Occupancy::kTransferCount; ++i) {
      sum.value += z[i] * t_.seconds[i];
      sum.slope[i] += t_.seconds[i];
    }
    for (const Stretch stretch : kStretches) {
      AddKernels(WeightsIn(stretch, z), prices[stretch], work[stretch], sum);
    }
    Slope result = {sum.value, {}};
    for (const Variable& v : variables_) {
      result.slope.push_back(sum.slope[v.index] * v.scale);
    }
    return result;
  }

  struct Variable {
    std::size_t index = 0;  // into Prices
    double scale = 1;       // the price where the variable is 1
  };
  struct Sum {
    double value = 0;
    Prices slope{};
  };
  struct PriceList {  // what a second of each load is worth, and the row that says so
    Loads price{};
    std::array<const Occupancy::Row*, kLoadCount> row{};
  };

  // The row without a kernel in which a second is worth most; nullptr: nothing is worth anything.
  [[nodiscard]] const Occupancy::Row* BestWithoutKernel(const RowWeights& worth) const {
    const Occupancy::Row* best = nullptr;
    double most = 0;
    for (const Occupancy::Row& row : occupancy_.rows()) {
      const double w = row.load == kLoadCount ? row.Worth(worth) : 0;
      if (w > most) {
        most = w;
        best = &row;
      }
    }
    return best;
  }

  // Rounding may have left the prices a little above what the limits allow.
  void FeasiblePart(Prices& z) const {
    double most = 1;
    for (const Stretch stretch : kStretches) {
      const RowWeights worth = WeightsIn(stretch, z).worth;
      const Occupancy::Row* best = Exists(stretch) ? BestWithoutKernel(worth) : nullptr;
      most = std::max(most, best == nullptr ? 0 : best->Worth(worth));
    }
    for (std::size_t i = 0; i < Occupancy::kTransferCount; ++i) {
      z[i] /= most;
    }
  }

  [[nodiscard]] PriceList KernelPrices(const StretchWeights& weights, const LoadSet& loads) const {
    PriceList list;
    list.price.fill(std::numeric_limits<double>::infinity());
    for (const Occupancy::Row& row : occupancy_.rows()) {
      if (row.load != kLoadCount && loads[row.load]) {
        const double price = (1 - row.Worth(weights.worth)) / row.kernel_speed;
        if (price < list.price[row.load]) {
          list.price[row.load] = price;
          list.row[row.load] = &row;
        }
      }
    }
    return list;
  }

  static double CostOf(const Work& work, const PriceList& prices) {
    double sum = 0;
    for (std::size_t l = 0; l < kLoadCount; ++l) {
      if (work.seconds[l] != 0) {
        sum += work.seconds[l] * prices.price[l];
      }
    }
    return sum;
  }

  void AddKernels(const StretchWeights& weights, const PriceList& prices, const Loads& work,
                  Sum& sum) const {
    for (std::size_t l = 0; l < kLoadCount; ++l) {
      if (work[l] == 0) {
        continue;
      }
      const Occupancy::Row& row = *prices.row[l];
      sum.value += work[l] * prices.price[l];
      for (std::size_t i = 0; i < Occupancy::kRowTransferCount; ++i) {
        if (weights.runs[i]) {
          sum.slope[weights.source[i]] -= work[l] * row.progress[i] / row.kernel_speed;
        }
      }
    }
  }

  // Patterns of blocks and what happens to gathered parameters: each the cheapest at these prices.
  void AddMemory(const Prices& z, const PriceList& backward, Loads& work, Sum& sum) const {
    const double copy_cost = z[Occupancy::kToHost] * t_.to_host_per_byte +
                             z[Occupancy::kToDevice] * t_.to_device_per_byte;
    const auto pay = [&](std::size_t price, double bytes) {
      sum.value += z[price] * bytes;
      sum.slope[price] += bytes;
    };
    pay(kDevice, t_.device_excess);
    if (t_.has_host_limit) {
      pay(kHost, t_.host_excess);
    }
    const auto pay_copies = [&](double bytes) {  // of each micro-batch
      pay(kHost, t_.has_host_limit ? bytes : 0);
      pay(Occupancy::kToHost, t_.passes * bytes * t_.to_host_per_byte);
      pay(Occupancy::kToDevice, t_.passes * bytes * t_.to_device_per_byte);
    };
    for (const BlockClass& c : m_.classes) {
      const BlockCost* best = nullptr;
      double least = 0;
      const auto staying = [&](const BlockCost& cost) {
        return t_.offloads_activations ? cost.staying_bytes : cost.kept_bytes;
      };
      for (std::size_t p = 0; p < c.costs.size(); ++p) {
        const BlockCost& cost = c.costs[p];
        const double price =
            t_.passes * (CostOf(cost.work, backward) + copy_cost * cost.copied_bytes) +
            z[kDevice] * staying(cost) + z[kHost] * cost.copied_bytes;
        if (m_.pattern_is_allowed[p] && (best == nullptr || price < least)) {
          best = &cost;
          least = price;
        }
      }
      // What the first layer of backward reads is not copied.
      const auto blocks = static_cast<double>(c.blocks.size());
      const bool all_count = !t_.offloads_activations || m_.all_blocks_copy;
      const double count = all_count ? blocks : std::max(0.0, blocks - 1);
      pay(kDevice, count * staying(*best));
      for (std::size_t l = 0; l < kLoadCount; ++l) {
        work[l] += count * t_.passes * best->work.seconds[l];
      }
      if (t_.offloads_activations) {
        pay_copies(count * best->copied_bytes);
      }
    }
    if (t_.offloads_activations && m_.all_blocks_copy) {
      pay_copies(-m_.read_by_tail);
    }
    const AfterForward* kept = nullptr;
    const auto price = [&](const AfterForward& a) {
      return z[kDevice] * a.bytes + z[a.transfer] * a.seconds + Cheapest(a.copies, backward).cost;
    };
    for (const AfterForward& a : t_.after_forward) {
      kept = kept == nullptr || price(a) < price(*kept) ? &a : kept;
    }
    if (kept != nullptr) {
      pay(kDevice, kept->bytes);
      pay(kept->transfer, kept->seconds);
      AddStreaming(kept->copies, backward, work);
    }
  }

  struct AtLoad {
    std::size_t load = 0;
    double seconds = 0;
    double cost = 0;
  };
  // Of whatever load is cheapest.
  static AtLoad Cheapest(const StreamingWork& streaming, const PriceList& prices) {
    AtLoad best;
    for (std::size_t l = 1; l < kLoadCount && streaming.seconds > 0; ++l) {
      const double takes = std::max(
          streaming.seconds, streaming.streaming * (kLoadCount - 1) / static_cast<double>(l));
      const double cost = takes * prices.price[l];
      if (prices.row[l] != nullptr && (best.load == 0 || cost < best.cost)) {
        best = {l, takes, cost};
      }
    }
    return best;
  }
  static void AddStreaming(const StreamingWork& streaming, const PriceList& prices, Loads& work) {
    const AtLoad best = Cheapest(streaming, prices);
    work[best.load] += best.seconds;
  }

  void AddEnds(const Prices& z, Sum& sum) const {
    sum.value += t_.serial;
    AddIdle(WeightsIn(kUpdate, z), has_updates_ ? 0 : t_.head, sum);
    StretchWeights reduces = WeightsIn(kBackward, z);
    for (std::size_t i = 0; i < Occupancy::kRowTransferCount; ++i) {
      reduces.runs[i] = i == Occupancy::kReduce || i == Occupancy::kReplicate;
      reduces.worth[i] = reduces.runs[i] ? reduces.worth[i] : 0;
    }
    AddIdle(reduces, t_.tail, sum);
  }

  // So many seconds without a kernel, in which what is worth most runs.
  void AddIdle(const StretchWeights& weights, double seconds, Sum& sum) const {
    sum.value += seconds;
    const Occupancy::Row* best = BestWithoutKernel(weights.worth);
    if (best == nullptr) {
      return;
    }
    sum.value -= best->Worth(weights.worth) * seconds;
    for (std::size_t i = 0; i < Occupancy::kRowTransferCount; ++i) {
      if (weights.runs[i]) {
        sum.slope[weights.source[i]] -= seconds * best->progress[i];
      }
    }
  }

  const Terms& t_;
  const Measured& m_;
  const Occupancy& occupancy_;
  std::vector<Variable> variables_;
  std::array<Sources, kStretchCount> sources_;
  std::array<Loads, kStretchCount> work_{};    // of plans without checkpointing
  std::array<LoadSet, kStretchCount> runs_{};  // of all plans
  // Ordered: updates are longer than the gather of what the first op reads, and take its place.
  bool has_updates_ = false;
  Stretch updates_ = kUpdate;  // where they run
  Stretch gather_copies_ = kForward;
};

}  // namespace

double LeastTime(const Terms& terms, const Occupancy& occupancy, std::vector<double>& prices) {
  return Dual(terms, occupancy).Improve(prices);
}

}  // namespace shardwright
