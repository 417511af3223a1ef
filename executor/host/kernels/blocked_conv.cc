#include "executor/host/kernels/blocked_conv.h"

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "core/error.h"
#include "core/library.h"
#include "executor/host/kernels/rows.h"
#include "executor/host/kernels/vector.h"
#include "models/kernels/host.h"

namespace shardwright {
namespace {

constexpr const char* kModule = "shardwright_onednn.so";

// Null: there is none, and convolutions are unfolded (conv.cc). A module that the user names has to
// be there.
MakeBlockedConvFunction LoadModule() {
  const std::string folder = ProgramFolder();
  std::string problem;
  void* const module = LoadLibrary("SHARDWRIGHT_ONEDNN_MODULE",
                                   {folder + kModule, folder + "../lib/shardwright/" + kModule},
                                   SHARDWRIGHT_ONEDNN_MODULE, &problem);
  const char* const named = std::getenv("SHARDWRIGHT_ONEDNN_MODULE");
  if (module == nullptr && named != nullptr && *named != '\0') {
    throw EnvironmentError("SHARDWRIGHT_ONEDNN_MODULE: " + problem);
  }
  MakeBlockedConvFunction make = nullptr;
  return module != nullptr && FindFunction(module, "ShardwrightMakeBlockedConv", &make) ? make
                                                                                        : nullptr;
}

MakeBlockedConvFunction LoadedModule() {
  static const MakeBlockedConvFunction make = LoadModule();
  return make;
}

// Kept for the life of the process: the library compiles code for each shape.
const BlockedConv* Find(const BlockedConvShape& shape, ConvPass pass) {
  const MakeBlockedConvFunction make = LoadedModule();
  if (make == nullptr) {
    return nullptr;
  }
  static std::mutex mutex;
  static std::map<BlockedConvShape, std::unique_ptr<BlockedConv>> known;
  const std::scoped_lock lock(mutex);
  std::unique_ptr<BlockedConv>& conv = known[shape];
  if (conv == nullptr) {
    conv.reset(make(shape));
  }
  return conv->Runs(pass) ? conv.get() : nullptr;
}

bool IsPlain(const OpSpec& spec) {
  return spec.groups == 1 && !spec.tokens_out && ConvSizesOf(spec).unfolds;
}

BlockedConvShape ShapeOf(const OpSpec& spec) {
  return {spec.in,        spec.out,    spec.height, spec.width,  spec.height_out,
          spec.width_out, spec.kernel, spec.stride, spec.padding};
}

const float* Floats(const ConstView& view) {
  return view.dtype == DType::kFp32 ? static_cast<const float*>(view.data) : nullptr;
}

// Calls f(image, input, output) for every image of the batch, which threads share, with room for it
// in blocks; `shared` is what is left of the workspace.
template <class F>
void ForEachImage(const ModelOpCall& call, const Scratch& shared, const F& f) {
  const HostBlockedConv blocked = BlockedConvOf(*call.spec);
  ForEachPart(call.team, call.batch, LeastConvImages(ConvSizesOf(*call.spec)),
              [&](std::int64_t first, std::int64_t last, std::size_t worker) {
                Scratch scratch = worker == 0 ? shared : Scratch(WorkspaceOf(call, worker));
                float* const input = scratch.Floats(blocked.input);
                float* const output = scratch.Floats(blocked.output);
                for (std::int64_t image = first; image < last; ++image) {
                  f(image, input, output);
                }
              });
}

}  // namespace

void LoadBlockedConvs() {
  (void)LoadedModule();
}

bool BlockedConvForward(const ModelOpCall& call) {
  const OpSpec& spec = *call.spec;
  const float* const x = Floats(call.inputs[0]);
  const float* const weights = Floats(call.params[0]);
  if (!IsPlain(spec) || x == nullptr || weights == nullptr ||
      call.outputs[0].dtype != DType::kFp32) {
    return false;
  }
  BlockedConvShape shape = ShapeOf(spec);
  shape.has_bias = spec.has_bias;
  const BlockedConv* const conv = Find(shape, ConvPass::kForward);
  if (conv == nullptr) {
    return false;
  }
  const HostConvSizes sizes = ConvSizesOf(spec);
  auto* const y = static_cast<float*>(call.outputs[0].data);
  Scratch shared(call.workspace);
  float* const packed = shared.Floats(BlockedConvOf(spec).weights);
  float* const bias = spec.has_bias ? shared.Floats(spec.out) : nullptr;
  conv->PackWeights(ConvPass::kForward, weights, packed);
  if (spec.has_bias) {
    LoadFloats(call.params[1], 0, spec.out, bias);
  }
  ForEachImage(call, shared, [&](std::int64_t image, float* input, float* output) {
    conv->Forward(x + image * spec.in * sizes.pixels_in, packed, bias,
                  y + image * spec.out * sizes.pixels_out, input, output);
  });
  return true;
}

bool BlockedConvDataGrad(const ModelOpCall& call) {
  const OpSpec& spec = *call.spec;
  const float* const dy = Floats(call.output_grads[0]);
  const float* const weights = Floats(call.params[0]);
  if (!IsPlain(spec) || dy == nullptr || weights == nullptr ||
      call.input_grads[0].dtype != DType::kFp32) {
    return false;
  }
  const BlockedConv* const conv = Find(ShapeOf(spec), ConvPass::kDataGrad);
  if (conv == nullptr) {
    return false;
  }
  const HostConvSizes sizes = ConvSizesOf(spec);
  auto* const dx = static_cast<float*>(call.input_grads[0].data);
  Scratch shared(call.workspace);
  float* const packed = shared.Floats(BlockedConvOf(spec).weights);
  conv->PackWeights(ConvPass::kDataGrad, weights, packed);
  ForEachImage(call, shared, [&](std::int64_t image, float* input, float* output) {
    conv->DataGrad(dy + image * spec.out * sizes.pixels_out, packed,
                   dx + image * spec.in * sizes.pixels_in, input, output);
  });
  return true;
}

namespace {

// The weights' gradient of some output channels, image after image: always the same channels
// together, however many threads there are, so that sums are the same.
struct ChannelSums {
  const ModelOpCall& call;
  const float* x = nullptr;
  const float* dy = nullptr;
  std::int64_t first = 0, count = 0;  // channels

  // Null: the library cannot, for all or for the last images.
  [[nodiscard]] const BlockedConv* Of(std::int64_t images) const {
    BlockedConvShape shape = ShapeOf(*call.spec);
    shape.channels_out = count;
    shape.images = images;
    return Find(shape, ConvPass::kWeightGrad);
  }

  void Run(std::int64_t images, Scratch scratch, float* sums) const {
    const OpSpec& spec = *call.spec;
    const HostConvSizes sizes = ConvSizesOf(spec);
    const HostBlockedConv blocked = BlockedConvOf(spec);
    float* const input = scratch.Floats(images * blocked.input);
    float* const output = scratch.Floats(images * blocked.part_output);
    float* const packed = scratch.Floats(blocked.part_weights);
    float* const total = scratch.Floats(blocked.part_weights);
    const std::int64_t of_image = spec.out * sizes.pixels_out;
    std::fill_n(total, blocked.part_weights, 0.0F);
    std::fill_n(packed, blocked.part_weights, 0.0F);
    for (std::int64_t image = 0; image < call.batch; image += images) {
      Of(std::min(images, call.batch - image))
          ->WeightGrad(x + image * spec.in * sizes.pixels_in,
                       dy + image * of_image + first * sizes.pixels_out, of_image, packed, input,
                       output);
      VectorAdd(1.0F, packed, total, blocked.part_weights);
    }
    Of(images)->UnpackWeights(total, sums + first * sizes.taps);
  }
};

}  // namespace

bool BlockedConvWeightGrad(const ModelOpCall& call) {
  const OpSpec& spec = *call.spec;
  const float* const x = Floats(call.inputs[0]);
  const float* const dy = Floats(call.output_grads[0]);
  if (!IsPlain(spec) || x == nullptr || dy == nullptr) {
    return false;
  }
  const HostBlockedConv blocked = BlockedConvOf(spec);
  const std::int64_t images = std::min(blocked.images, call.batch);
  const std::int64_t parts = (spec.out + kBlockedConvPart - 1) / kBlockedConvPart;
  const auto part = [&](std::int64_t i) {
    const std::int64_t first = i * kBlockedConvPart;
    return ChannelSums{call, x, dy, first, std::min(kBlockedConvPart, spec.out - first)};
  };
  for (const std::int64_t i : {std::int64_t{0}, parts - 1}) {
    const std::int64_t rest = call.batch % images;
    if (part(i).Of(images) == nullptr || (rest > 0 && part(i).Of(rest) == nullptr)) {
      return false;
    }
  }
  Scratch shared(call.workspace);
  const std::int64_t elements = spec.out * ConvSizesOf(spec).taps;
  float* const sums = shared.Floats(elements);
  ForEachPart(call.team, parts, 1, [&](std::int64_t first, std::int64_t last, std::size_t worker) {
    for (std::int64_t i = first; i < last; ++i) {
      part(i).Run(images, worker == 0 ? shared : Scratch(WorkspaceOf(call, worker)), sums);
    }
  });
  StoreParamGrad(sums, elements, call.param_grads[0], 0);
  return true;
}

}  // namespace shardwright
