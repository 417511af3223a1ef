#pragma once

#include <stdexcept>

namespace shardwright {

// A wrong command line: unknown flag, missing value, a value that no flag of this kind can have, an
// output that is one of the inputs.
class UsageError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace shardwright
