#pragma once

#include "core/units.h"
#include "schedule/place.h"
#include "schedule/program.h"

namespace shardwright {

// Places the program and checks, with the brute-force order, that every buffer lies inside its
// arena at an aligned offset and that any two lives of buffers whose bytes overlap are ordered.
Placement CheckPlacement(const Program& program, Bytes alignment = Bytes(256));

}  // namespace shardwright
