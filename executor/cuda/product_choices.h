#pragma once

// Which of cuBLASLt's algorithms was the fastest for each product, on one GPU with one version of
// the library, kept in a file from run to run.

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>

namespace shardwright {

// cublasLtMatmulAlgo_t, which may be stored and used again with the same version of the library.
using LtAlgorithmData = std::array<std::uint64_t, 8>;

class ProductChoices {
 public:
  // Reads the file, if there is one. `made_for`: GPU and library. A file that was made for another
  // pair is left alone until the first choice, which replaces it. Throws RunError naming file and
  // line when it is no such file.
  ProductChoices(std::string file, std::string made_for);

  [[nodiscard]] std::optional<LtAlgorithmData> Find(const std::string& product) const;
  // Writes the file as a whole, with what other processes have chosen meanwhile. Throws
  // EnvironmentError, and RunError as the constructor.
  void Add(const std::string& product, const LtAlgorithmData& algorithm);

 private:
  using Table = std::map<std::string, LtAlgorithmData>;
  // Empty when the file is missing or made for something else.
  [[nodiscard]] Table Read() const;

  const std::string file_, made_for_;
  Table table_;
};

}  // namespace shardwright
