#include "analysis/fit_nccl.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "analysis/optimize.h"
#include "analysis/validate_nccl.h"
#include "core/error.h"

namespace shardwright {
namespace {

TEST_CASE("Minimise finds the minimum of a valley, within the bounds") {
  // Rosenbrock's function, least at (1, 1); with x at most 0.5, at (0.5, 0.25).
  const auto valley = [](std::span<const double> v) {
    return 100 * std::pow(v[1] - v[0] * v[0], 2) + std::pow(1 - v[0], 2);
  };
  const FitResult free = Minimise(valley, {{"x", -2, 2, -1.2}, {"y", -2, 2, 1}}, 20000);
  CHECK(free.values[0] == doctest::Approx(1).epsilon(1e-3));
  CHECK(free.values[1] == doctest::Approx(1).epsilon(1e-3));
  const FitResult bounded = Minimise(valley, {{"x", -2, 0.5, -1.2}, {"y", -2, 2, 1}}, 20000);
  CHECK(bounded.values[0] == doctest::Approx(0.5).epsilon(1e-3));
  CHECK(bounded.values[1] == doctest::Approx(0.25).epsilon(1e-3));
  CHECK(bounded.objective == doctest::Approx(0.25).epsilon(1e-3));
}

TEST_CASE("Minimise passes on what the objective throws") {
  const auto broken = [](std::span<const double> v) -> double {
    if (v[0] > 0.5) {
      throw InputError("too far");
    }
    return -v[0];
  };
  CHECK_THROWS_AS((void)Minimise(broken, {{"x", 0, 1, 0.1}}, 1000), InputError);
}

TEST_CASE("fit-nccl finds the numbers that made a sweep") {
  // Two a3-ultra nodes and one node of H100s, with numbers far from the shipped ones.
  std::vector<SweepRow> rows;
  for (const bool is_pair : {false, true}) {
    for (std::int64_t bytes = 64 << 10; bytes <= std::int64_t{4} << 30; bytes *= 2) {
      for (const char* op : {"all_gather", "reduce_scatter"}) {
        SweepRow& row = rows.emplace_back();
        row.source = "made";
        row.system = is_pair ? "GCP a3-ultragpu-8g" : "8x H200 node";
        row.gpu = "H200";
        row.gpus = is_pair ? 16 : 8;
        row.nodes = is_pair ? 2 : 1;
        row.gpus_per_node = 8;
        row.network = "RoCE 8x400Gb/s";
        row.op = op;
        row.bytes = Bytes(bytes);
        row.time = Seconds(1);
      }
    }
  }
  PreparedSweep sweep = PrepareSweep(rows, "");
  REQUIRE(sweep.profiles.size() == 1);
  Profile& truth = *sweep.profiles.begin()->second;
  for (TransportProfile& transport : truth.transports) {
    transport.overlap.value = transport.name == "nvlink" ? 1 : 1.6;
    if (transport.name == "nvlink") {
      transport.efficiency.value = 0.9;
      transport.protocols[0].base_latency.value = Seconds(20e-6);
      transport.protocols[0].reduce_bandwidth.value = 0.6;
    } else if (transport.name == "roce") {
      transport.efficiency.value = 0.7;
      transport.protocols[0].hop_latency.value = Seconds(11e-6);
      transport.protocols[1].hop_latency.value = Seconds(52e-6);
      for (ProtocolProfile& protocol : transport.protocols) {
        if (protocol.name == "Simple") {
          protocol.base_latency.value = Seconds(300e-6);
        }
      }
    }
  }
  for (std::size_t i = 0; i < rows.size(); ++i) {
    rows[i].time = PredictEntry(sweep.entries[i]);
  }
  const NetworkFit fit = FitNetwork(rows, false);
  CHECK(fit.errors.max < 0.02);
  const auto found = [&](const std::string& name) {
    const auto it = std::find_if(fit.numbers.begin(), fit.numbers.end(),
                                 [&](const NetworkNumber& n) { return NumberName(n) == name; });
    REQUIRE_MESSAGE(it != fit.numbers.end(), name);
    return it->value;
  };
  constexpr double kWithin = 0.02;  // the rows are exact, the prior on efficiency pulls a little
  CHECK(found("hopper nvlink: efficiency") == doctest::Approx(0.9).epsilon(kWithin));
  CHECK(found("roce: efficiency") == doctest::Approx(0.7).epsilon(kWithin));
  CHECK(found("roce: LL hop_latency") * 1e6 == doctest::Approx(11).epsilon(kWithin));
  CHECK(found("roce: LL128 hop_latency") * 1e6 == doctest::Approx(52).epsilon(kWithin));
  CHECK(found("roce: Simple base_latency") * 1e6 == doctest::Approx(300).epsilon(3 * kWithin));
  CHECK(found("shared: LL base_latency") * 1e6 == doctest::Approx(20).epsilon(kWithin));
  CHECK(found("shared: LL reduce_bandwidth") == doctest::Approx(0.6).epsilon(kWithin));
  // How much hides is told by a few rows only, and its error is made up for by the efficiency.
  CHECK(found("shared: overlap") == doctest::Approx(1.6).epsilon(5 * kWithin));
}

TEST_CASE("fit-nccl --all-reduce finds the numbers that made a sweep") {
  // A node of H200s, two a3-mega nodes and all-to-alls, with numbers far from the shipped ones.
  std::vector<SweepRow> rows;
  const auto add = [&](const char* op, const char* system, std::int64_t nodes) {
    for (std::int64_t bytes = 1 << 10; bytes <= std::int64_t{4} << 30; bytes *= 2) {
      SweepRow& row = rows.emplace_back();
      row.source = "made";
      row.system = system;
      row.gpu = "H200";
      row.gpus = 8 * nodes;
      row.nodes = nodes;
      row.gpus_per_node = 8;
      row.network = "NVLink";
      row.op = op;
      row.bytes = Bytes(bytes);
      row.time = Seconds(1);
    }
  };
  add("all_reduce", "8x H200 node", 1);
  add("all_reduce", "GCP a3-megagpu-8g", 2);
  add("alltoall", "8x H200 node", 1);
  PreparedSweep sweep = PrepareSweep(rows, "");
  REQUIRE(sweep.profiles.size() == 1);
  for (TransportProfile& transport : sweep.profiles.begin()->second->transports) {
    if (transport.name == "nvlink") {
      transport.p2p_latency.value = Seconds(25e-6);
      transport.p2p_drift.value = Seconds(40e-6);
      for (ProtocolProfile& protocol : transport.protocols) {
        if (protocol.name == "NVLS") {
          protocol.base_latency.value = Seconds(30e-6);
          protocol.bandwidth.value = 0.8;
          protocol.fill.value = 1.2;
        } else if (protocol.name == "LL") {
          protocol.base_latency.value = Seconds(15e-6);
        }
      }
    } else if (transport.name == "tcpxo") {
      transport.all_reduce_gain.value = 0.7;
      transport.protocols.back().tree_latency.value = Seconds(90e-6);
    }
  }
  for (std::size_t i = 0; i < rows.size(); ++i) {
    rows[i].time = PredictEntry(sweep.entries[i]);
  }
  const NetworkFit fit = FitAllReduce(rows);
  CHECK(fit.errors.max < 0.02);
  const auto found = [&](const std::string& name) {
    const auto it = std::find_if(fit.numbers.begin(), fit.numbers.end(),
                                 [&](const NetworkNumber& n) { return NumberName(n) == name; });
    REQUIRE_MESSAGE(it != fit.numbers.end(), name);
    return it->value;
  };
  constexpr double kWithin = 0.02;
  CHECK(found("hopper nvlink: NVLS base_latency") * 1e6 == doctest::Approx(30).epsilon(kWithin));
  CHECK(found("hopper nvlink: NVLS bandwidth") == doctest::Approx(0.8).epsilon(kWithin));
  CHECK(found("hopper nvlink: LL base_latency") * 1e6 == doctest::Approx(15).epsilon(kWithin));
  CHECK(found("shared: NVLS fill") == doctest::Approx(1.2).epsilon(kWithin));
  CHECK(found("tcpxo: all_reduce_gain") == doctest::Approx(0.7).epsilon(kWithin));
  CHECK(found("tcpxo: Simple tree_latency") * 1e6 == doctest::Approx(90).epsilon(kWithin));
  CHECK(found("shared: p2p_latency") * 1e6 == doctest::Approx(25).epsilon(kWithin));
  CHECK(found("shared: p2p_drift") * 1e6 == doctest::Approx(40).epsilon(kWithin));
}

TEST_CASE("fit-nccl without rows to fit says so") {
  std::string text;
  try {
    (void)FitNetwork({}, false);
  } catch (const InputError& error) {
    text = error.what();
  }
  CHECK(text ==
        "sweep: got no all-gather or reduce-scatter of 64 KiB to 16 GiB on a known fabric, "
        "expected some to fit to");
  try {
    (void)FitAllReduce({});
  } catch (const InputError& error) {
    text = error.what();
  }
  CHECK(text ==
        "sweep: got no all-reduce or all-to-all on a known fabric, expected some to fit to");
}

}  // namespace
}  // namespace shardwright
