#pragma once

#include <string>

namespace shardwright {

// Throws what WriteFileAtomically (core/json.h) would throw for a folder that is missing or may not
// be written: asked before long work, so that its result is not lost. Writes nothing; a disk may
// still fill.
void CheckWritable(const std::string& file);

}  // namespace shardwright
