#include "executor/data/tokens.h"

#include <algorithm>
#include <cstring>

#include "core/error.h"
#include "executor/data/mapped_file.h"
#include "executor/initialize.h"

namespace shardwright {
namespace {

// BERT's [MASK]. A smaller vocabulary takes its last token.
constexpr std::int64_t kMaskToken = 103;

class Tokens : public Dataset {
 public:
  Tokens(const std::string& file, int width, const DataShape& shape, std::uint64_t seed)
      : file_(file), mapped_(file), width_(width), shape_(shape), key_(InitKey(seed, "mask")) {
    data_ = mapped_.bytes();
    SkipHeader();
    count_ = static_cast<std::int64_t>(data_.size()) / width_;
    if (data_.size() % static_cast<std::size_t>(width_) != 0) {
      throw InputError(file, std::to_string(data_.size()) + " bytes",
                       "whole tokens of " + std::to_string(width_) + " bytes");
    }
    if (size() < 1) {
      throw InputError(
          file, std::to_string(count_) + " tokens",
          "at least the " + std::to_string(TokensOfSample() + Lookahead()) + " of one sample");
    }
  }

  [[nodiscard]] std::int64_t size() const override {
    return std::max<std::int64_t>(count_ - Lookahead(), 0) / TokensOfSample();
  }

  void Write(std::int64_t sample, InputKind kind, const View& out) const override {
    SW_CHECK(sample >= 0 && sample < size(), std::to_string(sample));
    SW_CHECK(out.dtype == DType::kInt64, file_);
    auto* ids = static_cast<std::int64_t*>(out.data);
    const std::int64_t first = sample * TokensOfSample();
    for (std::int64_t i = 0; i < out.elements; ++i) {
      ids[i] = ValueOf(sample, first, i, kind);
    }
  }

  [[nodiscard]] std::uint32_t Checksum() const override { return ContentChecksum(data_, 0); }

 private:
  [[nodiscard]] std::int64_t TokensOfSample() const {
    return shape_.has_decoder ? shape_.tokens + shape_.labels : shape_.tokens;
  }
  // Tokens behind a sample that its labels need.
  [[nodiscard]] std::int64_t Lookahead() const {
    return shape_.has_decoder || shape_.is_masked ? 0 : 1;
  }

  // llm.c's token files begin with 256 int32 words: magic 20240520, version 1, token count.
  void SkipHeader() {
    constexpr std::size_t kHeaderBytes = 1024;
    constexpr std::int32_t kMagic = 20240520;
    std::int32_t words[3] = {0, 0, 0};
    if (width_ != 2 || data_.size() < kHeaderBytes) {
      return;
    }
    std::memcpy(words, data_.data(), sizeof words);
    if (words[0] != kMagic) {
      return;
    }
    const std::size_t body = data_.size() - kHeaderBytes;
    if (words[1] != 1 || words[2] < 0 || static_cast<std::size_t>(words[2]) > body / 2) {
      throw InputError(
          file_,
          "a header with version " + std::to_string(words[1]) + " and " + std::to_string(words[2]) +
              " tokens",
          "version 1 and at most the " + std::to_string(body / 2) + " tokens of the file");
    }
    data_ = data_.subspan(kHeaderBytes, static_cast<std::size_t>(words[2]) * 2);
  }

  [[nodiscard]] std::int64_t TokenAt(std::int64_t index) const {
    std::uint32_t token = 0;
    std::memcpy(&token, data_.data() + index * width_, static_cast<std::size_t>(width_));
    if (static_cast<std::int64_t>(token) >= shape_.vocabulary) {
      throw InputError(
          file_ + ": token " + std::to_string(index), std::to_string(token),
          "a token below the model's vocabulary of " + std::to_string(shape_.vocabulary));
    }
    return static_cast<std::int64_t>(token);
  }

  [[nodiscard]] bool IsMasked(std::int64_t index) const {
    return Philox(key_, static_cast<std::uint64_t>(index), 0).word[0] < 0x26666666U;  // 15 %
  }

  [[nodiscard]] std::int64_t LabelOf(std::int64_t first, std::int64_t i) const {
    if (shape_.has_decoder) {
      return TokenAt(first + shape_.tokens + i);
    }
    if (shape_.is_masked) {
      return IsMasked(first + i) ? TokenAt(first + i) : kNoLabel;
    }
    return TokenAt(first + i + 1);
  }

  [[nodiscard]] std::int64_t ValueOf(std::int64_t sample, std::int64_t first, std::int64_t i,
                                     InputKind kind) const {
    switch (kind) {
      case InputKind::kTokens:
        return shape_.is_masked && IsMasked(first + i) ? std::min(kMaskToken, shape_.vocabulary - 1)
                                                       : TokenAt(first + i);
      case InputKind::kLabels:
        return LabelOf(first, i);
      case InputKind::kDecoderTokens:
        return i == 0 ? 0 : LabelOf(first, i - 1);  // T5 starts with its padding token, 0
      case InputKind::kPositions:
        return i;
      case InputKind::kTokenTypes:
        return 0;
      case InputKind::kNone:
      case InputKind::kFeatures:
        break;
    }
    SW_CHECK(false, "tokens have no features; sample " + std::to_string(sample));
    return 0;
  }

  std::string file_;
  MappedFile mapped_;
  int width_;
  DataShape shape_;
  std::uint64_t key_;
  std::span<const std::byte> data_;
  std::int64_t count_ = 0;
};

}  // namespace

std::unique_ptr<Dataset> OpenTokens(const std::string& file, int width, const DataShape& shape,
                                    std::uint64_t seed) {
  return std::make_unique<Tokens>(file, width, shape, seed);
}

}  // namespace shardwright
