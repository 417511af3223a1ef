// The second stage of fit-nccl: what all-reduces and all-to-alls add to the numbers of gathers.

#include <algorithm>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "analysis/fit_nccl.h"
#include "analysis/internal/network_numbers.h"
#include "analysis/validate_nccl.h"
#include "core/error.h"

namespace shardwright {
namespace {

using internal::Factor;
using internal::FitNumbers;
using internal::Time;
using Entry = PreparedSweep::Entry;

NetworkNumber Of(const char* architecture, NetworkNumber number) {
  number.architecture = architecture;
  return number;
}

// Numbers of one fabric of NVLink or the like. `architecture` is that of the profiles.
std::vector<NetworkNumber> InsideNumbers(const std::string& fabric) {
  if (fabric == "ampere nvlink" || fabric == "cdna3 nvlink") {
    const char* architecture = fabric == "ampere nvlink" ? "ampere" : "cdna3";
    std::vector<NetworkNumber> numbers = {
        Time(fabric, "nvlink", "LL", "turn_latency", 200),
        Time(fabric, "nvlink", "LL128", "turn_latency", 200),
        Time(fabric, "nvlink", "Simple", "turn_latency", 400),
        Factor(fabric, "nvlink", "LL", "reduce_bandwidth", 0.02, 1),
    };
    if (fabric == "cdna3 nvlink") {
      numbers.push_back(Factor(fabric, "nvlink", "", "all_reduce_gain", 0.5, 1.5));
    }
    for (NetworkNumber& number : numbers) {
      number.architecture = architecture;
    }
    return numbers;
  }
  if (fabric == "hopper nvlink" || fabric == "blackwell nvlink") {
    const char* architecture = fabric == "hopper nvlink" ? "hopper" : "blackwell";
    std::vector<NetworkNumber> numbers = {
        Of(architecture, Time(fabric, "nvlink", "NVLS", "base_latency", 200)),
        Of(architecture, Factor(fabric, "nvlink", "NVLS", "bandwidth", 0.5, 1)),
    };
    if (fabric == "hopper nvlink") {
      numbers.push_back(Of(architecture, Time(fabric, "nvlink", "LL", "base_latency", 50)));
    } else {
      numbers.push_back(Of(architecture, Time(fabric, "nvlink", "LL", "turn_latency", 50)));
    }
    return numbers;
  }
  return {};
}

// Numbers of one network, on GPUs of one generation where those of other generations have others.
std::vector<NetworkNumber> NetworkNumbers(const std::string& fabric,
                                          const std::string& generation) {
  std::vector<NetworkNumber> numbers;
  if (fabric == "efa" && generation == "blackwell") {
    numbers = {
        Factor(fabric, fabric, "", "all_reduce_gain", 0.2, 2),
        Time(fabric, fabric, "LL", "tree_latency", 400),
        Time(fabric, fabric, "Simple", "tree_latency", 400),
        Time(fabric, fabric, "LL", "turn_latency", 2000),
        Time(fabric, fabric, "LL128", "turn_latency", 2000),
        Time(fabric, fabric, "Simple", "turn_latency", 4000),
    };
  } else if ((fabric == "efa" && generation == "ampere") || fabric == "ib" || fabric == "roce" ||
             fabric == "tcpxo") {
    numbers = {
        Factor(fabric, fabric, "", "all_reduce_gain", 0.2, 2),
        Time(fabric, fabric, "Simple", "tree_latency", 400),
    };
    if (fabric == "ib" || fabric == "efa") {
      numbers.push_back(Time(fabric, fabric, "LL", "tree_latency", 200));
    }
    if (fabric == "ib") {
      numbers.push_back(Time(fabric, fabric, "LL128", "tree_latency", 200));
    }
  }
  if (fabric == "efa") {
    for (NetworkNumber& number : numbers) {
      number.architecture = generation;
    }
  }
  return numbers;
}

std::vector<NetworkNumber> PointToPointNumbers(const std::set<std::string>& fabrics,
                                               const PreparedSweep& sweep) {
  std::vector<NetworkNumber> numbers;
  if (std::any_of(fabrics.begin(), fabrics.end(),
                  [](const std::string& f) { return f.ends_with("nvlink"); })) {
    numbers.push_back(Time("", "nvlink", "", "p2p_latency", 200));
    numbers.push_back(Time("", "nvlink", "", "p2p_drift", 400));
  }
  if (fabrics.contains("ib")) {
    numbers.push_back(Factor("ib", "ib", "", "p2p_gain", 0.1, 2));
    numbers.push_back(Time("ib", "ib", "", "p2p_latency", 200));
    numbers.push_back(Time("ib", "ib", "", "p2p_drift", 400));
  }
  for (const auto& [name, profile] : sweep.profiles) {
    if (profile->host.library_peer.value.value > 0) {
      numbers.push_back(Time("", "", "", "library_peer", 50));
      numbers.back().profile = name;
    }
  }
  return numbers;
}

bool IsAllReduce(const Entry& entry) {
  return entry.skip_reason.empty() && entry.op == OpCode::kAllReduce && entry.row.time.value > 0;
}

bool IsAllToAll(const Entry& entry) {
  return entry.skip_reason.empty() && entry.op == OpCode::kAllToAll && entry.row.time.value > 0;
}

// Fits `numbers` to the entries that `is_meant` and adds both to `fit`.
template <class IsMeant>
void FitPart(PreparedSweep& sweep, std::vector<NetworkNumber> numbers, IsMeant is_meant,
             NetworkFit& fit) {
  std::vector<const Entry*> entries;
  for (const Entry& entry : sweep.entries) {
    if (is_meant(entry)) {
      entries.push_back(&entry);
    }
  }
  if (entries.empty() || numbers.empty()) {
    return;
  }
  fit.evaluations += FitNumbers(entries, sweep, numbers);
  fit.numbers.insert(fit.numbers.end(), numbers.begin(), numbers.end());
}

}  // namespace

NetworkFit FitAllReduce(const std::vector<SweepRow>& rows) {
  PreparedSweep sweep = PrepareSweep(rows, "");
  NetworkFit fit;
  std::set<std::pair<std::string, std::string>> places;  // fabric and generation of all-reduces
  std::set<std::string> to_all;
  for (const Entry& entry : sweep.entries) {
    if (IsAllReduce(entry)) {
      // AWS's networks differ by generation, and so do GPUs beside them.
      const bool has_generations = entry.fabric == "efa";
      places.emplace(entry.fabric, has_generations ? entry.path.nccl.architecture : "");
    } else if (IsAllToAll(entry)) {
      to_all.insert(entry.fabric);
    }
  }
  if (places.empty() && to_all.empty()) {
    throw InputError("sweep", "no all-reduce or all-to-all on a known fabric", "some to fit to");
  }
  // Inside nodes first: trees between nodes and what NVLS takes under them rest on that.
  std::vector<NetworkNumber> inside;
  const auto is_inside = [](const Entry& entry) {
    return IsAllReduce(entry) && entry.path.network == nullptr;
  };
  bool has_nvls = false;
  for (const auto& [fabric, generation] : places) {
    const std::vector<NetworkNumber> numbers = InsideNumbers(fabric);
    inside.insert(inside.end(), numbers.begin(), numbers.end());
    has_nvls = has_nvls || fabric == "hopper nvlink" || fabric == "blackwell nvlink";
  }
  for (const auto& [name, profile] : sweep.profiles) {
    // Hosts of one machine, which gathers do not tell.
    if (profile->host.library_call.value.value > 0 && profile->host.library_peer.value.value == 0) {
      inside.push_back(Time("", "", "", "library_call", 200));
      inside.back().profile = name;
    }
  }
  if (has_nvls) {
    inside.push_back(Factor("", "nvlink", "NVLS", "fill", 0, 4));
    inside.push_back(Factor("", "nvlink", "LL", "turn_overlap", 1, 4));
  }
  FitPart(sweep, inside, is_inside, fit);
  for (const auto& [fabric, generation] : places) {
    FitPart(
        sweep, NetworkNumbers(fabric, generation),
        [&, &wanted = fabric, &gpus = generation](const Entry& entry) {
          return IsAllReduce(entry) && entry.fabric == wanted &&
                 (wanted != "efa" || entry.path.nccl.architecture == gpus);
        },
        fit);
  }
  FitPart(sweep, PointToPointNumbers(to_all, sweep), IsAllToAll, fit);
  std::vector<double> errors;
  for (const Entry& entry : sweep.entries) {
    if (IsAllReduce(entry) || IsAllToAll(entry)) {
      errors.push_back(EntryError(entry));
    }
  }
  fit.errors = Summarise(errors);
  return fit;
}

}  // namespace shardwright
