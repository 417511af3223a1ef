#pragma once

// Numbers and names of Chakra's execution traces (et_def.proto of schema 0.0.4), for both ways.

#include <array>
#include <cstdint>
#include <string_view>

#include "schedule/program.h"

namespace shardwright::internal {

inline constexpr std::string_view kChakraVersion = "0.0.4";

// Fields of Node.
inline constexpr int kNodeId = 1, kNodeName = 2, kNodeType = 3, kNodeCtrlDeps = 4,
                     kNodeDataDeps = 5, kNodeStart = 6, kNodeDuration = 7, kNodeInputs = 8,
                     kNodeAttribute = 10;
// Members of AttributeProto.
inline constexpr int kAttributeName = 1, kInt32 = 7, kInt64 = 9, kUint32 = 11, kUint64 = 13,
                     kBool = 27, kString = 29;

enum class ChakraType : std::uint8_t {
  kInvalid = 0,
  kMetadata = 1,
  kLoad = 2,
  kStore = 3,
  kCompute = 4,
  kSend = 5,
  kReceive = 6,
  kCollective = 7,
};

struct ChakraCollective {
  OpCode code;
  std::uint64_t comm_type;  // CollectiveCommType
};
inline constexpr std::array kChakraCollectives = {
    ChakraCollective{OpCode::kAllReduce, 0},     ChakraCollective{OpCode::kAllGather, 2},
    ChakraCollective{OpCode::kBroadcast, 5},     ChakraCollective{OpCode::kAllToAll, 6},
    ChakraCollective{OpCode::kReduceScatter, 7}, ChakraCollective{OpCode::kBarrier, 9},
};

}  // namespace shardwright::internal
