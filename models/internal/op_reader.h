#pragma once

// One op entry of a model.json on its way to an OpSpec: typed access to its keys, inputs and
// parameters. All Require and typed reads throw InputError at the place in the file.

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "models/internal/builder.h"
#include "models/internal/model_file_ops.h"
#include "models/model.h"

namespace shardwright {

// Product of `dims`.
[[nodiscard]] std::int64_t ElementsOf(const std::vector<std::int64_t>& dims);

class OpReader {
 public:
  // Keeps references to both.
  OpReader(ModelBuilder& builder, const FileOp& op) : builder_(builder), op_(op) {}

  [[nodiscard]] const FileOp& op() const { return op_; }
  [[nodiscard]] ModelBuilder& builder() { return builder_; }
  [[nodiscard]] const FileTensor& In(std::size_t i) const { return op_.inputs[i]; }
  [[nodiscard]] const std::vector<std::int64_t>& ShapeOf(std::size_t param) const;
  // The sizes of the file, for expressions.
  [[nodiscard]] FileSizes& sizes() const { return *op_.sizes; }
  // A list of sizes or expressions, each at least 1.
  [[nodiscard]] std::vector<std::int64_t> Shape(const JsonValue& list) const;
  [[nodiscard]] bool HasBias() const { return op_.params.size() > 1; }

  // A key of the entry, a number or an expression; the form with a fallback is for optional keys.
  [[nodiscard]] std::int64_t Int(std::string_view key, std::int64_t min, std::int64_t max) const;
  [[nodiscard]] std::int64_t Int(std::string_view key, std::int64_t fallback, std::int64_t min,
                                 std::int64_t max) const;
  [[nodiscard]] bool Flag(std::string_view key) const;
  // A positive number.
  [[nodiscard]] double Positive(std::string_view key, double fallback) const;
  // The key "p"; 0 when absent.
  [[nodiscard]] double Probability() const;
  // The key "function".
  [[nodiscard]] WrittenActivation Function() const;

  // Input i as (rows, features), as (channels, height, width), or as rows and features of any.
  [[nodiscard]] std::pair<std::int64_t, std::int64_t> Matrix(std::size_t i) const;
  [[nodiscard]] const std::vector<std::int64_t>& Image(std::size_t i) const;
  [[nodiscard]] std::pair<std::int64_t, std::int64_t> Elements(std::size_t i) const;

  void RequireDims(std::size_t i, const std::vector<std::int64_t>& dims) const;
  void RequireShape(std::size_t param, const std::vector<std::int64_t>& shape) const;
  void RequireRank(std::size_t param, std::size_t rank) const;
  // Refuses input i for its shape.
  [[noreturn]] void Fail(std::size_t i, const std::string& expected) const;

  // Input i, if ids, holds labels.
  void MarkLabels(std::size_t i);
  // ModelBuilder::MakeTokens of input i.
  [[nodiscard]] bool MakeTokens(std::size_t i);

  // Appends the op; `dims` are those of its outputs.
  [[nodiscard]] std::vector<FileTensor> Emit(const OpSpec& spec,
                                             const std::vector<std::int64_t>& dims);

 private:
  [[noreturn]] void FailParam(std::size_t param, const std::string& expected) const;

  ModelBuilder& builder_;
  const FileOp& op_;
};

}  // namespace shardwright
