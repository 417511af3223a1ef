#include "analysis/fit_nccl.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <set>
#include <string_view>

#include "analysis/internal/network_numbers.h"
#include "analysis/validate_nccl.h"
#include "core/error.h"
#include "core/text.h"

namespace shardwright {
namespace {

using internal::Factor;
using internal::FitNumbers;
using internal::kBetweenNodes;
using internal::Time;

// Kinds of fabric. A fabric without measurements is given the numbers of its kind.
enum class FabricKind { kNvlink, kRdma, kHostTcp };

struct Fabric {
  std::string_view name;
  FabricKind kind;
  std::string_view transport;
  std::string_view architecture;  // of the GPUs whose rows they are; empty: any
};
constexpr std::array<Fabric, 8> kFabrics = {
    Fabric{"volta nvlink", FabricKind::kNvlink, "nvlink", "volta"},
    Fabric{"ampere nvlink", FabricKind::kNvlink, "nvlink", "ampere"},
    Fabric{"hopper nvlink", FabricKind::kNvlink, "nvlink", "hopper"},
    Fabric{"blackwell nvlink", FabricKind::kNvlink, "nvlink", "blackwell"},
    Fabric{"ib", FabricKind::kRdma, "ib", ""},
    Fabric{"roce", FabricKind::kRdma, "roce", ""},
    // The adapter does the transport's work, as with RDMA.
    Fabric{"tcpxo", FabricKind::kRdma, "tcpxo", ""},
    // The host's kernel does it.
    Fabric{"tcpx", FabricKind::kHostTcp, "tcpx", ""},
};

// What host TCP reaches of the wire where it was not measured: large messages over 32 and 100
// Gbit/s never passed 60 % (github.com/NVIDIA/nccl/issues/209, read 2026-11-21).
constexpr double kHostTcpEfficiency = 0.6;

// What RDMA networks reach of their adapters' rate: from 0.77 (two B200 nodes, half of whose
// adapters are slow) to 0.94 (two a3-mega nodes), as published.
constexpr double kRdmaEfficiency = 0.85;
constexpr double kRdmaEfficiencyWidth = 0.08;

// The numbers of one fabric. Inside a node: the efficiency alone, since latencies are NCCL's own or
// shared. Between nodes: efficiency, one latency per protocol, and the cost of split messages.
void AddNumbers(const Fabric& fabric, const Profile& profile, std::vector<NetworkNumber>& out) {
  const std::string name(fabric.name);
  const std::string transport(fabric.transport);
  NetworkNumber efficiency = Factor(name, transport, "", "efficiency", 0.3, 1);
  efficiency.architecture = fabric.architecture;
  if (fabric.kind == FabricKind::kRdma) {
    // Where NVLink is the slower part, the rows do not tell the network's efficiency.
    efficiency.expected = kRdmaEfficiency;
    efficiency.expected_width = kRdmaEfficiencyWidth;
  }
  out.push_back(efficiency);
  if (fabric.kind == FabricKind::kNvlink) {
    return;
  }
  const TransportProfile& row = FindTransport(profile, transport);
  for (const ProtocolProfile& protocol : row.protocols) {
    if (protocol.name == "Simple") {
      out.push_back(Time(name, transport, protocol.name, "base_latency", 2000));
    } else {
      out.push_back(Time(name, transport, protocol.name, "hop_latency", 200));
    }
  }
  if (row.split_above.value.value > 0) {
    out.push_back(Time(name, transport, "", "split_latency", 200));
  }
}

// The fabrics with rows to fit, and every number that can then be found.
std::vector<NetworkNumber> NumbersFor(const std::set<std::string>& fabrics,
                                      const PreparedSweep& sweep) {
  const Profile generic = LoadProfile("generic");
  std::vector<NetworkNumber> numbers;
  bool has_nvlink = false;
  bool has_network = false;
  for (const Fabric& fabric : kFabrics) {
    if (fabrics.contains(std::string(fabric.name))) {
      AddNumbers(fabric, generic, numbers);
      has_nvlink = has_nvlink || fabric.kind == FabricKind::kNvlink;
      has_network = has_network || fabric.kind != FabricKind::kNvlink;
    }
  }
  if (has_nvlink) {
    numbers.push_back(Time("", "nvlink", "LL", "base_latency", 50));
    numbers.push_back(Factor("", "nvlink", "LL", "reduce_bandwidth", 0.3, 1));
  }
  if (has_network) {
    numbers.push_back(Factor("", std::string(kBetweenNodes), "", "overlap", 1, 4));
  }
  for (const auto& [name, profile] : sweep.profiles) {
    if (profile->host.library_call.value.value > 0) {
      numbers.push_back(Time("", "", "", "library_call", 200));
      numbers.back().profile = name;
    }
  }
  return numbers;
}

using Entry = PreparedSweep::Entry;

std::vector<const Entry*> ScoredEntries(const PreparedSweep& sweep) {
  std::vector<const Entry*> scored;
  for (const Entry& entry : sweep.entries) {
    if (IsScored(entry)) {
      scored.push_back(&entry);
    }
  }
  return scored;
}

std::set<std::string> FabricsOf(const std::vector<const Entry*>& entries) {
  std::set<std::string> fabrics;
  for (const Entry* entry : entries) {
    fabrics.insert(entry->fabric);
  }
  return fabrics;
}

const Fabric* FindFabric(const std::string& name) {
  const auto* const fabric = std::find_if(kFabrics.begin(), kFabrics.end(),
                                          [&](const Fabric& f) { return f.name == name; });
  return fabric == kFabrics.end() ? nullptr : fabric;
}

// The geometric mean of what `numbers` has in this place for other fabrics of one kind; 0 if none.
double MeanOfKind(const NetworkNumber& wanted, FabricKind kind, const std::string& left_out,
                  const std::vector<NetworkNumber>& numbers) {
  double sum = 0;
  double count = 0;
  for (const NetworkNumber& number : numbers) {
    const Fabric* fabric = FindFabric(number.fabric);
    if (fabric != nullptr && fabric->kind == kind && number.fabric != left_out &&
        number.protocol == wanted.protocol && number.field == wanted.field && number.value > 0) {
      sum += std::log(number.value);
      count += 1;
    }
  }
  return count > 0 ? std::exp(sum / count) : 0;
}

LeftOutFabric LeaveOut(const std::string& name, const std::vector<SweepRow>& rows,
                       std::vector<NetworkNumber>& all) {
  PreparedSweep sweep = PrepareSweep(rows, "");
  const std::vector<const Entry*> scored = ScoredEntries(sweep);
  std::vector<const Entry*> kept;
  std::vector<const Entry*> out;
  for (const Entry* entry : scored) {
    (entry->fabric == name ? out : kept).push_back(entry);
  }
  // A number that only the left-out rows can tell must not stay at what they told.
  std::vector<NetworkNumber> numbers = NumbersFor(FabricsOf(kept), sweep);
  FitNumbers(kept, sweep, numbers);

  const Fabric& fabric = *FindFabric(name);
  LeftOutFabric result;
  result.fabric = name;
  std::set<std::string> from;
  for (NetworkNumber& number : all) {
    if (number.fabric != name) {
      continue;
    }
    double value = MeanOfKind(number, fabric.kind, name, numbers);
    if (value == 0 && fabric.kind == FabricKind::kHostTcp && number.field == "efficiency") {
      value = kHostTcpEfficiency;
    }
    if (value == 0 && fabric.kind != FabricKind::kNvlink) {
      value = MeanOfKind(number, FabricKind::kRdma, name, numbers);
    }
    internal::NumberSetter(number, sweep)(value);
  }
  for (const NetworkNumber& number : numbers) {
    const Fabric* other = FindFabric(number.fabric);
    if (other != nullptr && (other->kind == fabric.kind || (fabric.kind == FabricKind::kHostTcp &&
                                                            other->kind == FabricKind::kRdma))) {
      from.insert(number.fabric);
    }
  }
  result.from = Listed(from);
  std::vector<double> errors;
  std::vector<double> large;
  for (const Entry* entry : out) {
    errors.push_back(EntryError(*entry));
    constexpr Bytes kLarge{64LL << 20};
    if (entry->row.bytes > kLarge) {
      large.push_back(errors.back());
    }
  }
  result.all = Summarise(errors);
  result.above_64_mib = Summarise(large);
  return result;
}

}  // namespace

NetworkFit FitNetwork(const std::vector<SweepRow>& rows, bool leave_out) {
  PreparedSweep sweep = PrepareSweep(rows, "");
  std::vector<const Entry*> scored = ScoredEntries(sweep);
  std::erase_if(scored, [](const Entry* entry) { return FindFabric(entry->fabric) == nullptr; });
  if (scored.empty()) {
    throw InputError("sweep",
                     "no all-gather or reduce-scatter of 64 KiB to 16 GiB on a known fabric",
                     "some to fit to");
  }
  NetworkFit fit;
  const std::set<std::string> fabrics = FabricsOf(scored);
  fit.numbers = NumbersFor(fabrics, sweep);
  fit.evaluations = FitNumbers(scored, sweep, fit.numbers);
  std::vector<double> errors;
  errors.reserve(scored.size());
  for (const Entry* entry : scored) {
    errors.push_back(EntryError(*entry));
  }
  fit.errors = Summarise(errors);
  if (leave_out && fabrics.size() > 1) {
    for (const std::string& fabric : fabrics) {
      fit.left_out.push_back(LeaveOut(fabric, rows, fit.numbers));
    }
  }
  return fit;
}

}  // namespace shardwright
