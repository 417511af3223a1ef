#pragma once

// The keys of each framework that no settings struct holds. The Trainer's have those of the scripts
// around it among them.

#include <span>

#include "planner/importers/read_settings.h"

namespace shardwright {

[[nodiscard]] std::span<const OtherKey> TorchtitanOthers();
[[nodiscard]] std::span<const OtherKey> AccelerateOthers();
[[nodiscard]] std::span<const OtherKey> TrainerOthers();
[[nodiscard]] std::span<const OtherKey> AxolotlOthers();
[[nodiscard]] std::span<const OtherKey> DeepSpeedOthers();
[[nodiscard]] std::span<const OtherKey> FairseqOthers();

}  // namespace shardwright
