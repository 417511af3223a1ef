#pragma once

// Published measurements of collectives (nccl-tests and the like) and the place each was made on.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/units.h"
#include "schedule/program.h"
#include "topologies/cluster.h"
#include "topologies/routing.h"

namespace shardwright {

// One line of a sweep, as published. What a source does not say is empty or 0.
struct SweepRow {
  std::int64_t line = 0;  // in the file, from 1
  std::string source;     // repository or page
  std::string system;     // "GCP a3-ultragpu-8g"
  std::string gpu;        // "H200-SXM-141GB"
  std::int64_t gpus = 0;  // ranks
  std::int64_t nodes = 0;
  std::int64_t gpus_per_node = 0;
  std::string network;  // "RoCE 8x400Gb/s"; inside one node the scale-up links
  std::string op;       // "all_gather", as nccl-tests names it
  Bytes bytes;          // of the full array: "size" of nccl-tests
  Seconds time;
};

// Reads the columns source, system, gpu, gpus, nodes, gpus_per_node, network, op, bytes and
// time_us; others are ignored. Throws InputError for a missing column or a bad number.
[[nodiscard]] std::vector<SweepRow> ReadSweep(const std::string& file);
[[nodiscard]] std::vector<SweepRow> ParseSweep(std::string_view text, const std::string& file);

// Where a row was measured, in our terms.
struct SweepPlace {
  Cluster cluster;
  GroupShape group;
  OpCode op = OpCode::kAllGather;
  std::string fabric;   // what the fit has numbers for: "hopper nvlink", "roce", ...
  std::string profile;  // shipped profile that the system needs; empty: the GPU's default
};

// Why a row is not predicted.
struct SweepSkip {
  std::string reason;
};

// The collective of a row, or nothing and the reason in `skip`: an operation that programs do not
// have, missing sizes, times or counts, or ranks that share a GPU.
[[nodiscard]] std::optional<OpCode> PlaceableOp(const SweepRow& row, SweepSkip& skip);

// The place of a row, or nothing and the reason in `skip`. What it depends on: system, gpu, counts,
// network, op and whether bytes and time are given; nothing measured.
[[nodiscard]] std::optional<SweepPlace> PlaceOfRow(const SweepRow& row, SweepSkip& skip);

// What the tool that measured a row counts besides: nccl-tests nothing, since it issues many calls
// before it waits; benchmarks that time each call of PyTorch's by events what passes between the
// first event and the kernel, 15 us (all_reduce_bench.py on 8 H200 against nccl-tests on such
// nodes, 2 to 16 MiB).
[[nodiscard]] Seconds ToolTime(const SweepRow& row);

// "NVIDIA/nccl" of "github.com/NVIDIA/nccl/issues/527 (comment)": the first words of a source.
[[nodiscard]] std::string ShortSource(const SweepRow& row);

}  // namespace shardwright
