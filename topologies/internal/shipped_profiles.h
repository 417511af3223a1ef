#pragma once

#include <span>

#include "core/embedded.h"

namespace shardwright::internal {

// The files of the shipped profiles (see ShipProfilesOf), sorted by name.
[[nodiscard]] std::span<const EmbeddedFile> ShippedProfiles();

}  // namespace shardwright::internal
