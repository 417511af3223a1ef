#pragma once

// Every small mistake a lowering could make, made on purpose.

#include <functional>
#include <string>

#include "schedule/program.h"

namespace shardwright {

enum class Mutation {
  kDeleteEdge,       // one edge of one op, carried ones as well
  kDeleteEvent,      // all edges to one op, or one carry
  kDeleteWait,       // a host_wait or stream_wait with all its edges
  kMoveFreeEarlier,  // one free, one op earlier
  kDropPoint,        // one alloc or free
  kDuplicatePoint,   // one alloc or free
  kShrinkBuffer,     // one buffer, by one byte
  kSwitchSide,       // one buffer, from the device to the host or back
};

struct Mutant {
  Program program;
  Mutation mutation = Mutation::kDeleteEdge;
  std::string what;  // "step: edge 1 of mb0.layers.0.fwd deleted"
};

// Calls `visit` with each mutant of the program.
void ForEachMutant(const Program& program, const std::function<void(const Mutant&)>& visit);

// Calls `visit` with the program in which two collectives that follow each other in a body's host
// order have changed places, together with their memory points; for each such pair.
void ForEachSwappedPair(const Program& program,
                        const std::function<void(const Program&, const std::string&)>& visit);

}  // namespace shardwright
