#pragma once

// A cuDNN that computes every graph in plain loops, as cudnn_graph.h documents its operations, at
// once and on the memory that it is given. Whether the library itself takes the graphs is another
// test's business (cudnn_library_test.cc).

#include <cstdint>
#include <vector>

#include "executor/cuda/cudnn.h"

namespace shardwright::testing {

struct FakeCudnnState {
  int heuristics_asked = 0;
  int executed = 0;
  int handles = 0, descriptors = 0;  // that are not destroyed
  int left_behind = -1;              // descriptors, when the last handle was destroyed
  std::int64_t workspace_size = 0;   // of every plan
  std::vector<int> notes = {};       // of every engine
  bool refuses = false;              // has no engine
  int execute_status = 0;
};
[[nodiscard]] FakeCudnnState& FakeCudnn();
[[nodiscard]] CudnnTable FakeCudnnTable();

}  // namespace shardwright::testing
