#pragma once

// Samples for the inputs of a model: images with labels, tokens, or random numbers.

#include <cstdint>
#include <memory>
#include <string>

#include "executor/model_op.h"
#include "models/model.h"

namespace shardwright {

// Reads from several threads at once are fine.
class Dataset {
 public:
  Dataset() = default;
  Dataset(const Dataset&) = delete;
  Dataset& operator=(const Dataset&) = delete;
  virtual ~Dataset() = default;

  [[nodiscard]] virtual std::int64_t size() const = 0;
  // Writes what input `kind` of the model holds for one sample: all elements of `out`, which has a
  // floating-point dtype for features and int64 for everything else. Throws InputError when the
  // data does not suit the model (a token outside the vocabulary).
  virtual void Write(std::int64_t sample, InputKind kind, const View& out) const = 0;
  // Tells data apart: other samples have another one, most likely. Of files beyond 64 MiB only a
  // part goes into it.
  [[nodiscard]] virtual std::uint32_t Checksum() const = 0;
};

// What the model's inputs look like; the data is checked against it.
struct DataShape {
  std::int64_t features = 0;    // elements of an image; 0: the model takes none
  std::int64_t tokens = 0;      // per sample; 0: the model takes none
  std::int64_t labels = 0;      // per sample; 0: none (forward only)
  std::int64_t vocabulary = 0;  // of the tokens; 0: no tokens
  std::int64_t classes = 0;     // labels are below this
  bool has_decoder = false;     // encoder-decoder: predicts the tokens that follow the input
  bool is_masked = false;       // bidirectional encoder: predicts masked tokens of the input
};
[[nodiscard]] DataShape DataShapeOf(const Model& model);

// Opens what the user names:
//   an IDX image file, plain or gzip (MNIST's train-images-idx3-ubyte[.gz]); the labels are the
//   file
//     with "images-idx3" replaced by "labels-idx1"
//   text:FILE or any other file: raw text, one token per byte
//   FILE.bin or u16:FILE, u32:FILE: little-endian token ids; llm.c's header of 1024 bytes is
//   skipped random or random:N: N samples (default 65,536) of random numbers, chosen by `seed`
// and any of them, separated by commas: their samples one after the other. A folder stands for the
// files in it, by name; of IDX files for those of images.
// Throws InputError when it cannot be read or does not suit the model.
[[nodiscard]] std::unique_ptr<Dataset> OpenDataset(const std::string& spec, const Model& model,
                                                   std::uint64_t seed);

}  // namespace shardwright
