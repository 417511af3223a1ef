#pragma once

// Names of tensors in files for Transformers. Ours are those of the hub's files, which both
// versions of Transformers read (version 5 converts them as it loads). The modules of version 5
// hold other tensors: the experts of a layer are one, and a ViT's layers have other names.

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "executor/checkpoint/manifest.h"

namespace shardwright {

enum class HubNames : std::uint8_t { kHub, kModules5 };
// "4": named_parameters() of Transformers 4, and the hub's files; "5": those of Transformers 5.
inline constexpr std::array<std::string_view, 2> kHubNamesNames = {"4", "5"};

// A tensor of such a file.
struct HubTensor {
  std::string name;
  std::vector<std::int64_t> shape;
  std::vector<std::string> parts;  // tensors whose elements it holds, one after the other
};

// The tensors of a file with all of `tensors`, in their order.
[[nodiscard]] std::vector<HubTensor> HubTensorsOf(std::span<const SavedTensor> tensors,
                                                  HubNames names);

}  // namespace shardwright
