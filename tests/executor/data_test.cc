#include <algorithm>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <set>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "core/error.h"
#include "executor/data/batch.h"
#include "executor/data/dataset.h"
#include "executor/data/idx.h"
#include "executor/data/sampler.h"
#include "executor/half.h"
#include "models/loader.h"
#include "tests/executor/scratch_folder.h"

namespace shardwright {
namespace {

using testing::ScratchFolder;

template <class Work>
std::string ErrorOf(const Work& work) {
  try {
    work();
  } catch (const InputError& error) {
    return error.what();
  }
  return "no error";
}

TEST_CASE("permutations are permutations, and shuffle") {
  for (const std::int64_t size : {1, 2, 3, 4, 5, 16, 17, 100, 1000, 4097}) {
    std::vector<int> seen(static_cast<std::size_t>(size), 0);
    std::int64_t fixed = 0;
    for (std::int64_t i = 0; i < size; ++i) {
      const std::int64_t p = Permuted(i, size, 42);
      ++seen[static_cast<std::size_t>(p)];
      fixed += p == i ? 1 : 0;
    }
    CHECK(std::count(seen.begin(), seen.end(), 1) == size);
    // The number of fixed points of a random permutation is Poisson with mean 1: P(> 8) < 2e-6.
    CHECK((size < 16 || fixed <= 8));
  }
  // Every place is about equally likely: 600 keys over 6 places, 100 each, deviation 9.1.
  std::vector<int> counts(6, 0);
  for (std::uint64_t key = 0; key < 600; ++key) {
    ++counts[static_cast<std::size_t>(Permuted(2, 6, key))];
  }
  for (const int count : counts) {
    CHECK(std::abs(count - 100) < 46);  // 5 deviations
  }
}

// The samples of all steps up to `steps`, read by `ranks` ranks in `micro_batches` each.
std::vector<std::vector<SamplePlace>> Read(const Sampler& sampler, std::int64_t steps) {
  std::vector<std::vector<SamplePlace>> result;
  for (std::int64_t step = 0; step < steps; ++step) {
    result.emplace_back();
    for (std::int64_t i = 0; i < sampler.global_batch; ++i) {
      result.back().push_back(SampleAt(sampler, step, i));
    }
  }
  return result;
}

TEST_CASE("every sample comes once per epoch") {
  for (const EpochTail tail : {EpochTail::kCarry, EpochTail::kPad}) {
    const Sampler sampler = {.dataset_size = 23, .global_batch = 4, .seed = 3, .tail = tail};
    std::vector<std::vector<int>> seen(4, std::vector<int>(23, 0));
    std::int64_t empty = 0;
    // Four epochs are 92 samples: 23 steps when batches straddle epochs, 4 * 6 when the last is
    // padded.
    for (const auto& step : Read(sampler, tail == EpochTail::kCarry ? 23 : 24)) {
      for (const SamplePlace& place : step) {
        if (place.sample < 0) {
          ++empty;
        } else {
          ++seen.at(static_cast<std::size_t>(place.epoch))
                .at(static_cast<std::size_t>(place.sample));
        }
      }
    }
    for (const std::vector<int>& epoch : seen) {
      CHECK(std::count(epoch.begin(), epoch.end(), 1) == 23);
    }
    CHECK(empty == (tail == EpochTail::kCarry ? 0 : 4));
  }
  // Dropping: 5 steps of 4 distinct samples.
  const Sampler drop = {.dataset_size = 23, .global_batch = 4, .tail = EpochTail::kDrop};
  std::set<std::int64_t> distinct;
  for (const auto& step : Read(drop, 5)) {
    for (const SamplePlace& place : step) {
      CHECK(place.epoch == 0);
      distinct.insert(place.sample);
    }
  }
  CHECK(distinct.size() == 20);
  CHECK(SampleAt(drop, 5, 0).epoch == 1);
}

TEST_CASE("epochs differ, seeds differ, and without shuffling the order is the data's") {
  Sampler sampler = {.dataset_size = 64, .global_batch = 64};
  const auto epochs = Read(sampler, 2);
  const auto order = [](const std::vector<SamplePlace>& places) {
    std::vector<std::int64_t> samples;
    for (const SamplePlace& place : places) {
      samples.push_back(place.sample);
    }
    return samples;
  };
  CHECK(order(epochs[0]) != order(epochs[1]));
  sampler.seed = 2;
  CHECK(order(Read(sampler, 1)[0]) != order(epochs[0]));
  sampler.shuffle = false;
  std::vector<std::int64_t> identity(64);
  for (std::size_t i = 0; i < identity.size(); ++i) {
    identity[i] = static_cast<std::int64_t>(i);
  }
  CHECK(order(Read(sampler, 1)[0]) == identity);
}

TEST_CASE("epochs of steps") {
  // 10 samples, batches of 4: samples 0..3, 4..7, 8..11 (epoch 0 and 1), 12..15, 16..19, 20 ...
  const Sampler carry = {.dataset_size = 10, .global_batch = 4};
  CHECK(EpochOf(carry, 2) == 0);
  CHECK(EpochOf(carry, 3) == 1);
  CHECK(FirstStepOf(carry, 1) == 2);
  CHECK(FirstStepOf(carry, 2) == 5);
  CHECK(EndOfEpoch(carry, 0) == 3);
  CHECK(EndOfEpoch(carry, 1) == 5);
  const Sampler pad = {.dataset_size = 10, .global_batch = 4, .tail = EpochTail::kPad};
  CHECK(EpochOf(pad, 2) == 0);
  CHECK(EpochOf(pad, 3) == 1);
  CHECK(FirstStepOf(pad, 2) == 6);
  CHECK(ErrorOf([] {
          CheckSampler({.dataset_size = 3, .global_batch = 4, .tail = EpochTail::kDrop}, "data");
        }) ==
        "data: got 3 samples, expected at least the 4 of a global batch, since incomplete "
        "batches are dropped");
}

TEST_CASE("samples of an epoch in a step, and its end, are those of the places") {
  for (const EpochTail tail : {EpochTail::kCarry, EpochTail::kDrop, EpochTail::kPad}) {
    for (std::int64_t size = 1; size < 12; ++size) {
      for (std::int64_t batch = 1; batch < 14; ++batch) {
        const Sampler sampler = {.dataset_size = size, .global_batch = batch, .tail = tail};
        if (tail == EpochTail::kDrop && size < batch) {
          continue;
        }
        for (std::int64_t epoch = 0; epoch < 3; ++epoch) {
          std::int64_t end = 0;
          for (std::int64_t step = 0; step < 4 * size + 4; ++step) {
            std::int64_t samples = 0;
            for (std::int64_t place = 0; place < batch; ++place) {
              const SamplePlace at = SampleAt(sampler, step, place);
              samples += at.sample >= 0 && at.epoch == epoch ? 1 : 0;
            }
            end = samples > 0 ? step + 1 : end;
            REQUIRE(SamplesIn(sampler, step, epoch) == samples);
          }
          REQUIRE(EndOfEpoch(sampler, epoch) == end);
        }
      }
    }
  }
}

std::string Idx(std::uint8_t type, const std::vector<std::uint32_t>& shape,
                const std::string& body) {
  std::string text = {'\0', '\0', static_cast<char>(type), static_cast<char>(shape.size())};
  for (const std::uint32_t size : shape) {
    for (int shift = 24; shift >= 0; shift -= 8) {
      text += static_cast<char>(size >> shift);
    }
  }
  return text + body;
}

TEST_CASE("idx files: what is wrong is said") {
  const ScratchFolder folder;
  const auto error = [&](const std::string& content) {
    const std::string file = folder.Write("a", content);
    const std::string text = ErrorOf([&] { (void)ReadIdx(file); });
    return text.starts_with(file) ? text.substr(file.size()) : text;
  };
  CHECK(error(Idx(8, {2, 3}, "abcdef")) == "no error");
  CHECK(error("") == ": got no IDX header, expected a file that begins with two zero bytes");
  CHECK(error("PK\x08\x03") ==
        ": got no IDX header, expected a file that begins with two zero bytes");
  CHECK(error(Idx(13, {1}, "abcd")) == ": got element type 13, expected 8, unsigned bytes");
  CHECK(error(Idx(8, {}, "")) == ": got 0 dimensions, expected 1 to 4");
  CHECK(error(Idx(8, {1, 1, 1, 1, 1}, "a")) == ": got 5 dimensions, expected 1 to 4");
  CHECK(error(Idx(8, {2, 3}, "").substr(0, 9)) ==
        ": got the end of the file inside the header, expected a size per dimension");
  CHECK(error(Idx(8, {2, 3}, "abcde")) == ": got 5 elements, expected 6, as its header says");
  CHECK(error(Idx(8, {2, 3}, "abcdefg")) ==
        ": got more than 6 elements, expected 6, as its header says");
  CHECK(
      error(Idx(8, {0xffffffff, 0xffffffff, 0xffffffff}, "x")) ==
      ": got more than 805,306,368 elements, expected at most 805,306,368; --budget 2 allows twice "
      "as many");
  // A header alone cannot ask for memory: this one promises 768 MiB.
  CHECK(error(Idx(8, {0x2fffffff}, "x")) ==
        ": got 1 elements, expected 805306367, as its header says");
}

TEST_CASE("idx files: random bytes never do worse than an error") {
  const ScratchFolder folder;
  std::mt19937 random(17);
  for (int i = 0; i < 300; ++i) {
    std::string content = Idx(8, {3, 4}, std::string(12, 'x'));
    for (int flips = 0; flips < 3; ++flips) {
      content[random() % content.size()] = static_cast<char>(random());
    }
    content.resize(random() % (content.size() + 1));
    const std::string file = folder.Write("a", content);
    try {
      const IdxArray array = ReadIdx(file);
      std::int64_t elements = 1;
      for (const std::int64_t size : array.shape) {
        elements *= size;
      }
      CHECK(elements == static_cast<std::int64_t>(array.values.size()));
    } catch (const InputError&) {
    }
  }
}

TEST_CASE("digits as the MNIST example sees them") {
  const Model net = LoadModel("mnist-convnet");
  const auto data = OpenDataset("data/digits/train-images-idx3-ubyte.gz", net, 1);
  REQUIRE(data->size() == 1500);
  std::vector<float> pixels(784);
  std::int64_t label = -1;
  data->Write(0, InputKind::kFeatures, {pixels.data(), DType::kFp32, 784});
  data->Write(0, InputKind::kLabels, {&label, DType::kInt64, 1});
  CHECK(label == 0);  // scikit-learn's first digit is a 0
  // Its first row of pixels is 0 0 5 13 9 1 0 0 of 16, drawn three times as large behind a border
  // of two: byte 5 * 255 / 16 = 80 in columns 8 to 10.
  const auto normalised = [](int byte) {
    return (static_cast<float>(byte) / 255.0F - 0.1307F) / 0.3081F;
  };
  CHECK(pixels[0] == normalised(0));
  CHECK(pixels[2 * 28 + 7] == normalised(0));
  CHECK(pixels[2 * 28 + 8] == normalised(80));
  CHECK(pixels[4 * 28 + 10] == normalised(80));
  CHECK(pixels[2 * 28 + 11] == normalised(207));
  CHECK(ErrorOf([&] { (void)OpenDataset("data/digits/README.md", net, 1); }) ==
        "data/digits/README.md: got no IDX file, expected images with labels in IDX files, which "
        "mnist-convnet takes");
}

// A tiny model for tokens: its vocabulary and lengths decide everything here.
Model TokenModel(std::int64_t vocabulary, std::int64_t length, bool masked, bool decoder) {
  Model model;
  model.name = "tiny";
  const auto input = [&](InputKind kind) {
    Tensor tensor;
    tensor.role = TensorRole::kIndex;
    tensor.elements = length;
    tensor.input = kind;
    tensor.per_sample = kind != InputKind::kPositions;
    model.tensors.push_back(tensor);
  };
  input(InputKind::kTokens);
  input(InputKind::kPositions);
  input(InputKind::kLabels);
  if (masked) {
    input(InputKind::kTokenTypes);
  }
  if (decoder) {
    input(InputKind::kDecoderTokens);
  }
  OpSpec spec;
  spec.kind = OpKind::kEmbedding;
  spec.vocab = vocabulary;
  model.specs.push_back(spec);
  ModelOp op;
  for (std::size_t t = 0; t < model.tensors.size(); ++t) {
    op.inputs.push_back(TensorId(t));
  }
  model.ops.push_back(op);
  return model;
}

std::vector<std::int64_t> Ids(const Dataset& data, std::int64_t sample, InputKind kind,
                              std::int64_t count) {
  std::vector<std::int64_t> ids(static_cast<std::size_t>(count), -7);
  data.Write(sample, kind, {ids.data(), DType::kInt64, count});
  return ids;
}

using Numbers = std::vector<std::int64_t>;

TEST_CASE("text is bytes, and labels are the next ones") {
  const ScratchFolder folder;
  const std::string file = folder.Write("text.txt", "abcdefghij");
  const auto data = OpenDataset(file, TokenModel(256, 3, false, false), 1);
  REQUIRE(data->size() == 3);
  CHECK(Ids(*data, 0, InputKind::kTokens, 3) == Numbers{'a', 'b', 'c'});
  CHECK(Ids(*data, 0, InputKind::kLabels, 3) == Numbers{'b', 'c', 'd'});
  CHECK(Ids(*data, 2, InputKind::kTokens, 3) == Numbers{'g', 'h', 'i'});
  CHECK(Ids(*data, 2, InputKind::kLabels, 3) == Numbers{'h', 'i', 'j'});
  CHECK(Ids(*data, 2, InputKind::kPositions, 3) == Numbers{0, 1, 2});
  // An encoder-decoder reads 3 and predicts the next 3.
  const auto seq2seq = OpenDataset("text:" + file, TokenModel(256, 3, false, true), 1);
  REQUIRE(seq2seq->size() == 1);
  CHECK(Ids(*seq2seq, 0, InputKind::kTokens, 3) == Numbers{'a', 'b', 'c'});
  CHECK(Ids(*seq2seq, 0, InputKind::kLabels, 3) == Numbers{'d', 'e', 'f'});
  CHECK(Ids(*seq2seq, 0, InputKind::kDecoderTokens, 3) == Numbers{0, 'd', 'e'});
}

TEST_CASE("several files and folders are one after the other") {
  const ScratchFolder folder;
  const Model model = TokenModel(256, 3, false, false);
  const std::string first = folder.Write("a,b.txt", "abcdefg");  // a comma of its own
  const std::string second = folder.Write("c.txt", "hijk");
  const auto data = OpenDataset(first + ",text:" + second, model, 1);
  REQUIRE(data->size() == 3);
  CHECK(Ids(*data, 1, InputKind::kTokens, 3) == Numbers{'d', 'e', 'f'});
  CHECK(Ids(*data, 1, InputKind::kLabels, 3) == Numbers{'e', 'f', 'g'});
  CHECK(Ids(*data, 2, InputKind::kTokens, 3) == Numbers{'h', 'i', 'j'});
  const auto all = OpenDataset(std::filesystem::path(first).parent_path().string(), model, 1);
  CHECK(all->size() == 3);
  CHECK(all->Checksum() == data->Checksum());
  CHECK(OpenDataset(second + "," + first, model, 1)->Checksum() != data->Checksum());
  const std::string other = folder.Write("d.txt", "hijK");
  CHECK(OpenDataset(other, model, 1)->Checksum() != OpenDataset(second, model, 1)->Checksum());
  const Model net = LoadModel("mnist-convnet");
  CHECK(OpenDataset("data/digits", net, 1)->size() == 1500 + 297);
  const std::string empty = folder.File("empty");
  std::filesystem::create_directory(empty);
  CHECK(ErrorOf([&] { (void)OpenDataset(empty, model, 1); }) ==
        empty + ": got a folder without a file, expected a file, or a folder of files");
  // Labels alone: this crashed.
  std::ofstream(empty + "/labels") << std::string("\0\0\x08\x01\0\0\0\0", 8);
  CHECK(ErrorOf([&] { (void)OpenDataset(empty, net, 1); }) ==
        empty +
            ": got IDX files without one named *images-idx3*, expected images, whose labels "
            "lie beside them");
}

TEST_CASE("files that cannot feed a model's inputs") {
  const ScratchFolder folder;
  const std::string file = folder.Write("text.txt", std::string(4096, 'a'));
  const auto error = [&](const Model& model) {
    try {
      (void)OpenDataset(file, model, 1);
    } catch (const InputError& e) {
      return std::string(e.what());
    }
    return std::string("no error");
  };
  const std::string refusal =
      file +
      ": got data for the inputs of tiny, expected a model that takes one image and its label, or "
      "tokens with at most one label each; other models train on random data";
  Model model = TokenModel(256, 3, false, false);
  CHECK(error(model) == "no error");
  model.tensors[2].elements = 4;  // more labels than tokens
  CHECK(error(model) == refusal);
  model = TokenModel(256, 3, false, false);
  model.tensors[0].input = InputKind::kPositions;  // no tokens
  CHECK(error(model) == refusal);
  model = TokenModel(256, 3, false, false);
  model.tensors[1].input = InputKind::kFeatures;  // tokens and an image
  CHECK(error(model) == refusal);
}

TEST_CASE("token files of two and four bytes, with and without llm.c's header") {
  const ScratchFolder folder;
  const std::string body("\x01\x00\xff\x02\x03\x00\x04\x00\x05\x00", 10);
  const auto raw =
      OpenDataset(folder.Write("raw.bin", body), TokenModel(50000, 2, false, false), 1);
  REQUIRE(raw->size() == 2);
  CHECK(Ids(*raw, 0, InputKind::kTokens, 2) == Numbers{1, 767});
  CHECK(Ids(*raw, 1, InputKind::kLabels, 2) == Numbers{4, 5});

  std::string header(1024, '\0');
  const std::int32_t words[3] = {20240520, 1, 4};
  std::memcpy(header.data(), words, sizeof words);
  const auto llmc =
      OpenDataset(folder.Write("llmc.bin", header + body), TokenModel(50000, 3, false, false), 1);
  CHECK(llmc->size() == 1);  // four tokens count, the fifth is beyond the header's number
  CHECK(Ids(*llmc, 0, InputKind::kLabels, 3) == Numbers{767, 3, 4});
  const std::int32_t wrong[3] = {20240520, 2, 400};
  std::memcpy(header.data(), wrong, sizeof wrong);
  const std::string bad = folder.Write("bad.bin", header + body);
  CHECK(ErrorOf([&] { (void)OpenDataset(bad, TokenModel(50000, 3, false, false), 1); }) ==
        bad +
            ": got a header with version 2 and 400 tokens, expected version 1 and at most the 5 "
            "tokens of the file");

  const std::string wide("\x01\x00\x00\x00\x02\x00\x01\x00\x03\x00\x00\x00", 12);
  const std::string file = folder.Write("wide", wide);
  const auto four = OpenDataset("u32:" + file, TokenModel(100000, 2, false, false), 1);
  CHECK(Ids(*four, 0, InputKind::kTokens, 2) == Numbers{1, 65538});
  const auto small = OpenDataset("u32:" + file, TokenModel(100, 2, false, false), 1);
  CHECK(ErrorOf([&] { (void)Ids(*small, 0, InputKind::kTokens, 2); }) ==
        file + ": token 1: got 65538, expected a token below the model's vocabulary of 100");
  CHECK(ErrorOf([&] {
          (void)OpenDataset(folder.Write("odd.bin", "abc"), TokenModel(9, 2, false, false), 1);
        }) == folder.File("odd.bin") + ": got 3 bytes, expected whole tokens of 2 bytes");
  CHECK(ErrorOf([&] {
          (void)OpenDataset(folder.Write("short", "abc"), TokenModel(256, 3, false, false), 1);
        }) == folder.File("short") + ": got 3 tokens, expected at least the 4 of one sample");
  CHECK(ErrorOf([&] {
          (void)OpenDataset(folder.File("none"), TokenModel(256, 3, false, false), 1);
        }) == folder.File("none") + ": got no such file, expected a readable file");
}

TEST_CASE("masked tokens: 15 % are hidden and asked for, the others only read") {
  const ScratchFolder folder;
  std::string text;
  for (int i = 0; i < 20000; ++i) {
    text += static_cast<char>('a' + i % 26);
  }
  const auto data = OpenDataset(folder.Write("t", text), TokenModel(256, 100, true, false), 1);
  REQUIRE(data->size() == 200);
  std::int64_t masked = 0, wrong = 0;
  for (std::int64_t s = 0; s < data->size(); ++s) {
    const Numbers tokens = Ids(*data, s, InputKind::kTokens, 100);
    const Numbers labels = Ids(*data, s, InputKind::kLabels, 100);
    for (std::int64_t i = 0; i < 100; ++i) {
      const std::int64_t original = 'a' + (s * 100 + i) % 26;
      const std::int64_t label = labels[static_cast<std::size_t>(i)];
      const std::int64_t token = tokens[static_cast<std::size_t>(i)];
      masked += label == original ? 1 : 0;
      wrong += (label == -100 && token == original) || (label == original && token == 103) ? 0 : 1;
    }
  }
  CHECK(wrong == 0);
  // Binomial: 3,000 expected, deviation 50.5.
  CHECK(std::abs(masked - 3000) < 253);
}

TEST_CASE("random data depends on seed, sample and input alone") {
  const Model net = LoadModel("mnist-convnet");
  const auto data = OpenDataset("random:10", net, 1);
  CHECK(data->size() == 10);
  std::vector<float> a(784), b(784);
  std::int64_t label = -1;
  data->Write(3, InputKind::kFeatures, {a.data(), DType::kFp32, 784});
  data->Write(3, InputKind::kFeatures, {b.data(), DType::kFp32, 784});
  CHECK(a == b);
  data->Write(4, InputKind::kFeatures, {b.data(), DType::kFp32, 784});
  CHECK(a != b);
  std::set<std::int64_t> labels;
  for (std::int64_t s = 0; s < 10; ++s) {
    data->Write(s, InputKind::kLabels, {&label, DType::kInt64, 1});
    CHECK(label >= 0);
    CHECK(label < 10);
    labels.insert(label);
  }
  CHECK(labels.size() > 3);
  CHECK(ErrorOf([&] { (void)OpenDataset("random:0", net, 1); }) ==
        "data: got \"random:0\", expected random:N with N from 1 to 2^40");
}

TEST_CASE("batches do not depend on ranks and micro-batches, and empty places count for nothing") {
  const ScratchFolder folder;
  const Model model = TokenModel(256, 3, false, false);
  const auto data = OpenDataset(folder.Write("t", "abcdefghijklmnop"), model, 1);
  REQUIRE(data->size() == 5);
  const Sampler sampler = {.dataset_size = 5, .global_batch = 4, .tail = EpochTail::kPad};
  const auto read = [&](std::int64_t step, std::int64_t parts) {
    const std::int64_t count = 4 / parts;
    Numbers tokens, labels;
    for (std::int64_t part = 0; part < parts; ++part) {
      Numbers t(static_cast<std::size_t>(3 * count)), p(3), l = t;
      const std::vector<View> views = {{t.data(), DType::kInt64, 3 * count},
                                       {p.data(), DType::kInt64, 3},
                                       {l.data(), DType::kInt64, 3 * count}};
      WriteBatch(model, *data, sampler, {step, part * count, count}, views);
      tokens.insert(tokens.end(), t.begin(), t.end());
      labels.insert(labels.end(), l.begin(), l.end());
      CHECK(p == Numbers{0, 1, 2});
    }
    tokens.insert(tokens.end(), labels.begin(), labels.end());
    return tokens;
  };
  for (std::int64_t step = 0; step < 4; ++step) {
    CHECK(read(step, 1) == read(step, 2));
    CHECK(read(step, 1) == read(step, 4));
  }
  // The second step of an epoch holds one sample.
  const Numbers last = read(1, 1);
  CHECK(std::count(last.begin() + 12, last.end(), -100) == 9);
  CHECK(std::count(last.begin(), last.begin() + 12, 0) == 9);
}

}  // namespace
}  // namespace shardwright
